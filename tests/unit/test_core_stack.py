"""Decisions of the tier stack, case by case; the properties are in tests/properties."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from emberkv.core.audit import AuditedStack
from emberkv.core.counts import Event
from emberkv.core.limits import Limits
from emberkv.core.residents import Residents
from emberkv.core.stack import TierStack
from emberkv.domain.types import (
    DISK,
    RAM,
    ChunkKey,
    Copy,
    Drop,
    Entry,
    Level,
    Outcome,
    RequestId,
    Slot,
)
from emberkv.errors import ConfigError, InvariantError
from emberkv.policy.eviction import Lru

A, B, C = RequestId("a"), RequestId("b"), RequestId("c")
REMOTE = Level(2)


def stack_of(*slot_counts: int, limits: Limits | None = None) -> TierStack:
    tiers = [Residents(count, 1, Lru(count)) for count in slot_counts]
    return AuditedStack(tiers, limits or Limits())


def chain(name: str, length: int) -> list[ChunkKey]:
    return [ChunkKey(f"{name}{number}".encode()) for number in range(length)]


def entries(keys: Sequence[ChunkKey], first_slot: int = 0, start: int = 0) -> list[Entry]:
    """Records of `keys[start:]` in consecutive slots."""
    return [
        Entry(keys[n], keys[n - 1] if n else None, Slot(first_slot + n - start))
        for n in range(start, len(keys))
    ]


def put(stack: TierStack, level: Level, found: Sequence[Entry]) -> None:
    """Have a tier hold chunks from an earlier run."""
    stack.hold(level, [entry.slot for entry in found])
    stack.adopt(level, found)


def compute(stack: TierStack, request: RequestId, keys: Sequence[ChunkKey]) -> None:
    """Have the engine compute and write a whole chain."""
    stack.offload(request, keys, None, 0.0)
    stack.stored(request, keys, 0.0)


def copies(stack: TierStack) -> list[Copy]:
    return [effect for effect in stack.take_effects() if isinstance(effect, Copy)]


def end_copies(stack: TierStack, outcome: Outcome = Outcome.OK, now_s: float = 0.0) -> None:
    for copy in copies(stack):
        stack.done(copy.transfer, [(n, outcome) for n in range(len(copy.keys))], now_s)


# ── promotions ───────────────────────────────────────────────────────────────────────────────


def test_a_promotion_keeps_to_the_limit_even_alone() -> None:
    stack = stack_of(8, 8, limits=Limits(promotion_chunks=2))
    keys = chain("k", 5)
    put(stack, DISK, entries(keys))
    stack.promote(A, keys, 0.0)
    assert [copy.keys for copy in copies(stack)] == [tuple(keys[:2])]
    assert stack.counts[Event.PROMOTION_CUT, RAM] == 3


def test_one_promotion_serves_two_who_wait() -> None:
    stack = stack_of(8, 8)
    keys = chain("k", 3)
    put(stack, DISK, entries(keys))
    stack.promote(A, keys, 0.0)
    stack.promote(B, keys[:2], 0.0)
    assert len(copies(stack)) == 1
    assert stack.waiting(B, 0, 0.0)


def test_a_chains_own_tail_makes_room_for_its_head() -> None:
    stack = stack_of(2, 8)
    keys = chain("k", 4)
    put(stack, DISK, entries(keys))
    put(stack, RAM, entries(keys, start=2))
    stack.promote(A, keys, 0.0)
    drop, copy = stack.take_effects()
    assert isinstance(drop, Drop)
    assert set(drop.keys) == set(keys[2:])
    assert isinstance(copy, Copy)
    assert copy.keys == tuple(keys[:2])


def test_an_answer_from_the_queue_pins_what_is_ready() -> None:
    stack = stack_of(4, 8)
    others, keys = chain("x", 3), chain("k", 3)
    put(stack, DISK, entries(others) + entries(keys, first_slot=3))
    put(stack, RAM, entries(keys[:1]))
    stack.promote(A, others, 0.0)
    stack.promote(B, keys, 0.0)
    assert stack.promotions.queued(B)
    assert stack.waiting(B, 0, 0.0)
    assert not stack.waiting(B, 1, 31.0)
    assert stack.tiers[RAM].entries[keys[0]].pins == 1
    stack.end(B)
    assert stack.tiers[RAM].entries[keys[0]].pins == 0


def test_a_chunk_on_its_way_from_a_tier_that_has_stopped_is_not_known() -> None:
    stack = stack_of(4, 4)
    keys = chain("k", 1)
    put(stack, DISK, entries(keys))
    stack.promote(A, keys, 0.0)
    assert stack.residence(keys[0], 0.5) == DISK
    assert stack.residence(keys[0], 1.5) is None


def test_a_tier_that_has_stopped_is_not_promoted_from() -> None:
    stack = stack_of(8, 8, 8)
    first, second = chain("k", 1), chain("m", 2)
    put(stack, DISK, entries(first) + entries(second, first_slot=1))
    put(stack, REMOTE, entries(second))
    stack.promote(A, first, 0.0)
    stack.promote(B, second, 5.0)
    assert [(copy.source, copy.keys) for copy in copies(stack)] == [
        (DISK, tuple(first)),
        (REMOTE, tuple(second)),
    ]


def test_a_failed_chunk_cuts_the_promise_before_it() -> None:
    stack = stack_of(8, 8)
    keys = chain("k", 3)
    put(stack, DISK, entries(keys))
    stack.promote(A, keys, 0.0)
    [copy] = copies(stack)
    stack.done(copy.transfer, [(1, Outcome.FAILED)], 0.1)
    assert stack.waiting(A, 0, 0.1)
    stack.done(copy.transfer, [(0, Outcome.OK), (2, Outcome.OK)], 0.2)
    assert not stack.waiting(A, 1, 0.2)
    assert [stack.residence(key, 0.2) for key in keys] == [RAM, DISK, RAM]


# ── what turns out bad ───────────────────────────────────────────────────────────────────────


def test_a_corrupt_chunk_is_dropped_from_its_tier() -> None:
    stack = stack_of(4, 4)
    keys = chain("k", 1)
    put(stack, DISK, entries(keys))
    stack.promote(A, keys, 0.0)
    end_copies(stack, Outcome.CORRUPT)
    assert {(drop.level, drop.keys) for drop in stack.take_effects()} == {  # type: ignore[union-attr]
        (RAM, tuple(keys)),
        (DISK, tuple(keys)),
    }
    assert stack.residence(keys[0], 0.0) is None
    assert stack.counts[Event.LOST, DISK] == 1


def test_a_chunk_found_corrupt_in_ram_is_no_longer_offered() -> None:
    stack = stack_of(4, 4)
    keys = chain("k", 2)
    compute(stack, A, keys)
    [copy] = copies(stack)
    stack.load(B, keys, 0.0)
    stack.done(copy.transfer, [(0, Outcome.CORRUPT), (1, Outcome.OK)], 0.0)
    assert stack.residence(keys[0], 0.0) is None
    assert stack.tiers[RAM].entries[keys[0]].pins == 1  # the engine is still reading it
    stack.loaded(B, 0.0)
    assert keys[0] not in stack.tiers[RAM].entries


# ── write behind ─────────────────────────────────────────────────────────────────────────────


def test_what_a_tier_has_got_is_passed_on_at_the_next_step() -> None:
    stack = stack_of(4, 4, 4)
    keys = chain("k", 2)
    compute(stack, A, keys)
    end_copies(stack)
    assert copies(stack) == []
    stack.settle(0.0)
    [copy] = copies(stack)
    assert (copy.source, copy.target, copy.keys) == (DISK, REMOTE, tuple(keys))


def test_a_chunk_that_a_tier_got_twice_within_a_step_is_passed_on_once() -> None:
    stack = stack_of(4, 4, 4)
    keys = chain("k", 1)
    compute(stack, A, keys)
    end_copies(stack)
    stack.lose_tier(DISK, [Slot(slot) for slot in range(4)], 0.0)
    stack.free_held(DISK, [Slot(slot) for slot in range(4)])
    stack.load(A, keys, 0.0)
    end_copies(stack)
    stack.settle(0.0)
    assert [copy.keys for copy in copies(stack)] == [tuple(keys)]


def test_no_room_is_made_for_chunks_that_cannot_be_reached() -> None:
    stack = stack_of(4, 2)
    others, keys = chain("x", 2), chain("k", 2)
    put(stack, DISK, entries(others))
    put(stack, RAM, entries(keys))
    stack.load(A, keys[1:], 0.0)
    assert stack.take_effects() == []
    assert stack.counts[Event.REFUSED_UNREACHABLE, DISK] == 1


def test_nothing_is_counted_where_nothing_happens() -> None:
    stack = stack_of(4, 4)
    compute(stack, A, chain("k", 2))
    assert set(stack.counts) == {(Event.ADMITTED, RAM)}


# ── start and trouble ────────────────────────────────────────────────────────────────────────


def test_a_chunk_found_twice_keeps_one_slot() -> None:
    stack = stack_of(4, 4)
    keys = chain("k", 2)
    twice = [*entries(keys), Entry(keys[1], keys[0], Slot(2)), Entry(keys[0], None, Slot(3))]
    put(stack, DISK, twice)
    assert stack.tiers[DISK].free_slots() == {2, 3}
    assert [effect.slots for effect in stack.take_effects() if isinstance(effect, Drop)] == [
        (2,),
        (3,),
    ]


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("turn", [0, 1, 2])
def test_records_in_a_circle_are_refused(length: int, turn: int) -> None:
    stack = stack_of(4, 4)
    keys = chain("k", length)
    circle = [Entry(keys[n], keys[n - 1], Slot(n)) for n in range(length)]
    put(stack, DISK, circle[turn:] + circle[:turn])
    assert len(stack.tiers[DISK].entries) == length - 1


def test_a_lost_tier_takes_back_what_nobody_has_taken() -> None:
    stack = stack_of(4, 4)
    keys = chain("k", 2)
    compute(stack, A, keys)
    stack.lose_tier(DISK, [Slot(slot) for slot in range(4)], 0.0)
    assert copies(stack) == []
    assert [stack.residence(key, 0.0) for key in keys] == [RAM, RAM]
    compute(stack, B, chain("m", 1))
    assert copies(stack) == []


def test_a_tier_cannot_be_lost_under_a_copy() -> None:
    stack = stack_of(4, 4)
    compute(stack, A, chain("k", 2))
    stack.take_effects()
    with pytest.raises(InvariantError, match="lost while copy 1 is open"):
        stack.lose_tier(DISK, [], 0.0)


def test_calls_that_make_no_sense_are_named() -> None:
    stack = stack_of(4)
    with pytest.raises(InvariantError, match="not held"):
        stack.free_held(RAM, [Slot(1)])
    with pytest.raises(InvariantError, match="not ready"):
        stack.load(A, chain("k", 1), 0.0)
    compute(stack, A, chain("k", 1))
    stack.load(A, chain("k", 1), 0.0)
    with pytest.raises(InvariantError, match="loads twice"):
        stack.load(A, chain("k", 1), 0.0)


def test_limits_are_greater_than_nothing() -> None:
    with pytest.raises(ConfigError, match="max_wait_s must be greater than 0"):
        Limits(max_wait_s=0)


# ── eviction ─────────────────────────────────────────────────────────────────────────────────


def test_a_parent_follows_its_last_child_out() -> None:
    """Though the policy has the parent first."""
    stack = stack_of(4)
    keys = chain("k", 2)
    put(stack, RAM, entries(keys[:1]))
    put(stack, RAM, [Entry(keys[1], keys[0], Slot(1))])
    assert next(iter(stack.tiers[RAM].policy.victims())) == keys[0]
    stack.offload(A, chain("m", 4), None, 0.0)
    [drop] = stack.take_effects()
    assert drop.keys == (keys[1], keys[0])


def test_a_chain_does_not_evict_itself() -> None:
    stack = stack_of(3)
    keys = chain("k", 5)
    admitted = stack.offload(A, keys, None, 0.0)
    assert [resident.key for resident in admitted] == keys[:3]
    assert stack.counts[Event.REFUSED_NO_ROOM, RAM] == 2
