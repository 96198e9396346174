"""The rules that show between one state and the next, tested around every call.

`AuditedStack` is a `TierStack` that looks at itself before and after each call; it decides
nothing. The numbers of the rules are those of `emberkv.core.check`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from emberkv.core.check import check, require
from emberkv.core.economy import Terms
from emberkv.core.gates import Levels
from emberkv.core.leases import Lease, Phase
from emberkv.core.limits import Limits
from emberkv.core.residents import Resident, Residents, State
from emberkv.core.retention import Quotas
from emberkv.core.stack import TierStack
from emberkv.domain.types import (
    RAM,
    ChunkKey,
    Copy,
    Entry,
    Level,
    Outcome,
    RequestId,
    Slot,
    TransferId,
    VisitId,
)

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A resident as it was."""

    slot: Slot
    parent: ChunkKey | None
    visit: VisitId
    state: State
    pins: int


@dataclass(frozen=True, slots=True)
class _Promise:
    """A lease as it was."""

    lease: Lease
    phase: Phase
    ready: int


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """All that a call may change."""

    tiers: tuple[dict[ChunkKey, _Chunk], ...]
    orders: tuple[tuple[ChunkKey, ...], ...]
    free_counts: tuple[int, ...]
    leases: dict[RequestId, _Promise]
    copies: dict[TransferId, Copy]
    stale: frozenset[TransferId]


class _Wait:
    """What one request has waited by the audit's own account."""

    __slots__ = ("asked_at_s", "step", "waited_s")

    def __init__(self, step: int, now_s: float) -> None:
        self.step = step
        self.asked_at_s = now_s
        self.waited_s = 0.0


