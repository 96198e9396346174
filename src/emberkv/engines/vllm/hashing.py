"""The names of a prompt's chunks, made by vLLM's own functions exactly as a request's are."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.request import Request

from emberkv.domain.types import ChunkKey
from emberkv.engines.vllm import compat
from emberkv.errors import UsageError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_offload.config import OffloadingConfig

PIECE_BLOCKS: Final = 32
"""Blocks hashed at a time: in between, the engine's thread gets the interpreter if it wants it."""


class PromptHasher:
    """Implements `HashPrompt` for the engine in whose process it is: the hash seed is there.

    Text alone and no adapter: what images and adapters add to a hash is not known here.
    """

    def __init__(self, vllm_config: VllmConfig, config: OffloadingConfig) -> None:
        self._algorithm = vllm_config.cache_config.prefix_caching_hash_algo
        self._tokens_per_hash = config.cache.tokens_per_hash
        tokens_per_chunk = config.groups[0].tokens_per_block * config.cache.blocks_per_chunk
        self._hashes_per_chunk = tokens_per_chunk // self._tokens_per_hash

    def __call__(self, tokens: Sequence[int], cache_salt: str | None, /) -> list[ChunkKey]:
        if cache_salt == "":
            raise UsageError("a cache salt is not empty")
        hasher = get_request_block_hasher(
            self._tokens_per_hash, get_hash_fn_by_name(self._algorithm)
        )
        piece_tokens = PIECE_BLOCKS * self._tokens_per_hash
        request = Request(
            "dry run",
            list(tokens[:piece_tokens]),
            SamplingParams(max_tokens=1),
            pooling_params=None,
            cache_salt=cache_salt,
            block_hasher=hasher,
        )
        for first in range(piece_tokens, len(tokens), piece_tokens):
            request.append_output_token_ids(list(tokens[first : first + piece_tokens]))
            time.sleep(0)
        return compat.chunk_keys(request, self._hashes_per_chunk)
