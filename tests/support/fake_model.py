"""A model that computes nothing but remembers everything: each KV value names its whole prefix.

The KV of a position is 64 bits per layer, made from the KV of the position before, the token, and
what else decides it (weights, adapter, salt, image). So a device block that holds another prefix's
bytes, or old weights', is seen at once, and the next token is a function of what the memory holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)

LAYERS = ("layers.0", "layers.1")
VOCABULARY = 500
_MASK = (1 << 64) - 1
_LAYER_MARKS = np.array([0, 0x5555_5555_5555_5555], dtype=np.uint64)


def mix(state: int, value: int) -> int:
    """The next 64 bits of a chain; a change anywhere before changes all that follows."""
    state = ((state ^ value) * 0x9E37_79B9_7F4A_7C15 + 0xD1B5_4A32_D192_ED03) & _MASK
    return state ^ (state >> 29)


def kv_cache_config(block_count: int, block_tokens: int) -> KVCacheConfig:
    """One group of full attention, eight bytes per token and layer, layer after layer."""
    spec = FullAttentionSpec(
        block_size=block_tokens, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    page_bytes = spec.page_size_bytes
    tensor = KVCacheTensor(
        size=len(LAYERS) * page_bytes * block_count,
        layers=list(LAYERS),
        layer_stride=page_bytes * block_count,
        block_stride=page_bytes,
    )
    return KVCacheConfig(block_count, [tensor], [KVCacheGroupSpec(list(LAYERS), spec)])


class DeviceMemory:
    """The device's KV cache: real tensors, as vLLM's own runner would make them."""

    def __init__(self, block_count: int, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        shape = (len(LAYERS), block_count, 1, block_tokens, 2)
        storage = torch.zeros(shape, dtype=torch.float32)
        self.kv_caches = {name: storage[at] for at, name in enumerate(LAYERS)}
        self.blocks: npt.NDArray[np.uint64] = (
            storage.numpy().view(np.uint64).reshape(len(LAYERS), block_count, block_tokens)
        )

    def _places(self, blocks: Sequence[int], first: int, end: int) -> tuple[object, object]:
        positions = np.arange(first, end)
        return np.asarray(blocks)[positions // self.block_tokens], positions % self.block_tokens

    def read(self, blocks: Sequence[int], first: int, end: int) -> npt.NDArray[np.uint64]:
        """KV of positions of a request, `(layers, positions)`."""
        block, place = self._places(blocks, first, end)
        return self.blocks[:, block, place] ^ _LAYER_MARKS[:, None]

    def write(self, blocks: Sequence[int], first: int, values: Sequence[int]) -> None:
        block, place = self._places(blocks, first, first + len(values))
        row = np.array(values, dtype=np.uint64)
        self.blocks[:, block, place] = row[None, :] ^ _LAYER_MARKS[:, None]


@dataclass
class Text:
    """A request as the model sees it: its tokens, and what beside them decides its KV."""

    tokens: list[int]
    seed: int
    seed_parts: tuple[str, ...] = ()
    images: dict[int, int] = field(default_factory=dict)  # position → what is shown there
    kv: list[int] = field(default_factory=list)

    def kv_until(self, end: int) -> list[int]:
        """The right KV of positions `0 … end - 1`; tokens not known yet are what the model says."""
        state = self.kv[-1] if self.kv else self.seed
        while len(self.kv) < end:
            at = len(self.kv)
            if at == len(self.tokens):
                self.tokens.append(next_token(state))
            state = mix(state, self.tokens[at] + self.images.get(at, 0))
            self.kv.append(state)
        return self.kv


def next_token(state: int) -> int:
    """What a position's KV makes the model say next."""
    return state % VOCABULARY
