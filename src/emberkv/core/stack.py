"""The tier stack: decides which chunks sit where, and never moves a byte itself.

A driver calls it, carries out the effects it leaves, and reports how they ended:

    request's chain ─► begin, residence, promote, waiting ─► load … loaded
    computed chunks ─► offload … stored                                  ─► take_effects ─► driver
    engine's steps  ─► computed           done ◄──────────────────────────────────────────────┘

Rules kept here are listed in `emberkv.core.check`. Same calls with the same `now_s` make the same
decisions: the simulator and the live driver run this one class.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import groupby

from emberkv.core.admission import Admission
from emberkv.core.arrivals import Arrivals
from emberkv.core.counts import Journal
from emberkv.core.economy import Economy, Terms
from emberkv.core.evictions import Evictions
from emberkv.core.gates import Gate, Gates, Levels
from emberkv.core.leases import Cut, Lease
from emberkv.core.limits import Limits
from emberkv.core.promotions import Promotions
from emberkv.core.residents import READY, Resident, Residents, State
from emberkv.core.retention import Quotas, Retention
from emberkv.core.shadows import Shadows
from emberkv.core.transfers import Transfers
from emberkv.core.visits import Visit, Visits
from emberkv.core.write_behind import WriteBehind
from emberkv.domain.hints import Hints
from emberkv.domain.types import (
    RAM,
    ChunkKey,
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
from emberkv.policy.eviction.base import EvictionPolicy


class TierStack:
    """RAM, the only tier that the engine touches, and the tiers below, staged through it."""

    def __init__(
        self,
        tiers: Sequence[Residents],
        limits: Limits,
        terms: Terms | None = None,
        quotas: Quotas | None = None,
    ) -> None:
        self.tiers = tuple(tiers)
        self.limits = limits
        self.terms = terms or Terms()
        self.journal = Journal()
        self.counts = self.journal.counts
        self.economy = Economy(self.terms, len(self.tiers))
        self.gates = Gates(len(self.tiers))
        self.retention = Retention(self.tiers, quotas or Quotas())
        self.transfers = Transfers(self.tiers, limits, self.economy.reads)
        self._evictions = Evictions(self.journal, self.retention)
        self._admission = Admission(self.tiers, self.journal, self._evictions, self.gates)
        self.promotions = Promotions(
            self.transfers, self.journal, self._evictions, self.retention, self.economy
        )
        self.write_behind = WriteBehind(
            self.transfers,
            self.journal,
            self._evictions,
            retention=self.retention,
            gates=self.gates,
            economy=self.economy,
        )
        self._arrivals = Arrivals(
            self.transfers, self.promotions, self.write_behind, self._evictions, self.journal
        )
        self.visits = Visits(self.tiers)
        self.shadows = Shadows(self.tiers[RAM])
        self._loads: dict[RequestId, tuple[list[Resident], float]] = {}
        self._stores: dict[RequestId, dict[ChunkKey, None]] = {}
        self._ended: set[RequestId] = set()
        self._fenced: list[Slot] = []
        self._probes: list[tuple[VisitId, Sequence[ChunkKey], Levels | None]] = []

    # ── requests ─────────────────────────────────────────────────────────────────────────────

    def begin(self, request: RequestId, hints: Hints, prompt_tokens: int | None) -> None:
        """A request has come; without its prompt's length nobody waits in its favour."""
        self.visits.begin(request, hints)
        if prompt_tokens is not None:
            self.economy.backlog.arrive(request, prompt_tokens)

    def open_levels(self, request: RequestId) -> Levels | None:
        """The tiers that a request may load from; None is all."""
        visit = self.visits.find(request)
        named = None if visit is None else visit.hints.tiers
        if not self.gates.narrowed and named is None:
            return None
        found = frozenset(
            Level(n)
            for n in range(len(self.tiers))
            if self.gates.loads(Level(n), request) and (visit is None or visit.may_use(Level(n)))
        )
        return found if RAM in found else frozenset()

    def computed(
        self,
        pieces: Mapping[RequestId, tuple[int, int]],
        others: int,
        seconds: float | None,
    ) -> None:
        """A step of the engine has computed these tokens of prompts, and `others` beside.

        `seconds` is None where nobody knows how long it took.
        """
        self.economy.computed(pieces, others, seconds)

    def preempted(self, request: RequestId) -> None:
        """The engine has put a request back; all of its prompt is due again."""
        self.economy.backlog.stops(request)

    def scheduled(self, request: RequestId) -> None:
        """The engine runs the request: unless it is loading, its lease has served."""
        self.economy.backlog.computes(request)
        if request not in self._loads:
            self.promotions.close(request)

    def end(self, request: RequestId) -> None:
        """The request is over; copies already under way for it go on."""
        self.economy.backlog.ends(request)
        if request not in self._loads:
            self.promotions.close(request)
        self.gates.forget(request)
        self.shadows.ended(request)
        visit = self.visits.find(request)
        if visit is not None and visit.hints.end_of_session and visit.hints.session is not None:
            self.retention.end_session(visit.tenant, visit.hints.session)
        if request in self._stores:
            self._ended.add(request)
        else:
            self.visits.end(request)

    # ── look up ──────────────────────────────────────────────────────────────────────────────

    def residence(self, key: ChunkKey, now_s: float, levels: Levels | None = None) -> Level | None:
        """The nearest tier that has the chunk, or will have it without the engine's help.

        RAM means that the engine can load it now. `levels` are those that count. Moves nothing,
        changes nothing.
        """
        if levels is not None and RAM not in levels:
            return None
        resident = self.tiers[RAM].entries.get(key)
        if resident is not None:
            if resident.state is READY:
                return RAM
            origin = self.transfers.origin(key)
            hopeless = origin is None or self.transfers.stalled(origin, now_s)
            return None if hopeless or (levels is not None and origin not in levels) else origin
        for level in range(1, len(self.tiers)):
            if levels is not None and level not in levels:
                continue
            if self.tiers[level].ready(key) and not self.transfers.stalled(Level(level), now_s):
                return Level(level)
        return None

    def pays(self, level: Level, request: RequestId, first_token: int, now_s: float) -> bool:
        """Whether loading from a tier could gain anything, if it had all the rest of a prompt."""
        tokens = self.economy.backlog.tokens(request)
        if level == RAM:
            return self.economy.ram_pays(first_token, tokens, now_s)
        if tokens is None:
            return True
        chunks = max(1, (tokens - first_token) // self.terms.tokens_per_chunk)
        ahead_s = self.economy.backlog.ahead_s(request)
        return self.economy.cut([(level, chunks)], first_token, ahead_s, now_s) > 0

    def may_begin(self, request: RequestId, has_tokens: int, now_s: float) -> bool:
        """Whether a request can be computed now without making an earlier one late."""
        return self.economy.backlog.may_begin(request, has_tokens, now_s)

    def defers(self, request: RequestId, first_token: int, had: int, now_s: float) -> None:
        """A request will be promoted at the end of this step: its wait begins now."""
        tokens = self.economy.backlog.tokens(request)
        if tokens is not None:
            self.economy.park(request, first_token, had, tokens, now_s)

    def promote(
        self,
        request: RequestId,
        keys: Sequence[ChunkKey],
        now_s: float,
        first_token: int = 0,
        step: int | None = None,
    ) -> None:
        """Lease a whole chain for a request, and plan the copies that bring it into RAM.

        `keys` are consecutive, head first, each with a residence; they begin at `first_token`.
        What fits and is worth it is pinned until the request has loaded or ended; if nothing can
        start now the lease waits its turn. The wait begins with the caller's `step`.
        """
        visit = self.visits.of(request)
        self.visits.touch(visit, keys, None)
        lease = self._lease(request, visit, keys, first_token)
        ram = self.tiers[RAM]
        lease.had = next((n for n, key in enumerate(keys) if not ram.ready(key)), len(keys))
        if step is not None:
            lease.asked_step, lease.asked_at_s = step, now_s
        end = first_token + len(keys) * self.terms.tokens_per_chunk
        self.economy.park(request, first_token, lease.had, end, now_s)
        self.promotions.open(lease, now_s)

    def look_ahead(
        self, request: RequestId, keys: Sequence[ChunkKey], now_s: float, first_token: int = 0
    ) -> None:
        """A request waits for its turn in the engine: begin to bring up what it will ask for."""
        visit = self.visits.of(request)
        levels = self.open_levels(request)
        known = next(
            (n for n, key in enumerate(keys) if self.residence(key, now_s, levels) is None),
            len(keys),
        )
        if known:
            lease = self._lease(request, visit, keys[:known], first_token)
            self.promotions.look_ahead(lease, now_s)

    def probe(self, request: RequestId, keys: Sequence[ChunkKey], now_s: float) -> None:
        """A request did not load these from a tier that is too slow: `settle` may try if it is."""
        self._probes.append((self.visits.of(request).id, keys, self.open_levels(request)))

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
        """What is due once per step: promotions whose turn has come, chunks to pass on, ends."""
        self.retention.expire(now_s)
        self.promotions.settle(now_s)
        for visit, keys, levels in self._probes:
            self.promotions.probe(keys, visit, levels, now_s)
        self._probes.clear()
        self.write_behind.settle(now_s)

    # ── engine ↔ RAM ─────────────────────────────────────────────────────────────────────────

    def offload(
        self,
        request: RequestId,
        keys: Sequence[ChunkKey],
        parent: ChunkKey | None,
        now_s: float,
        first_token: int = 0,
    ) -> list[Resident]:
        """Admit newly computed consecutive chunks to RAM; returns those the engine shall write.

        Also the signal that the request used all of `keys`, which begin at `first_token` of its
        tokens. Chunks already there, or being written, are left out; from the first that finds no
        room on, nothing is admitted.
        """
        visit = self.visits.of(request)
        self.visits.touch(visit, keys, parent)
        end = first_token + len(keys) * self.terms.tokens_per_chunk
        self.economy.backlog.has(request, end)
        admitted = self._admission.admit(visit, keys, parent)
        if admitted:
            pending = self._stores.setdefault(request, {})
            pending.update((resident.key, None) for resident in admitted)
        fresh = [resident.key for resident in admitted]
        self.retention.apply(visit.hints, keys, self._ends(keys, first_token), now_s, fresh)
        self.write_behind.offer(visit, keys, now_s)
        return admitted

    def stored(
        self, request: RequestId, keys: Collection[ChunkKey], now_s: float
    ) -> list[Resident]:
        """The engine has written these: usable now, and written behind. Returned in chain order."""
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
        if published:
            visit = self.visits.of_resident(request, published[-1])
            self.write_behind.offer(visit, done, now_s)
        if not pending:
            self._stores.pop(request, None)
            if request in self._ended:
                self._ended.remove(request)
                self.visits.end(request)
        return published

    def load(
        self,
        request: RequestId,
        keys: Sequence[ChunkKey],
        now_s: float,
        first_token: int = 0,
    ) -> list[Resident]:
        """Pin chunks that the engine is about to read from RAM. All must be READY."""
        if request in self._loads:
            raise InvariantError(f"request {request} loads twice at once")
        ram = self.tiers[RAM]
        residents = map(ram.entries.get, keys)
        found = [r for r in residents if r is not None and r.state is READY]
        if len(found) != len(keys):
            raise InvariantError(f"request {request} loads chunks that are not ready")
        visit = self.visits.of(request)
        self.visits.touch(visit, keys, found[0].parent if found else None)
        ram.pin_run(found)
        for resident in found:
            resident.unused = False
        self._loads[request] = list(found), now_s
        end = first_token + len(keys) * self.terms.tokens_per_chunk
        if not self.economy.backlog.is_parked(request):
            self.economy.park(request, first_token, 0, end, now_s)
        self.economy.backlog.has(request, end)
        self.retention.apply(visit.hints, keys, self._ends(keys, first_token), now_s)
        self.write_behind.offer(visit, keys, now_s)
        return found

    def loaded(self, request: RequestId, now_s: float) -> None:
        """The engine has read what `load` pinned; the request's lease ends with it."""
        residents, began_s = self._loads.pop(request, ([], now_s))
        self.tiers[RAM].unpin_run(residents)
        self.economy.loads.observe(len(residents), now_s - began_s, now_s)
        self.promotions.close(request)

    # ── tiers below ──────────────────────────────────────────────────────────────────────────

    def take_effects(self) -> list[Effect]:
        """The work that follows from the calls since the last time, in order."""
        return [*self._evictions.take(), *self.transfers.take()]

    def done(
        self, transfer: TransferId, results: Sequence[tuple[int, Outcome]], now_s: float
    ) -> list[Resident]:
        """Some chunks of a copy have ended, at a time that may lie before what others were told.

        Returns those now in RAM.
        """
        return self._arrivals.done(transfer, results, now_s)

    def adopt(self, level: Level, entries: Sequence[Entry]) -> None:
        """Take in chunks that a tier still holds from an earlier run, oldest first."""
        self._arrivals.adopt(level, entries, self.visits)

    def reset(self) -> None:
        """Forget everything in every tier.

        Slots that are still touched are not given out before that is over: see `unfence`, `done`.
        """
        self.promotions.clear()
        touched = self.transfers.abandon()
        ram = self.tiers[RAM]
        busy = {resident.slot for loading, _ in self._loads.values() for resident in loading}
        busy.update(ram.entries[key].slot for keys in self._stores.values() for key in keys)
        fenced = sorted(busy)
        touched.setdefault(RAM, []).extend(fenced)
        for level, tier in enumerate(self.tiers):
            self._evictions.drop(Level(level), list(tier.entries.values()))
            tier.clear(touched.get(Level(level), []))
        self._fenced += fenced
        self.write_behind.forget()
        self.retention.clear()
        self._loads.clear()
        self._stores.clear()
        self._probes.clear()
        self.visits.begin_anew(self._ended)
        self._ended.clear()

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
        keys = list(self.tiers[level].entries)
        self.tiers[level].clear(hold)
        self._evictions.forget(keys)
        self.write_behind.forget(level)

    def empty(self, level: Level) -> None:
        """Evict all that may leave of a tier."""
        self._evictions.left(level, self.tiers[level].evict_all())

    def reserve(self, count: int) -> list[Slot]:
        """Take up to so many slots of RAM out of use, for good; who has to leaves."""
        ram = self.tiers[RAM]
        self._evictions.left(RAM, ram.make_room(count, None))
        return ram.reserve(count)

    def set_gate(self, level: Level, gate: Gate) -> None:
        """Open or shut a tier, for requests that ask from now on and chunks offered from now on."""
        self.gates.set(level, gate)

    def set_policy(self, level: Level, policy: EvictionPolicy) -> None:
        """Let another policy order a tier from now on; it begins with the old one's order."""
        tier = self.tiers[level]
        order = [tier.entries[key] for key in tier.policy.victims()]
        for _, visit in groupby(order, key=lambda resident: resident.visit):
            tail_first = [resident.key for resident in visit]
            policy.insert(tail_first[::-1], self.visits.fresh_id())
        tier.policy = policy

    def unfence(self) -> None:
        """The engine's workers are done with every job from before the last reset."""
        self.tiers[RAM].free_held(self._fenced)
        self._fenced = []

    def loads_under_way(self) -> Mapping[RequestId, Collection[ChunkKey]]:
        """For checks: what the engine is reading, per request."""
        return {request: [r.key for r in run] for request, (run, _) in self._loads.items()}

    def pending_stores(self) -> Mapping[RequestId, Collection[ChunkKey]]:
        """For checks: what the engine is writing, per request."""
        return self._stores

    def open_visits(self) -> Collection[RequestId]:
        """For checks: requests that have used something and not ended."""
        return self.visits.requests()

    # ── inner ────────────────────────────────────────────────────────────────────────────────

    def _lease(
        self, request: RequestId, visit: Visit, keys: Sequence[ChunkKey], first_token: int
    ) -> Lease:
        asked_s = visit.hints.max_wait_s
        max_wait_s = self.limits.max_wait_s if asked_s is None else asked_s
        lease = Lease(request, tuple(keys), visit.id, max_wait_s)
        lease.levels, lease.tenant = self.open_levels(request), visit.tenant
        lease.first_token = first_token
        backlog = self.economy.backlog
        end = first_token + len(keys) * self.terms.tokens_per_chunk
        backlog.arrive(request, end)
        lease.ahead_s = backlog.ahead_s(request)
        return lease

    def _ends(self, keys: Sequence[ChunkKey], first_token: int) -> range:
        """Where each of consecutive chunks ends that begin at `first_token`."""
        size = self.terms.tokens_per_chunk
        return range(first_token + size, first_token + size * (len(keys) + 1), size)
