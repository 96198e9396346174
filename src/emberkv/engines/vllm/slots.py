"""The load/store spec that travels from our manager to the workers: arena slots, in chunk order."""

from __future__ import annotations

from vllm.v1.kv_offload.base import BlockIDsLoadStoreSpec


class ArenaSlots(BlockIDsLoadStoreSpec):
    """Slots of the arena, one per chunk, in the order of the keys they were given for."""
