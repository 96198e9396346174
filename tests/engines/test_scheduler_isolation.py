"""Prompts that look alike and must not share KV: salts, adapters, images.

The rig's model makes their KV differ too, so a shared block would also fail the forward pass.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from rig_parts import BLOCK_TOKENS, Setup
from scheduler_rig import Rig

from emberkv.tiers.memory import MemoryStorage

pytestmark = pytest.mark.engine

KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "salt": ({"salt": "tenant-a"}, {"salt": "tenant-b"}),
    "salt-or-none": ({"salt": "tenant-a"}, {}),
    "adapter": ({"adapter": "poet"}, {"adapter": "lawyer"}),
    "adapter-or-none": ({"adapter": "poet"}, {}),
    "image": ({"image": "cat"}, {"image": "dog"}),
    "image-or-none": ({"image": "cat"}, {}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("blocks_per_chunk", [1, 2])
@pytest.mark.parametrize("from_disk", [False, True], ids=["ram", "disk"])
def test_equal_tokens_with_another_identity_share_nothing(
    make_rig: Callable[[Setup], Rig], kind: str, blocks_per_chunk: int, from_disk: bool
) -> None:
    storage = MemoryStorage(64, Setup(blocks_per_chunk=blocks_per_chunk).chunk_bytes)
    rig = make_rig(Setup(blocks_per_chunk=blocks_per_chunk, ram_chunks=8, storage=storage))
    source = random.Random(1)
    prompt = [source.randrange(500) for _ in range(200)]
    mine, other = KINDS[kind]
    rig.serve("mine", prompt, 2, **mine)
    rig.tick()
    if from_disk:
        for at in range(2):
            rig.serve(f"filler-{at}", [(7 * at + 11 * n) % 500 for n in range(600)])
        rig.tick()
    rig.forget_device()
    assert rig.serve("other", prompt, 2, **other) == 0
    rig.tick()
    rig.forget_device()
    assert rig.serve("mine-again", prompt, 2, **mine) == 6 * BLOCK_TOKENS
    rig.forget_device()
    assert rig.serve("other-again", prompt, 2, **other) == 6 * BLOCK_TOKENS
    assert rig.outputs["mine-again"] == rig.outputs["mine"]
    assert rig.outputs["mine"] != rig.outputs["other"]
