"""Promotions: whole chains are leased, planned in turn, waited for within limits, and let go.

A lease is planned at once if its chain fits beside what others hold. If it does not, but would
once the others have loaded, it waits its turn, first come first served. If nobody holds anything
that could be let go, it is cut to what fits. So a chain longer than RAM is served in part, and of
many chains that do not fit together each gets its turn. What is not worth loading is not planned,
see `emberkv.core.economy`; a tier that is loaded from no more is tried again with a few chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from emberkv.core.counts import Event, Journal
from emberkv.core.economy import Economy, Stretch
from emberkv.core.evictions import Evictions
from emberkv.core.leases import Cut, Lease, Phase
from emberkv.core.residents import READY, Resident, State
from emberkv.core.retention import Retention
from emberkv.core.transfers import Transfers
from emberkv.domain.types import RAM, ChunkKey, Level, RequestId, VisitId

_Sources = list[tuple[Level, dict[ChunkKey, Resident]]]


class Promotions:
    """The leases of all waiting requests, and the queue of those whose turn has not come."""

    def __init__(
        self,
        transfers: Transfers,
        journal: Journal,
        evictions: Evictions,
        retention: Retention,
        economy: Economy,
    ) -> None:
        self._tiers = transfers.tiers
        self._transfers = transfers
        self._journal = journal
        self._evictions = evictions
        self._retention = retention
        self._economy = economy
        self._leases: dict[RequestId, Lease] = {}
        self._queue: dict[RequestId, Lease] = {}
        self._holders: dict[ChunkKey, list[Lease]] = {}

    def open(self, lease: Lease, now_s: float) -> None:
        """Take in a lease; a request has one at a time."""
        ahead = self._leases.get(lease.request)
        if ahead is None or not ahead.ahead:
            self.close(lease.request)
            ahead = None
        self._leases[lease.request] = lease
        self._queue[lease.request] = lease
        self.settle(now_s)
        if ahead is not None:  # it has kept its chunks until the lease that follows it did
            self._cut(ahead, 0)

    def look_ahead(self, lease: Lease, now_s: float) -> None:
        """Begin to bring up what a request will ask for, if it fits beside what others need."""
        if lease.request in self._leases or self._queue:
            return
        ram = self._tiers[RAM]
        taken = sum(each.pinned for each in self._leases.values() if each.ahead)
        budget = int(self._transfers.limits.look_ahead_share * ram.slot_count) - taken
        lease.worth = max(0, min(len(lease.keys), budget))
        lease.ahead = True
        missing = self._survey(lease, now_s)
        if not missing or not self._has_room(missing):
            return
        self._leases[lease.request] = lease
        self._plan(lease, now_s)

    def lease(self, request: RequestId) -> Lease | None:
        return self._leases.get(request)

    def queued(self, request: RequestId) -> bool:
        return request in self._queue

    def leases(self) -> Iterator[Lease]:
        return iter(self._leases.values())

    def settle(self, now_s: float) -> None:
        """Plan leases from the head of the queue for as long as they fit."""
        while self._queue:
            lease = next(iter(self._queue.values()))
            if not self._fits(lease, now_s):
                break
            del self._queue[lease.request]
            self._plan(lease, now_s)
            self._probe(lease, now_s)

    def waiting(self, request: RequestId, step: int, now_s: float) -> bool:
        """Whether the request should go on waiting; the last `False` answers its lease."""
        lease = self._leases.get(request)
        if lease is None or lease.phase is Phase.ANSWERED:
            return False
        lease.asked(step, now_s)
        self._advance(lease)
        if lease.phase is Phase.PLANNED and lease.ready >= lease.cut:
            self._answer(lease)
            return False
        spent = lease.waited_s >= min(lease.max_wait_s, self._transfers.limits.max_wait_s)
        spent = spent or self._economy.wait_is_spent(lease, now_s)
        if spent or self._stalled(lease, now_s):
            lease.cut_reason = Cut.WAIT_SPENT
            promised = lease.cut
            self._answer(lease)
            self._journal.note(Event.WAIT_SPENT, RAM, lease.keys[lease.ready : promised])
            return False
        return True

    def failed(self, key: ChunkKey) -> None:
        """A chunk will not arrive: every lease that waits for it is cut before it."""
        for lease in list(self._holders.get(key, ())):
            at = lease.keys.index(key)
            if at < lease.cut:
                lease.cut_reason = Cut.TRANSFER_FAILED
                self._cut(lease, at)

    def lost(self, key: ChunkKey) -> None:
        """A chunk in RAM turned out bad: no lease promises it or what follows it any longer."""
        for lease in self._leases.values():
            if key in lease.keys[: lease.pinned]:
                lease.cut_reason = Cut.TRANSFER_FAILED
                self._cut(lease, lease.keys.index(key))

    def close(self, request: RequestId) -> None:
        """Give back what a request's lease pins."""
        lease = self._leases.pop(request, None)
        if lease is not None:
            self._queue.pop(request, None)
            self._cut(lease, 0)

    def clear(self) -> None:
        """Forget every lease; the residents they pin are forgotten with them."""
        self._leases.clear()
        self._queue.clear()
        self._holders.clear()

    # ── inner ────────────────────────────────────────────────────────────────────────────────

    def _survey(self, lease: Lease, now_s: float) -> int:
        """How many chunks a plan would copy up: those below that are worth it, head of the chain.

        The rest of what could be had is noted as not worth loading by the plan.
        """
        entries, origin_of = self._tiers[RAM].entries, self._transfers.origin
        sources = self._sources(lease.levels, now_s)
        limit = lease.worth if lease.ahead else len(lease.keys)
        stretches: list[Stretch] = []
        missing: list[int] = []  # before each chunk
        count = 0
        for key in lease.keys[:limit]:
            resident = entries.get(key)
            if resident is None:
                below = _find(key, sources)
                if below is None:
                    break
                level = below[0]
            elif self._usable(resident):
                level = RAM if resident.state is READY else origin_of(key) or RAM
            else:
                break
            missing.append(count)
            count += resident is None
            if stretches and stretches[-1][0] == level:
                stretches[-1] = level, stretches[-1][1] + 1
            else:
                stretches.append((level, 1))
        lease.worth = self._economy.cut(stretches, lease.first_token, lease.ahead_s, now_s)
        if lease.worth < len(missing):
            count = missing[lease.worth]
            lease.cut_reason = Cut.NOT_WORTH
        lease.missing, lease.missing_as_of = count, self._tiers[RAM].entered_count
        return count

    def _fits(self, lease: Lease, now_s: float) -> bool:
        """Whether a lease should be planned now rather than wait for others to finish.

        Asked every step for the head of the queue: the chain is walked again only when so many
        chunks have entered RAM since the last time that the answer may have changed.
        """
        if lease.missing_as_of >= 0:
            entered = self._tiers[RAM].entered_count - lease.missing_as_of
            if not self._has_room(max(0, lease.missing - entered)):
                return False
        return self._has_room(self._survey(lease, now_s))

    def _has_room(self, missing: int) -> bool:
        ram = self._tiers[RAM]
        under_way = self._transfers.under_way(RAM)
        if under_way and under_way + missing > self._transfers.limits.promotion_chunks:
            return False
        room = ram.slot_count - ram.pinned_count - len(ram.held)
        # Half of RAM is worth starting with: a chain longer than RAM must not wait for silence.
        return room >= min(missing, ram.slot_count // 2) or not ram.pinned_count

    def _plan(self, lease: Lease, now_s: float) -> None:
        """Pin what is there, make room for what is not, start the copies; cut where that ends.

        `_fits` has just counted what the lease misses.
        """
        ram = self._tiers[RAM]
        allowed = max(0, self._transfers.limits.promotion_chunks - self._transfers.under_way(RAM))
        entries = ram.entries
        there = [entries[key] for key in lease.keys if key in entries]
        ram.pin_run(there)  # before making room, so that the chain does not evict itself
        left = ram.make_room(min(allowed, lease.missing), lease.visit, lease.tenant)
        ram.unpin_run(there)
        left += self._give_up_tail(lease, allowed)
        self._evictions.left(RAM, left)
        lease.phase = Phase.PLANNED
        run, reach = self._choose(lease, allowed, now_s)
        if reach < len(lease.keys):
            self._note_cut(lease, reach)
        self._start(lease.visit, run, now_s)
        self._pin(lease, reach)
        self._advance(lease)

    def _note_cut(self, lease: Lease, reach: int) -> None:
        """A plan ends before its chain does: for what, and what it is called."""
        lease.cut = reach
        if reach == lease.worth and lease.cut_reason is Cut.NOT_WORTH:
            self._journal.note(Event.NOT_WORTH_LOADING, RAM, lease.keys[reach:])
        else:
            lease.cut_reason = Cut.NO_ROOM
            if not lease.ahead:
                self._journal.note(Event.PROMOTION_CUT, RAM, lease.keys[reach:])

    def _probe(self, lease: Lease, now_s: float) -> None:
        """Bring up a few of the chunks that were not worth it, to learn whether they still are."""
        if lease.cut_reason is Cut.NOT_WORTH:
            self.probe(lease.keys[lease.cut :], lease.visit, lease.levels, now_s)

    def probe(
        self,
        keys: Sequence[ChunkKey],
        visit: VisitId,
        levels: frozenset[Level] | None,
        now_s: float,
    ) -> None:
        """Try a tier that nobody has loaded from for a while, with chunks that were asked for.

        Nobody waits for them. They serve whoever comes next.
        """
        ram = self._tiers[RAM]
        room = self._transfers.limits.promotion_chunks - self._transfers.under_way(RAM)
        most = max(0, min(self._economy.terms.probe_chunks, room))
        if ram.free_count < most and ram.pinned_count > ram.slot_count // 2:
            return
        sources = self._sources(levels, now_s)
        run: list[tuple[Level, Resident]] = []
        for key in keys[:most]:
            below = _find(key, sources)
            if key in ram.entries or below is None:
                break
            run.append(below)
        tried = {level for level, _ in run}
        if not run or not all(self._economy.probe_is_due(level, now_s) for level in tried):
            return
        self._evictions.left(RAM, ram.make_room(len(run), visit))
        self._start(visit, run[: ram.free_count], now_s)

    def _give_up_tail(self, lease: Lease, allowed: int) -> list[Resident]:
        """Let a chain's own tail leave RAM for its head: only what follows the head is of use."""
        ram = self._tiers[RAM]
        missing = lease.missing
        left: list[Resident] = []
        for index in reversed(range(len(lease.keys))):
            if ram.free_count >= min(allowed, missing):
                break
            resident = ram.entries.get(lease.keys[index])
            if resident is not None:
                if ram.give_up(resident):
                    left.append(resident)
            elif index < lease.worth:
                missing -= 1  # the place that is missing is no longer needed
        return left

    def _choose(
        self, lease: Lease, allowed: int, now_s: float
    ) -> tuple[list[tuple[Level, Resident]], int]:
        """What to copy up, from where, and how many of the lease's chunks can then be promised."""
        ram = self._tiers[RAM]
        entries, sources = ram.entries, self._sources(lease.levels, now_s)
        most = min(allowed, ram.free_count)
        run: list[tuple[Level, Resident]] = []
        for index, key in enumerate(lease.keys[: lease.worth]):
            resident = entries.get(key)
            if resident is not None:
                if not self._usable(resident):
                    return run, index
                continue
            below = _find(key, sources) if len(run) < most else None
            if below is None:
                return run, index
            run.append(below)
        return run, lease.worth

    def _start(self, visit: VisitId, run: list[tuple[Level, Resident]], now_s: float) -> None:
        """Give what is copied up its places in RAM, and start one copy per stretch of a tier."""
        targets = self._tiers[RAM].insert(
            [source.key for _, source in run], [source.parent for _, source in run], visit
        )
        for target in targets:
            target.unused = True
        sources = [source for _, source in run]
        self._retention.dress(RAM, zip(targets, sources, strict=True))
        steps = zip(run, targets, strict=True)
        for level, stretch in groupby(steps, key=lambda step: step[0][0]):
            pairs = [(source, target.slot) for (_, source), target in stretch]
            self._transfers.start(level, RAM, pairs, now_s)

    def _pin(self, lease: Lease, reach: int) -> None:
        """Pin the chunks that are promised, and remember who waits for which."""
        ram, origin_of = self._tiers[RAM], self._transfers.origin
        residents = [ram.entries[key] for key in lease.keys[:reach]]
        for resident in residents:
            key = resident.key
            origin = origin_of(key)
            if origin is not None:
                lease.origins[key] = origin
            if resident.state is not READY:
                self._holders.setdefault(key, []).append(lease)
        ram.pin_run(residents)
        lease.pinned = reach

    def _usable(self, resident: Resident) -> bool:
        """Whether a chunk in RAM is ready, or will be without the engine's help.

        If the engine is writing it, nothing says when that ends.
        """
        if resident.state is State.WRITING:
            return self._transfers.origin(resident.key) is not None
        return resident.state is State.READY

    def _sources(self, levels: frozenset[Level] | None, now_s: float) -> _Sources:
        """The tiers below RAM that move and are among those allowed, uppermost first."""
        return [
            (Level(level), tier.entries)
            for level, tier in enumerate(self._tiers)
            if level != RAM
            and (levels is None or level in levels)
            and not self._transfers.stalled(Level(level), now_s)
        ]

    def _advance(self, lease: Lease) -> None:
        """Move `ready` over what has arrived."""
        ram = self._tiers[RAM]
        while lease.ready < min(lease.cut, lease.pinned):
            key = lease.keys[lease.ready]
            if not ram.ready(key):
                break
            lease.ready += 1

    def _stalled(self, lease: Lease, now_s: float) -> bool:
        """Whether the tier that the lease waits for has stopped moving."""
        if lease.phase is Phase.QUEUED:
            levels = [Level(level) for level in range(1, len(self._tiers))]
        else:
            origin = self._transfers.origin(lease.keys[lease.ready])
            levels = [] if origin is None else [origin]
        return any(self._transfers.stalled(level, now_s) for level in levels)

    def _answer(self, lease: Lease) -> None:
        """Settle for what is ready, and keep only that pinned."""
        ram = self._tiers[RAM]
        if self._queue.pop(lease.request, None) is not None:  # nothing is pinned for it yet
            while lease.pinned < len(lease.keys) and ram.ready(lease.keys[lease.pinned]):
                ram.pin(ram.entries[lease.keys[lease.pinned]])
                lease.pinned += 1
            lease.ready = lease.pinned
        lease.phase = Phase.ANSWERED
        self._cut(lease, lease.ready)

    def _cut(self, lease: Lease, at: int) -> None:
        """Promise only `keys[:at]`; give back the pins behind it."""
        ram = self._tiers[RAM]
        for key in lease.keys[at : lease.pinned]:
            ram.unpin(ram.entries[key])
            holders = self._holders.get(key)
            if holders is not None and lease in holders:
                holders.remove(lease)
                if not holders:
                    del self._holders[key]
        lease.pinned = min(lease.pinned, at)
        lease.ready = min(lease.ready, at)
        lease.cut = min(lease.cut, at)


def _find(key: ChunkKey, sources: _Sources) -> tuple[Level, Resident] | None:
    """A chunk ready to be copied up, and from where."""
    for level, entries in sources:
        resident = entries.get(key)
        if resident is not None and resident.state is READY:
            return level, resident
    return None
