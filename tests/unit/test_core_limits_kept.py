"""Limits and shut tiers hold for look-ahead, probes and chunks on their way too."""

from __future__ import annotations

from emberkv.core.economy import Terms
from emberkv.core.limits import Limits
from emberkv.core.residents import Residents
from emberkv.core.stack import TierStack
from emberkv.domain.types import DISK, RAM, ChunkKey, Entry, RequestId, Slot
from emberkv.policy.eviction.lru import Lru

A, B = RequestId("a"), RequestId("b")


def stack_with(on_disk: int, in_ram: int = 0, **limits: float) -> tuple[TierStack, list[ChunkKey]]:
    """A stack of 8 and 16 slots whose disk, and RAM for the head, hold a chain."""
    stack = TierStack([Residents(n, 1, Lru(n)) for n in (8, 16)], Limits(**limits), Terms())  # type: ignore[arg-type]
    keys = [ChunkKey(b"k%d" % at) for at in range(on_disk)]
    for level, count in ((RAM, in_ram), (DISK, on_disk)):
        slots = [Slot(at) for at in range(count)]
        stack.hold(level, slots)
        parents = [None, *keys]
        stack.adopt(level, [Entry(keys[at], parents[at], slots[at]) for at in slots])
    return stack, keys


def test_look_ahead_keeps_to_its_share_of_ram() -> None:
    stack, keys = stack_with(6, look_ahead_share=0.25)
    stack.look_ahead(A, keys, 0.0)
    assert sum(lease.pinned for lease in stack.promotions.leases()) <= 2


def test_a_probe_keeps_to_the_limit_of_promotions() -> None:
    stack, keys = stack_with(6, promotion_chunks=1)
    stack.probe(A, keys, 100.0)
    assert stack.transfers.under_way(RAM) <= 1


def test_a_chunk_on_its_way_from_a_tier_that_does_not_count_is_nowhere() -> None:
    stack, keys = stack_with(2)
    stack.promote(A, keys, 0.0)
    assert stack.residence(keys[0], 0.0) == DISK
    assert stack.residence(keys[0], 0.0, frozenset({RAM})) is None
