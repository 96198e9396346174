"""`emberkv.core.check` once more, for millions of steps: says that a rule is broken, not which.

It is written down apart from `check` and in one pass per tier; whoever runs it runs `check` beside
it on a sample, so that it can't go blind, and after it, so that the rule is named.
"""

from __future__ import annotations

from collections.abc import Iterable

from emberkv.core.check import check
from emberkv.core.leases import Phase
from emberkv.core.residents import READY, Residents, State
from emberkv.core.stack import TierStack
from emberkv.domain.types import RAM, ChunkKey, Level
from emberkv.errors import InvariantError

_Counts = list[dict[ChunkKey, int]]


def require_rules(stack: TierStack, now_s: float, *, fully: bool) -> None:
    """Raise an `InvariantError` if the stack's state breaks a rule; `fully` runs `check` too."""
    holds = keeps_rules(stack, now_s)
    if fully or not holds:
        check(stack, now_s)
    if not holds:
        raise InvariantError("the quick check finds a broken rule that the full check does not")


def keeps_rules(stack: TierStack, now_s: float) -> bool:
    """Whether the stack's state keeps every rule that `check` tests."""
    pins: _Counts = [{} for _ in stack.tiers]
    writers: _Counts = [{} for _ in stack.tiers]
    rising: dict[ChunkKey, int] = {}
    if not _copies_hold(stack, pins, writers, rising):
        return False
    for keys in stack.loads_under_way().values():
        _count(pins[RAM], keys)
    for pending in stack.pending_stores().values():
        _count(writers[RAM], pending)
    for lease in stack.promotions.leases():
        _count(pins[RAM], lease.keys[: lease.pinned])
    if any(count != 1 for count in rising.values()):
        return False
    tiers = zip(stack.tiers, pins, writers, strict=True)
    if not all(_tier_holds(tier, held, written) for tier, held, written in tiers):
        return False
    for key, resident in stack.tiers[RAM].entries.items():
        if (stack.residence(key, now_s) == RAM) != (resident.state is READY):
            return False
    return _leases_hold(stack, rising)


def _count(counts: dict[ChunkKey, int], keys: Iterable[ChunkKey]) -> None:
    for key in keys:
        counts[key] = counts.get(key, 0) + 1


def _copies_hold(
    stack: TierStack, pins: _Counts, writers: _Counts, rising: dict[ChunkKey, int]
) -> bool:
    """Test the copies under way, and count what they pin and write."""
    counted = [0] * len(stack.tiers)
    stale = {copy.transfer for copy, _ in stack.transfers.open_copies(stale=True)}
    for copy, unfinished in stack.transfers.open_copies(stale=None):
        counted[copy.target] += len(unfinished)
        if copy.transfer in stale:
            continue
        sources, targets = stack.tiers[copy.source].entries, stack.tiers[copy.target].entries
        for index in unfinished:
            key = copy.keys[index]
            source, target = sources.get(key), targets.get(key)
            if source is None or target is None:
                return False
            if source.slot != copy.source_slots[index] or target.slot != copy.target_slots[index]:
                return False
            if source.state is State.WRITING or target.state is not State.WRITING:
                return False
            _count(pins[copy.source], (key,))
            _count(writers[copy.target], (key,))
            if copy.target == RAM:
                _count(rising, (key,))
    limits = stack.limits
    for level, count in enumerate(counted):
        allowed = limits.promotion_chunks if level == RAM else limits.write_behind_chunks
        if count > allowed or count != stack.transfers.under_way(Level(level)):
            return False
    return True


def _tier_holds(tier: Residents, pins: dict[ChunkKey, int], writers: dict[ChunkKey, int]) -> bool:
    """Slots, policy, children, pins and writers of one tier."""
    entries, held = tier.entries, tier.held
    slots = set(tier.free_slots())
    if len(slots) != tier.free_count or any(holds <= 0 for holds in held.values()):
        return False
    slots.update(held)
    pinned: dict[ChunkKey, int] = {}
    written: dict[ChunkKey, int] = {}
    children: dict[ChunkKey, int] = {}
    for key, resident in entries.items():
        slots.add(resident.slot)
        if resident.pins:
            pinned[key] = resident.pins
        if resident.state is State.WRITING:
            written[key] = 1
        elif resident.state is State.LOST and not resident.pins:
            return False
        parent = resident.parent
        if parent is not None:
            children[parent] = children.get(parent, 0) + 1
    used_count = len(entries) + len(held)
    order = list(tier.policy.victims())
    return (
        used_count + tier.free_count == tier.slot_count == len(slots)
        and slots == set(range(tier.slot_count))
        and tier.used_bytes == used_count * tier.chunk_bytes <= tier.capacity_bytes
        and len(order) == len(tier.policy) == len(entries)
        and set(order) == entries.keys()
        and tier.children == children
        and pinned == pins
        and len(pinned) == tier.pinned_count
        and written == writers
    )


def _leases_hold(stack: TierStack, rising: dict[ChunkKey, int]) -> bool:
    ram, promotions = stack.tiers[RAM], stack.promotions
    for lease in promotions.leases():
        in_order = 0 <= lease.ready <= lease.pinned <= lease.cut <= len(lease.keys)
        if not in_order or not all(map(ram.ready, lease.keys[: lease.ready])):
            return False
        if promotions.queued(lease.request) != (lease.phase is Phase.QUEUED):
            return False
        if lease.phase is Phase.PLANNED:
            coming = lease.keys[lease.ready : lease.cut]
            if lease.pinned != lease.cut:
                return False
            if not all(ram.ready(key) or key in rising for key in coming):
                return False
    return True