class AuditedStack(TierStack):
    """A tier stack that raises an `InvariantError` as soon as a call breaks a rule.

    Every call costs O(everything resident, leased and under way).
    """

    def __init__(
        self,
        tiers: Sequence[Residents],
        limits: Limits,
        terms: Terms | None = None,
        quotas: Quotas | None = None,
    ) -> None:
        super().__init__(tiers, limits, terms, quotas)
        self._waits: dict[RequestId, _Wait] = {}
        self._moved_at_s: dict[Level, float] = {}
        self._comparing = False

    def residence(self, key: ChunkKey, now_s: float, levels: Levels | None = None) -> Level | None:
        if self._comparing:
            return super().residence(key, now_s, levels)
        before = self._snapshot()
        level = super().residence(key, now_s, levels)
        require(7, self._snapshot() == before, "a look-up has changed something")
        resident = self.tiers[RAM].entries.get(key)
        ready = resident is not None and resident.state is State.READY
        if levels is None:
            require(6, (level == RAM) == ready, f"{key.hex()} is offered from RAM, not ready")
        else:
            require(6, level is None or level in levels, f"{key.hex()} is offered from {level}")
            require(6, level != RAM or ready, f"{key.hex()} is offered from RAM and is not ready")
        return level

    def promote(
        self,
        request: RequestId,
        keys: Sequence[ChunkKey],
        now_s: float,
        first_token: int = 0,
        step: int | None = None,
    ) -> None:
        before = self._snapshot()
        self._waits.pop(request, None)
        if step is not None:
            self._waits[request] = _Wait(step, now_s)
        super().promote(request, keys, now_s, first_token, step)
        self._compare(before, now_s, used=(), ready=(), closing=(request,))

    def look_ahead(
        self, request: RequestId, keys: Sequence[ChunkKey], now_s: float, first_token: int = 0
    ) -> None:
        before = self._snapshot()
        super().look_ahead(request, keys, now_s, first_token)
        self._compare(before, now_s, used=(), ready=(), closing=())
        pinned = sum(lease.pinned for lease in self.promotions.leases() if lease.ahead)
        budget = self.limits.look_ahead_share * self.tiers[RAM].slot_count
        require(9, pinned <= budget, f"{pinned} chunks are held for requests that do not run")

    def probe(self, request: RequestId, keys: Sequence[ChunkKey], now_s: float) -> None:
        before = self._snapshot()
        super().probe(request, keys, now_s)
        self._compare(before, now_s, used=(), ready=(), closing=())

    def empty(self, level: Level) -> None:
        before = self._snapshot()
        super().empty(level)
        self._compare(before, None, used=(), ready=(), closing=())

    def waiting(self, request: RequestId, step: int, now_s: float) -> bool:
        before = self._snapshot()
        goes_on = super().waiting(request, step, now_s)
        self._compare(before, now_s, used=(), ready=(), closing=())
        wait = self._waits.setdefault(request, _Wait(step, now_s))
        if step == wait.step + 1:
            wait.waited_s += now_s - wait.asked_at_s
        wait.step, wait.asked_at_s = step, now_s
        if not goes_on:
            del self._waits[request]
            return False
        lease = self.promotions.lease(request)
        most_s = self.limits.max_wait_s
        if lease is not None:
            most_s = min(most_s, lease.max_wait_s)
        require(8, wait.waited_s < most_s, f"{request} waits for ever")
        require(8, lease is not None, f"{request} waits for nothing")
        if lease is not None and lease.phase is Phase.PLANNED:
            origin = self.transfers.origin(lease.keys[lease.ready])
            moved_at_s = self._moved_at_s.get(origin, now_s) if origin is not None else now_s
            stalled = now_s - moved_at_s > self.limits.max_stall_s
            require(8, not stalled, f"{request} waits for a tier that has stopped")
        return True

    def settle(self, now_s: float) -> None:
        before = self._snapshot()
        passed_on = [key for keys in self.write_behind.passed_on for key in keys]
        super().settle(now_s)
        self._compare(before, now_s, used=passed_on, ready=(), closing=())

    def offload(
        self,
        request: RequestId,
        keys: Sequence[ChunkKey],
        parent: ChunkKey | None,
        now_s: float,
        first_token: int = 0,
    ) -> list[Resident]:
        before = self._snapshot()
        admitted = super().offload(request, keys, parent, now_s, first_token)
        self._compare(before, now_s, used=keys, ready=(), closing=())
        return admitted

    def stored(
        self, request: RequestId, keys: Collection[ChunkKey], now_s: float
    ) -> list[Resident]:
        before = self._snapshot()
        pending = set(self.pending_stores().get(request, ()))
        published = super().stored(request, keys, now_s)
        ready = [(RAM, key) for key in keys if key in pending]
        self._compare(before, now_s, used=keys, ready=ready, closing=())
        return published

    def load(
        self,
        request: RequestId,
        keys: Sequence[ChunkKey],
        now_s: float,
        first_token: int = 0,
    ) -> list[Resident]:
        before = self._snapshot()
        residents = super().load(request, keys, now_s, first_token)
        self._compare(before, now_s, used=keys, ready=(), closing=())
        return residents

    def loaded(self, request: RequestId, now_s: float) -> None:
        before = self._snapshot()
        super().loaded(request, now_s)
        self._compare(before, None, used=(), ready=(), closing=(request,))

    def scheduled(self, request: RequestId) -> None:
        before = self._snapshot()
        super().scheduled(request)
        self._compare(before, None, used=(), ready=(), closing=(request,))

    def end(self, request: RequestId) -> None:
        before = self._snapshot()
        super().end(request)
        self._compare(before, None, used=(), ready=(), closing=(request,))

    def done(
        self, transfer: TransferId, results: Sequence[tuple[int, Outcome]], now_s: float
    ) -> list[Resident]:
        before = self._snapshot()
        ended = super().done(transfer, results, now_s)
        copy = before.copies[transfer]
        if copy.target == RAM:
            self._moved_at_s[copy.source] = now_s
        counts = [] if transfer in before.stale else results
        bad = (Outcome.CORRUPT, Outcome.ABSENT)
        self._compare(
            before,
            now_s,
            used=(),
            ready=[(copy.target, copy.keys[i]) for i, o in counts if o is Outcome.OK],
            closing=(),
            lost=frozenset(copy.keys[i] for i, o in counts if o in bad),
        )
        return ended

    def adopt(self, level: Level, entries: Sequence[Entry]) -> None:
        before = self._snapshot()
        super().adopt(level, entries)
        ready = [(level, entry.key) for entry in entries]
        self._compare(before, None, used=(), ready=ready, closing=())

    def reset(self) -> None:
        super().reset()
        self._waits.clear()
        for level, tier in enumerate(self.tiers):
            require(6, not tier.entries, f"tier {level} kept something through a reset")
        check(self, 0.0)

    # ── what a call may do ───────────────────────────────────────────────────────────────────

    def _snapshot(self) -> _Snapshot:
        return _Snapshot(
            tuple(
                {
                    key: _Chunk(r.slot, r.parent, r.visit, r.state, r.pins)
                    for key, r in tier.entries.items()
                }
                for tier in self.tiers
            ),
            tuple(tuple(tier.policy.victims()) for tier in self.tiers),
            tuple(tier.free_count for tier in self.tiers),
            {
                lease.request: _Promise(lease, lease.phase, lease.ready)
                for lease in self.promotions.leases()
            },
            {copy.transfer: copy for copy, _ in self.transfers.open_copies(stale=None)},
            frozenset(copy.transfer for copy, _ in self.transfers.open_copies(stale=True)),
        )

    def _compare(
        self,
        before: _Snapshot,
        now_s: float | None,
        *,
        used: Iterable[ChunkKey],
        ready: Iterable[tuple[Level, ChunkKey]],
        closing: Collection[RequestId],
        lost: frozenset[ChunkKey] = frozenset(),
    ) -> None:
        """Test every rule of change; `used`, `ready` and `lost` are what the call was told."""
        self._comparing = True
        after = self._snapshot()
        given_up = {
            key
            for request in closing
            if request in before.leases
            for key in before.leases[request].lease.keys
        }
        self._compare_states(before, after, set(ready))
        self._compare_evicted(before, after, lost, given_up)
        self._compare_copies(before, after, set(used), now_s)
        self._compare_leases(before, closing, lost, now_s)
        check(self, now_s if now_s is not None else 0.0)
        self._comparing = False

    @staticmethod
    def _compare_states(
        before: _Snapshot, after: _Snapshot, ready: set[tuple[Level, ChunkKey]]
    ) -> None:
        for number, (old, new) in enumerate(zip(before.tiers, after.tiers, strict=True)):
            for key, chunk in new.items():
                was = old.get(key)
                became_ready = chunk.state is State.READY and (
                    was is None or was.state is not State.READY
                )
                if became_ready:
                    told = (Level(number), key) in ready
                    require(6, told, f"{key.hex()} became ready in tier {number} unasked")

    @staticmethod
    def _compare_evicted(
        before: _Snapshot,
        after: _Snapshot,
        lost: frozenset[ChunkKey],
        given_up: set[ChunkKey],
    ) -> None:
        for number, (old, new) in enumerate(zip(before.tiers, after.tiers, strict=True)):
            evicted = {
                key
                for key, chunk in old.items()
                if key not in new and key not in lost and chunk.state is State.READY
            }
            for key in evicted - given_up:
                require(3, old[key].pins == 0, f"pinned chunk {key.hex()} left tier {number}")
            for key, chunk in new.items():
                orphaned = chunk.parent in evicted and key in old and old[key].slot == chunk.slot
                require(4, not orphaned, f"{key.hex()} stays in tier {number}, its parent left")

    def _compare_copies(
        self, before: _Snapshot, after: _Snapshot, used: set[ChunkKey], now_s: float | None
    ) -> None:
        started = [copy for each, copy in after.copies.items() if each not in before.copies]
        for copy in started:
            if copy.target < copy.source:
                require(7, copy.target == RAM, f"copy {copy.transfer} goes up beside RAM")
                self._moved_at_s.setdefault(copy.source, now_s or 0.0)
                if not self._read_before(before, copy.source):
                    self._moved_at_s[copy.source] = now_s or 0.0
                continue
            require(5, copy.target == copy.source + 1, f"copy {copy.transfer} skips a tier")
            require(
                5,
                used.issuperset(copy.keys),
                f"copy {copy.transfer} moves chunks down that nobody has just used",
            )

    @staticmethod
    def _read_before(before: _Snapshot, source: Level) -> bool:
        return any(c.source == source and c.target == RAM for c in before.copies.values())

    def _compare_leases(
        self,
        before: _Snapshot,
        closing: Collection[RequestId],
        lost: frozenset[ChunkKey],
        now_s: float | None,
    ) -> None:
        for request, promise in before.leases.items():
            if request in closing:
                continue
            lease = self.promotions.lease(request)
            what = f"lease of {request}"
            require(7, lease is promise.lease, f"{what} is gone before it was used")
            if lost.isdisjoint(promise.lease.keys):
                kept = promise.lease.ready >= promise.ready
                require(7, kept, f"{what} takes back what was ready")
        planned: list[Lease] = []
        for lease in self.promotions.leases():
            was = before.leases.get(lease.request)
            fresh = was is None or was.lease is not lease or was.phase is Phase.QUEUED
            if fresh and lease.phase is Phase.PLANNED:
                planned.append(lease)
        if len(planned) == 1 and now_s is not None:  # else a later plan took what one could not
            self._check_plan(planned[0], now_s)

    def _check_plan(self, lease: Lease, now_s: float) -> None:
        """A plan covers the whole chain, or ends where nothing more fits or is known."""
        ram = self.tiers[RAM]
        if lease.cut in (len(lease.keys), lease.worth):
            return
        key = lease.keys[lease.cut]
        known = ram.ready(key) or self.residence(key, now_s) is not None
        fits = ram.free_count > 0 or key in ram.entries
        allowed = self.transfers.under_way(RAM) < self.limits.promotion_chunks
        require(
            7,
            not (known and fits and allowed),
            f"lease of {lease.request} is cut before {key.hex()}, which fits",
        )
