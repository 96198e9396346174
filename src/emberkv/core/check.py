"""The ten rules that the core keeps, and the ones of them that can be read off its state.

     1  Bytes used ≤ capacity in every tier; every slot is free, held or taken by one chunk, and
        bytes counted are bytes summed.
     2  The policy's keys are exactly the resident keys.
     3  A transfer's source is pinned, its target is not ready. Every pin has a holder, every
        chunk that is being written has a writer.
     4  Leaf first: a chunk never leaves to make room before its resident children in that tier.
     5  Write behind, then plain drop: nothing is copied down in order to evict it.
     6  Only bytes that sit in RAM, verified, are offered to the engine.
     7  One promotion serves all who wait for a chunk; it is planned for the whole chain at once,
        cut to what fits, and pinned until the request has loaded or ended. A look-up moves
        nothing.
     8  Nothing waits without a deadline.
     9  Every limit holds.
    10  Same calls, same times, same outcomes: same decisions.

`check` tests a state at rest, between two calls. What only shows between a state and the next
(leaf first, no copy down to evict, promotions whole and pinned, deadlines) is tested by
`emberkv.core.audit`; the tenth rule by replaying a log of calls, see `emberkv.sim.calls`.
"""

from __future__ import annotations

from collections import Counter

from emberkv.core.leases import Phase
from emberkv.core.residents import Residents, State
from emberkv.core.stack import TierStack
from emberkv.domain.types import RAM, ChunkKey, Level
from emberkv.errors import InvariantError


def require(rule: int, holds: bool, what: str) -> None:
    """Raise an `InvariantError` that names the rule unless `holds`."""
    if not holds:
        raise InvariantError(f"rule {rule}: {what}")


def check(stack: TierStack, now_s: float) -> None:
    """Raise an `InvariantError` naming the first rule that the stack's state breaks.

    Costs O(everything resident, leased and under way): for tests, simulations and idle time.
    """
    for level, tier in enumerate(stack.tiers):
        _check_slots(level, tier)
        _check_policy(level, tier)
        _check_children(level, tier)
    _check_transfers(stack)
    _check_pins(stack)
    _check_offers(stack, now_s)
    _check_leases(stack)
    _check_limits(stack)


def _check_slots(level: int, tier: Residents) -> None:
    taken = [resident.slot for resident in tier.entries.values()]
    free = tier.free_slots()
    places = Counter(taken) + Counter(free) + Counter(tier.held.keys())
    require(1, tier.free_count == len(free), f"a slot of tier {level} is free twice")
    require(
        1,
        places == Counter(range(tier.slot_count)),
        f"the slots of tier {level} are not free, held or taken exactly once: {places}",
    )
    require(1, all(holds > 0 for holds in tier.held.values()), f"tier {level}: a hold of nothing")
    used_bytes = sum(tier.chunk_bytes for _ in (*taken, *tier.held))
    require(1, tier.used_bytes == used_bytes, f"tier {level} counts other bytes than it holds")
    require(1, used_bytes <= tier.capacity_bytes, f"tier {level} is over its capacity")


def _check_policy(level: int, tier: Residents) -> None:
    order = list(tier.policy.victims())
    require(
        2,
        len(order) == len(tier.policy) == len(tier.entries) and set(order) == set(tier.entries),
        f"the policy of tier {level} orders other keys than are resident",
    )


def _check_children(level: int, tier: Residents) -> None:
    parents = Counter(r.parent for r in tier.entries.values() if r.parent is not None)
    require(4, tier.children == dict(parents), f"tier {level} counts children wrongly")


