"""The tier stack: decides which chunks sit where, and never moves a byte itself.

A driver calls it, carries out the effects it leaves, and reports how they ended:

    request's chain ─► residence, promote, waiting ─► load … loaded
    computed chunks ─► offload … stored                            ─► take_effects ─► driver
                       done ◄─────────────────────────────────────────────────────────┘

Rules kept here are listed in `emberkv.core.check`. Same calls with the same `now_s` make the same
decisions: the simulator and the live driver run this one class.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from emberkv.core.counts import Event, Journal
from emberkv.core.leases import Cut, Lease
from emberkv.core.limits import Limits
from emberkv.core.promotions import Promotions
from emberkv.core.residents import READY, Resident, Residents, State
from emberkv.core.transfers import Transfers
from emberkv.domain.types import (
    RAM,
    ChunkKey,
    Copy,
    Drop,
    Effect,
    Entry,
    Level,
    Outcome,
    RequestId,
    Slot,
    TransferId,
    VisitId,
)
from emberkv.errors import InvariantError


@dataclass(slots=True)
class _Visit:
    """One request's pass over its chain: its id, and the last chunk it used per tier."""

    id: VisitId
    tails: dict[Level, ChunkKey] = field(default_factory=dict)


class TierStack:
    """RAM (level 0) and the tiers below it.

    `tiers[0]` is the only one the engine touches; it is offered to the engine, written by it, and
    everything below is staged through it.
    """

    def __init__(self, tiers: Sequence[Residents], limits: Limits) -> None:
        self.tiers = tuple(tiers)
        self.limits = limits
        self.journal = Journal()
        self.transfers = Transfers(self.tiers, limits)
        self.promotions = Promotions(self.tiers, self.transfers, self.journal)
        self._drops: list[Drop] = []
        self._visits: dict[RequestId, _Visit] = {}
        self._next_visit = 0
        self._loads: dict[RequestId, list[Resident]] = {}
        self._stores: dict[RequestId, dict[ChunkKey, None]] = {}
        self._fenced: list[Slot] = []
        self._behind: list[list[ChunkKey]] = [[] for _ in self.tiers]

    @property
    def counts(self) -> Counter[tuple[Event, Level]]:
        """Chunks by what happened to them, and in which tier."""
        return self.journal.counts

    # ── look up ──────────────────────────────────────────────────────────────────────────────

    def residence(self, key: ChunkKey, now_s: float) -> Level | None:
        """The nearest tier that has the chunk, or will have it without the engine's help.

        RAM means that the engine can load it now. Moves nothing, changes nothing.
        """
        resident = self.tiers[RAM].entries.get(key)
        if resident is not None:
            if resident.state is READY:
                return RAM
            origin = self.transfers.origin(key)
            if origin is None or self.transfers.stalled(origin, now_s):
                return None
            return origin
        for level in range(1, len(self.tiers)):
            if self.tiers[level].ready(key) and not self.transfers.stalled(Level(level), now_s):
                return Level(level)
        return None

    def promote(self, request: RequestId, keys: Sequence[ChunkKey], now_s: float) -> None:
        """Lease a whole chain for a request, and plan the copies that bring it into RAM.

        `keys` are consecutive, head first, each with a residence. What fits is pinned until the
        request has loaded or ended; if nothing can start now the lease waits its turn.
        """
        visit = self._visit(request)
        self._touch(visit, keys, None)
        lease = Lease(request, tuple(keys), visit.id)
        self._drop(self.promotions.open(lease, now_s))

    def waiting(self, request: RequestId, step: int, now_s: float) -> bool:
        """Whether a request's promotion is worth another step of waiting.

        False once everything promised is ready, the wait is spent, or the tier below stalls; what
        is ready by then stays pinned for the request. `step` counts the caller's rounds.
        """
        return self.promotions.waiting(request, step, now_s)

    def origin(self, request: RequestId, key: ChunkKey) -> Level:
        """The tier from which a chunk came into RAM for this request."""
        lease = self.promotions.lease(request)
        return RAM if lease is None else lease.origins.get(key, RAM)

    def cut_reason(self, request: RequestId) -> Cut | None:
        """Why the request's lease promises less than its whole chain, if it does."""
        lease = self.promotions.lease(request)
        return None if lease is None else lease.cut_reason

    def settle(self, now_s: float) -> None:
        """Plan promotions whose turn has come, and pass on what tiers have got; once per step."""
        self._drop(self.promotions.settle(now_s))
        for level, keys in enumerate(self._behind):
            if keys:
                entries = self.tiers[level].entries
                run = [entries[key] for key in dict.fromkeys(keys) if self.tiers[level].ready(key)]
                if run:
                    self._write_run(_Visit(run[-1].visit), Level(level + 1), run, now_s)
                keys.clear()

    # ── engine ↔ RAM ─────────────────────────────────────────────────────────────────────────

    def offload(
        self, request: RequestId, keys: Sequence[ChunkKey], parent: ChunkKey | None, now_s: float
    ) -> list[Resident]:
        """Admit newly computed consecutive chunks to RAM; returns those the engine shall write.

        Also the signal that the request used all of `keys`. Chunks already there, or being
        written, are left out; from the first that finds no room on, nothing is admitted.
        """
        visit = self._visit(request)
        ram = self.tiers[RAM]
        self._touch(visit, keys, parent)
        missing = [key for key in keys if key not in ram.entries]
        if parent is not None and not self._anywhere(parent):
            self.journal.note(Event.REFUSED_UNREACHABLE, RAM, missing)
            return []
        self._drop(self._evicted(RAM, ram.make_room(len(missing), visit.id)))
        fresh: list[ChunkKey] = []
        parents: list[ChunkKey | None] = []
        for key in keys:
            if key not in ram.entries:
                if len(fresh) == ram.free_count:
                    break
                fresh.append(key)
                parents.append(parent)
            parent = key
        if len(fresh) < len(missing):
            refused = [key for key in keys if key not in ram.entries][len(fresh) :]
            self.journal.note(Event.REFUSED_NO_ROOM, RAM, refused)
        admitted = ram.insert(fresh, parents, visit.id)
        if admitted:
            visit.tails[RAM] = fresh[-1]
            pending = self._stores.setdefault(request, {})
            pending.update((resident.key, None) for resident in admitted)
            self.journal.note(Event.ADMITTED, RAM, fresh)
        self._write_behind(visit, keys, now_s)
        return admitted

    def stored(
        self, request: RequestId, keys: Collection[ChunkKey], now_s: float
    ) -> list[Resident]:
        """The engine has written admitted chunks: they become usable and are written behind.

        Returns them in chain order.
        """
        pending = self._stores.get(request, {})
        wanted = frozenset(keys)
        done = [key for key in pending if key in wanted]
        ram = self.tiers[RAM]
        published: list[Resident] = []
        for key in done:
            del pending[key]
            resident = ram.entries[key]
            resident.state = State.READY
            published.append(resident)
        if not pending:
            self._stores.pop(request, None)
        if published:
            self._write_behind(self._visit_of(request, published[-1]), done, now_s)
        return published

    def load(self, request: RequestId, keys: Sequence[ChunkKey], now_s: float) -> list[Resident]:
        """Pin chunks that the engine is about to read from RAM. All must be READY."""
        if request in self._loads:
            raise InvariantError(f"request {request} loads twice at once")
        ram = self.tiers[RAM]
        residents = map(ram.entries.get, keys)
        found = [r for r in residents if r is not None and r.state is READY]
        if len(found) != len(keys):
            raise InvariantError(f"request {request} loads chunks that are not ready")
        self._touch(self._visit(request), keys, found[0].parent if found else None)
        ram.pin_run(found)
        self._loads[request] = list(found)
        self._write_behind(self._visit(request), keys, now_s)
        return found

    def loaded(self, request: RequestId) -> None:
        """The engine has read what `load` pinned; the request's lease ends with it."""
        self.tiers[RAM].unpin_run(self._loads.pop(request, ()))
        self.promotions.close(request)

    def scheduled(self, request: RequestId) -> None:
        """The engine runs the request: unless it is loading, its lease has served."""
        if request not in self._loads:
            self.promotions.close(request)

    def end(self, request: RequestId) -> None:
        """The request is over; copies already under way for it go on."""
        if request not in self._loads:
            self.promotions.close(request)
        self._visits.pop(request, None)

    # ── tiers below ──────────────────────────────────────────────────────────────────────────

    def take_effects(self) -> list[Effect]:
        """The work that follows from the calls since the last time, in order."""
        drops, self._drops = self._drops, []
        return [*drops, *self.transfers.take()]

    def done(
        self, transfer: TransferId, results: Sequence[tuple[int, Outcome]], now_s: float
    ) -> list[Resident]:
        """Some chunks of a copy have ended, by their index in it; returns those now in RAM."""
        copy, stale = self.transfers.finish(transfer, results, now_s)
        if stale:
            indices = [index for index, _ in results]
            self.tiers[copy.target].free_held([copy.target_slots[index] for index in indices])
            self.tiers[copy.source].free_held([copy.source_slots[index] for index in indices])
            return []
        arrived: list[Resident] = []
        for index, outcome in results:
            self._end_chunk(copy, index, outcome, arrived)
        if copy.target == RAM:
            return arrived
        if copy.target + 1 < len(self.tiers):
            self._behind[copy.target] += [resident.key for resident in arrived]
        return []

    def adopt(self, level: Level, entries: Sequence[Entry]) -> None:
        """Take in chunks that a tier still holds from an earlier run, oldest first."""
        run: list[Entry] = []
        coming: set[ChunkKey] = set()
        tier = self.tiers[level]
        for entry in entries:
            if run and entry.parent != run[-1].key:
                tier.adopt(run, self._new_visit())
                run = []
                coming.clear()
            above = run[0].parent if run else entry.parent
            known = entry.key in tier.entries or entry.key in coming
            if known or self._descends(tier, above, entry.key):
                self._drop(Drop(level, (entry.key,), (entry.slot,)))
                tier.free_held((entry.slot,))
                continue
            run.append(entry)
            coming.add(entry.key)
        if run:
            tier.adopt(run, self._new_visit())

    def reset(self) -> None:
        """Forget everything in every tier.

        Slots that the engine's workers or a driver may still touch are not given out again before
        those copies are done: see `unfence` and `done`.
        """
        self.promotions.clear()
        touched = self.transfers.abandon()
        ram = self.tiers[RAM]
        busy = {resident.slot for loading in self._loads.values() for resident in loading}
        busy.update(ram.entries[key].slot for keys in self._stores.values() for key in keys)
        fenced = sorted(busy)
        touched.setdefault(RAM, []).extend(fenced)
        for level, tier in enumerate(self.tiers):
            self._drop(self._drop_of(Level(level), list(tier.entries.values())))
            tier.clear(touched.get(Level(level), []))
        self._fenced += fenced
        self._behind = [[] for _ in self.tiers]
        self._loads.clear()
        self._stores.clear()
        self._visits.clear()

    def hold(self, level: Level, slots: Sequence[Slot]) -> None:
        """Take free slots of a tier out of use; they may be held more than once."""
        self.tiers[level].hold(slots)

    def free_held(self, level: Level, slots: Sequence[Slot]) -> None:
        """Give one hold on each slot back."""
        self.tiers[level].free_held(slots)

    def lose_tier(self, level: Level, hold: Sequence[Slot], now_s: float) -> None:
        """Forget what a tier below RAM held, and hold `hold`, all its slots that are not yet held.

        Copies from or to it that a driver has taken must have been reported as ended.
        """
        for copy in self.transfers.withdraw(level):
            self.done(copy.transfer, [(i, Outcome.SHED) for i in range(len(copy.keys))], now_s)
        for copy, _ in self.transfers.open_copies():
            if level in (copy.source, copy.target):
                raise InvariantError(f"tier {level} is lost while copy {copy.transfer} is open")
        self.tiers[level].clear(hold)
        self._behind[level].clear()

    def unfence(self) -> None:
        """The engine's workers are done with every job from before the last reset."""
        self.tiers[RAM].free_held(self._fenced)
        self._fenced = []

    def loads_under_way(self) -> Mapping[RequestId, Collection[ChunkKey]]:
        """For checks: what the engine is reading, per request."""
        return {request: [r.key for r in loading] for request, loading in self._loads.items()}

    def pending_stores(self) -> Mapping[RequestId, Collection[ChunkKey]]:
        """For checks: what the engine is writing, per request."""
        return self._stores

    def open_visits(self) -> Collection[RequestId]:
        """For checks: requests that have used something and not ended."""
        return self._visits.keys()

    # ── inner ────────────────────────────────────────────────────────────────────────────────

    def _anywhere(self, key: ChunkKey) -> bool:
        return any(key in tier.entries for tier in self.tiers)

    def _end_chunk(self, copy: Copy, index: int, outcome: Outcome, arrived: list[Resident]) -> None:
        """Account for one ended chunk of a copy, whichever way it went."""
        key = copy.keys[index]
        source, target = self.tiers[copy.source], self.tiers[copy.target]
        resident = target.entries[key]
        upward = copy.target < copy.source
        if outcome is Outcome.OK:
            resident.state = State.READY
            event = Event.PROMOTED if upward else Event.WRITTEN_BEHIND
            self.journal.note(event, copy.target, (key,))
            arrived.append(resident)
        else:
            event = Event.PROMOTION_FAILED if upward else Event.WRITE_BEHIND_FAILED
            self.journal.note(event, copy.source if upward else copy.target, (key,))
            if upward:
                self.promotions.failed(key)
            self._drop(self._drop_of(copy.target, [resident]))
            target.lose(resident)
        origin = source.entries[key]
        if outcome in (Outcome.CORRUPT, Outcome.ABSENT) and origin.state is not State.LOST:
            self.journal.note(Event.LOST, copy.source, (key,))
            self._drop(self._drop_of(copy.source, [origin]))
            if copy.source == RAM:
                self.promotions.lost(key)
            source.lose(origin)
        source.unpin(origin)

    def _write_behind(self, visit: _Visit, keys: Sequence[ChunkKey], now_s: float) -> None:
        """Start copies one tier down for usable chunks that are not there yet."""
        for level in range(1, len(self.tiers)):
            above, below = self.tiers[level - 1], self.tiers[level]
            known = below.entries
            run = [above.entries[k] for k in keys if k not in known and above.ready(k)]
            if run:
                self._write_run(visit, Level(level), run, now_s)

    def _write_run(
        self, visit: _Visit, level: Level, offered: Sequence[Resident], now_s: float
    ) -> None:
        """Start a copy to `level` for those of `offered` that have a place there."""
        below = self.tiers[level]
        offered = [resident for resident in offered if resident.key not in below.entries]
        run = self._reachable(below, offered)
        self._note_left(Event.REFUSED_UNREACHABLE, level, offered, run)
        room = max(0, self.limits.write_behind_chunks - self.transfers.under_way(level))
        self._note(Event.SHED_QUEUE_FULL, level, run[room:])
        run = run[:room]
        self._drop(self._evicted(level, below.make_room(len(run), visit.id)))
        followed = self._reachable(below, run)  # making room may have taken a parent
        self._note_left(Event.REFUSED_UNREACHABLE, level, run, followed)
        self._note(Event.SHED_NO_ROOM, level, followed[below.free_count :])
        run = followed[: below.free_count]
        keys = [resident.key for resident in run]
        targets = below.insert(keys, [resident.parent for resident in run], visit.id)
        if targets:
            visit.tails[level] = keys[-1]
            pairs = [(resident, target.slot) for resident, target in zip(run, targets, strict=True)]
            self.transfers.start(Level(level - 1), level, pairs, now_s)

    @staticmethod
    def _reachable(below: Residents, offered: Sequence[Resident]) -> list[Resident]:
        """Those whose parent is below or comes with them; room is made for no other."""
        found: list[Resident] = []
        coming: set[ChunkKey] = set()
        for resident in offered:
            parent = resident.parent
            if resident.key in below.entries:
                continue
            if parent is None or parent in below.entries or parent in coming:
                found.append(resident)
                coming.add(resident.key)
        return found

    def _visit(self, request: RequestId) -> _Visit:
        visit = self._visits.get(request)
        if visit is None:
            visit = self._visits[request] = _Visit(self._new_visit())
        return visit

    def _visit_of(self, request: RequestId, resident: Resident) -> _Visit:
        """The request's visit, or after its end the one that its chunks were last used by."""
        return self._visits.get(request) or _Visit(resident.visit)

    def _new_visit(self) -> VisitId:
        self._next_visit += 1
        return VisitId(self._next_visit)

    def _touch(self, visit: _Visit, keys: Sequence[ChunkKey], parent: ChunkKey | None) -> None:
        """Note in every tier that a visit used `keys` and, the first time, all that leads there."""
        for level, tier in enumerate(self.tiers):
            entries = tier.entries
            used = [resident for resident in map(entries.get, keys) if resident is not None]
            before = parent if parent is not None else (used[0].parent if used else None)
            partly = len(used) != len(keys)
            if before is not None and visit.tails.get(Level(level)) != before:
                partly = True
                used = self._ancestors(tier, before, visit.id) + used
            for resident in used:
                resident.visit = visit.id
            if used:
                tier.policy.hit([r.key for r in used] if partly else keys, visit.id)
                visit.tails[Level(level)] = used[-1].key
            else:
                tier.policy.renew(visit.id)

    @staticmethod
    def _ancestors(tier: Residents, key: ChunkKey, visit: VisitId) -> list[Resident]:
        """The resident chunks from `key` up to the chain's head, head first."""
        found: list[Resident] = []
        at: ChunkKey | None = key
        while at is not None:
            resident = tier.entries.get(at)
            if resident is None or resident.visit == visit:
                break
            found.append(resident)
            at = resident.parent
        found.reverse()
        return found

    @staticmethod
    def _descends(tier: Residents, key: ChunkKey | None, ancestor: ChunkKey) -> bool:
        """Whether `ancestor` leads to `key`: a record that says so of itself is wrong."""
        if key == ancestor:
            return True
        if ancestor not in tier.children:
            return False
        at = key
        while at is not None and at != ancestor:
            resident = tier.entries.get(at)
            at = resident.parent if resident is not None else None
        return at is not None

    def _evicted(self, level: Level, residents: Sequence[Resident]) -> Drop | None:
        self._note(Event.EVICTED, level, residents)
        return self._drop_of(level, residents)

    @staticmethod
    def _drop_of(level: Level, residents: Sequence[Resident]) -> Drop | None:
        if not residents:
            return None
        return Drop(level, tuple(r.key for r in residents), tuple(r.slot for r in residents))

    def _note(self, event: Event, level: Level, residents: Sequence[Resident]) -> None:
        if residents:
            self.journal.note(event, level, [resident.key for resident in residents])

    def _note_left(
        self, event: Event, level: Level, before: Sequence[Resident], after: Sequence[Resident]
    ) -> None:
        """Note for those of `before` that are not among `after`."""
        if len(after) < len(before):
            kept = {resident.key for resident in after}
            self._note(event, level, [r for r in before if r.key not in kept])

    def _drop(self, drop: Drop | None) -> None:
        if drop is not None:
            self._drops.append(drop)