def _check_transfers(stack: TierStack) -> None:
    writers: list[Counter[ChunkKey]] = [Counter() for _ in stack.tiers]
    for pending in stack.pending_stores().values():
        writers[RAM].update(list(pending))
    for copy, unfinished in stack.transfers.open_copies():
        for index in unfinished:
            key = copy.keys[index]
            source = stack.tiers[copy.source].entries.get(key)
            target = stack.tiers[copy.target].entries.get(key)
            what = f"copy {copy.transfer} of {key.hex()}"
            require(3, source is not None and source.pins > 0, f"{what}: source is not pinned")
            require(3, target is not None, f"{what}: target is gone")
            if source is not None and target is not None:
                require(3, source.slot == copy.source_slots[index], f"{what}: source has moved")
                require(3, target.slot == copy.target_slots[index], f"{what}: target has moved")
                require(3, target.state is State.WRITING, f"{what}: target is {target.state}")
                require(3, source.state is not State.WRITING, f"{what}: source is being written")
            writers[copy.target][key] += 1
    for level, tier in enumerate(stack.tiers):
        written = {key for key, r in tier.entries.items() if r.state is State.WRITING}
        require(
            3,
            writers[level] == Counter(written),
            f"tier {level}: chunks being written and their writers differ",
        )


def _check_pins(stack: TierStack) -> None:
    pins: list[Counter[ChunkKey]] = [Counter() for _ in stack.tiers]
    for keys in stack.loads_under_way().values():
        pins[RAM].update(keys)
    for lease in stack.promotions.leases():
        pins[RAM].update(lease.keys[: lease.pinned])
    pins[RAM].update(stack.shadows.pinned())
    for copy, unfinished in stack.transfers.open_copies():
        pins[copy.source].update(copy.keys[index] for index in unfinished)
    for level, tier in enumerate(stack.tiers):
        counted = {key: r.pins for key, r in tier.entries.items() if r.pins}
        require(3, counted == dict(pins[level]), f"tier {level}: a pin has no holder, or too many")
        require(3, tier.pinned_count == len(counted), f"tier {level} counts its pins wrongly")
        lost = [r for r in tier.entries.values() if r.state is State.LOST]
        require(3, all(r.pins for r in lost), f"tier {level}: a lost chunk that nobody uses")


def _check_offers(stack: TierStack, now_s: float) -> None:
    for key, resident in stack.tiers[RAM].entries.items():
        offered = stack.residence(key, now_s) == RAM
        require(
            6,
            offered == (resident.state is State.READY),
            f"{resident!r} is {'offered' if offered else 'not offered'} as being in RAM",
        )


def _check_leases(stack: TierStack) -> None:
    upward = Counter(
        copy.keys[index]
        for copy, unfinished in stack.transfers.open_copies()
        for index in unfinished
        if copy.target == RAM
    )
    require(7, all(n == 1 for n in upward.values()), "a chunk is being promoted twice at once")
    for lease in stack.promotions.leases():
        what = f"lease of {lease.request}"
        require(7, 0 <= lease.ready <= lease.cut <= len(lease.keys), f"{what}: out of order")
        require(7, lease.ready <= lease.pinned <= lease.cut, f"{what}: promises what it lost")
        for key in lease.keys[: lease.ready]:
            require(7, stack.tiers[RAM].ready(key), f"{what}: {key.hex()} is not there")
        queued = stack.promotions.queued(lease.request)
        require(8, queued == (lease.phase is Phase.QUEUED), f"{what}: in the queue or not?")
        if lease.phase is Phase.PLANNED:
            require(7, lease.pinned == lease.cut, f"{what}: promised and not pinned")
            for key in lease.keys[lease.ready : lease.cut]:
                arriving = stack.tiers[RAM].ready(key) or key in upward
                require(8, arriving, f"{what}: waits for what nobody brings")


def _check_limits(stack: TierStack) -> None:
    limits = stack.limits
    for number in range(len(stack.tiers)):
        level = Level(number)
        under_way = stack.transfers.under_way(level)
        counted = sum(
            len(unfinished)
            for copy, unfinished in stack.transfers.open_copies(stale=None)
            if copy.target == level
        )
        allowed = limits.promotion_chunks if level == RAM else limits.write_behind_chunks
        require(9, under_way == counted, f"tier {level}: {under_way} counted, {counted} under way")
        require(9, under_way <= allowed, f"tier {level}: {under_way} under way, {allowed} allowed")
