"""Plays every call on a tier stack in any order, and holds what it does against a toy memory.

Requests share prefixes, wait together, abort at any point; copies end in any order, in pieces and
badly; tiers stall, are damaged and lost, everything is reset and restarted. Tiers have a few slots
each, so that everything collides. Each call is audited for the rules of `emberkv.core.check` and
carried out in a toy memory (see `emberkv.testing.toy_tiers`); at the end all calls are replayed on
a fresh stack, which must decide the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from emberkv.core.audit import AuditedStack
from emberkv.core.check import check
from emberkv.core.limits import Limits
from emberkv.core.residents import Residents
from emberkv.core.stack import TierStack
from emberkv.domain.types import (
    RAM,
    ChunkKey,
    Entry,
    Level,
    Outcome,
    Slot,
    TransferId,
)
from emberkv.policy.eviction import EVICTION_POLICIES
from emberkv.sim.calls import RecordedStack, replay_calls
from emberkv.testing.toy_requests import (
    MAX_DEPTH,
    Act,
    Being,
    Request,
    Trouble,
    chain_of,
    every_key,
    parent_of,
)
from emberkv.testing.toy_tiers import ToyTiers

MAX_WAIT_S = 3.0
MAX_STALL_S = 1.0


@dataclass(frozen=True, slots=True)
class Shape:
    """A small tier stack: a policy per tier, RAM first, and limits on what is under way."""

    slot_counts: tuple[int, ...]
    policies: tuple[str, ...]
    write_behind_chunks: int
    promotion_chunks: int


class StackPlayer:
    """Calls a stack of `stack_class` as an engine and a driver would.

    Raises `AssertionError` or `InvariantError` as soon as the stack does what it must not.
    """

    def __init__(self, stack_class: type[TierStack], shape: Shape) -> None:
        self.stack_class = stack_class
        self.shape = shape
        self.limits = Limits(
            shape.write_behind_chunks, shape.promotion_chunks, MAX_WAIT_S, MAX_STALL_S
        )
        self.keys = every_key()
        self.now_s = 0.0
        self.step = 0
        self.names = 0
        self.requests: list[Request] = []
        self.toy = self._new_toy()
        self.stack = self._new_stack()

    def _new_toy(self) -> ToyTiers:
        parents = {key: parent_of(key) for key in self.keys}
        return ToyTiers(self.shape.slot_counts, parents, MAX_STALL_S)

    def _new_stack(self) -> TierStack:
        played = type("PlayedStack", (RecordedStack, AuditedStack, self.stack_class), {})
        stack: RecordedStack = played(
            [
                Residents(count, 1, EVICTION_POLICIES[name](count))
                for count, name in zip(self.shape.slot_counts, self.shape.policies, strict=True)
            ],
            self.limits,
        )
        self.log: list[str] = []
        self.untaken = False
        stack.record_to(self.log.append)
        return stack

    # ── time and effects ─────────────────────────────────────────────────────────────────────

    def take_effects(self) -> None:
        self.toy.carry_out(self.stack.take_effects(), self.now_s)
        self.untaken = False

    def _leave_effects(self, leave: bool) -> None:
        """Take effects now, or at the next call that can't go without."""
        if leave:
            self.untaken = True
        else:
            self.take_effects()

    def engine_step(self, seconds: float, pause: bool, skip: int, leave: bool) -> None:
        """Ask for the waiting requests, all but one at times, as an engine does every step."""
        self.take_effects()
        self.now_s += seconds
        self.step += 1 + pause
        waiting = self._those(Being.WAITING)
        for number, request in enumerate(waiting):
            if not skip or number + 1 != skip:
                self._ask(request)
        self.stack.settle(self.now_s)
        self._leave_effects(leave)

    def _ask(self, request: Request) -> None:
        if self.step == request.asked_step + 1:
            request.waited_s += self.now_s - request.asked_at_s
        request.asked_step, request.asked_at_s = self.step, self.now_s
        if self.stack.waiting(request.id, self.step, self.now_s):
            assert request.waited_s < MAX_WAIT_S, f"{request.id} has waited {request.waited_s} s"
            return
        request.being = Being.ANSWERED
        request.promised = tuple(self._pinned_prefix(request))

    def _pinned_prefix(self, request: Request) -> list[ChunkKey]:
        """What stays ready until it is loaded: of what others have fetched, the lease pins none."""
        lease = self.stack.promotions.lease(request.id)
        pinned: list[ChunkKey] = []
        for key in request.leased[: lease.ready] if lease is not None else ():
            if self.stack.residence(key, self.now_s) != RAM:
                break
            pinned.append(key)
        return pinned

    def bustle(self, random: Random, acts: int) -> None:
        """Do anything at all, `acts` times."""
        for _ in range(acts):
            pick, count, leave = random.randrange(64), random.randint(1, 6), random.random() < 0.3
            path = [random.randrange(4) // 3 for _ in range(random.randint(1, MAX_DEPTH))]
            act = random.randrange(100)
            if act < 20:
                self.arrive(path, count, leave)
            elif act < 30:
                self.serve(path, pick % 9)
            elif act < 55:
                self.go_on(random.choice(list(Act)), pick, count, leave)
            elif act < 75:
                seconds = random.choice((0.1, 0.1, 0.1, 0.6, 1.1))
                self.engine_step(seconds, pick % 5 == 0, pick % 3, leave)
            elif act < 96:
                wishes = random.choices((Outcome.OK, *Outcome), (20, *[1] * len(Outcome)), k=count)
                self.copy_ends(pick, count, wishes)
            elif act < 99:
                self.fail(random.choice(list(Trouble)), pick, leave)
            else:
                self.unfence()
            self.rules_hold()

    # ── requests ─────────────────────────────────────────────────────────────────────────────

    def arrive(self, path: list[int], want: int, leave: bool) -> None:
        """A request is looked up, and loads what is in RAM, waits, or runs at once."""
        self._look_up(self._new_request(path), want, leave)

    def serve(self, path: list[int], copies: int) -> None:
        """A request passes through without trouble, as most do, and some copies end."""
        request = self._new_request(path)
        self._look_up(request, MAX_DEPTH, False)
        if request.being is Being.LOADING:
            self._loaded(request)
        if request.being is Being.RUNNING:
            self._offload(request, MAX_DEPTH)
            if request.writing:
                self._stored(request, list(request.writing), False)
            self._end(request)
        for transfer in sorted(self.toy.transfers)[:copies]:
            self._finish(transfer, 0, MAX_DEPTH, [Outcome.OK] * MAX_DEPTH)

    def _new_request(self, path: Sequence[int]) -> Request:
        self.names += 1
        request = Request(self.names, chain_of(path))
        self.requests.append(request)
        return request

    def go_on(self, act: Act, pick: int, count: int, leave: bool) -> None:
        """Something happens to one request that it can happen to."""
        those = self._able(act)
        if not those:
            return
        request = those[pick % len(those)]
        match act:
            case Act.LOAD if request.promised:
                self._load(request, request.promised)
            case Act.LOAD | Act.SKIP:
                self.stack.scheduled(request.id)
                request.being = Being.RUNNING
            case Act.LOADED:
                self._loaded(request)
            case Act.OFFLOAD:
                self._offload(request, count)
            case Act.STORED:
                turn = pick % len(request.writing)
                keys = request.writing[turn:] + request.writing[:turn]
                self._stored(request, keys[:count], leave)
            case Act.PREEMPT if not request.writing:
                request.computed = 0
                self._look_up(request, count, leave)
            case Act.END:
                self._end(request)

    def _look_up(self, request: Request, want: int, leave: bool) -> None:
        self.take_effects()
        known: list[ChunkKey] = []
        below = False
        for key in request.chain:
            level = self.stack.residence(key, self.now_s)
            assert level == self.toy.residence(key, self.now_s)
            if level is None:
                break
            below = below or level != RAM
            known.append(key)
        if below:
            self.stack.promote(request.id, known, self.now_s)
            request.leased = known
            request.being = Being.WAITING
            request.waited_s = 0.0
            request.asked_step = -2
            self._leave_effects(leave)
        elif known:
            self._load(request, known[:want])
        else:
            request.being = Being.RUNNING

    def _load(self, request: Request, keys: Sequence[ChunkKey]) -> None:
        self.take_effects()
        residents = self.stack.load(request.id, keys, self.now_s)
        self.take_effects()
        assert [resident.key for resident in residents] == list(keys)
        request.loading = [(resident.key, resident.slot) for resident in residents]
        for key, slot in request.loading:
            self.toy.engine_reads(key, slot)
        request.being = Being.LOADING

    def _loaded(self, request: Request) -> None:
        for key, slot in request.loading:
            self.toy.engine_has_read(key, slot)
        self.stack.loaded(request.id, self.now_s)
        request.computed = len(request.loading)
        request.loading = []
        request.being = Being.RUNNING
        self._forget_ended()

    def _offload(self, request: Request, count: int) -> None:
        self.take_effects()
        keys = request.chain[request.computed : request.computed + count]
        if not keys:
            return
        admitted = self.stack.offload(request.id, keys, parent_of(keys[0]), self.now_s)
        self.take_effects()
        for resident in admitted:
            self.toy.engine_writes(resident.key, resident.slot)
            request.writing.append(resident.key)
        request.computed += len(keys)

    def _stored(self, request: Request, keys: Sequence[ChunkKey], leave: bool) -> None:
        for key in keys:
            self.toy.engine_wrote(key)
            request.writing.remove(key)
        published = self.stack.stored(request.id, keys, self.now_s)
        assert {resident.key for resident in published} == set(keys)
        self._leave_effects(leave)
        self._forget_ended()

    def _end(self, request: Request) -> None:
        self.stack.end(request.id)
        request.ended = True
        self._forget_ended()

    def _forget_ended(self) -> None:
        self.requests = [
            request
            for request in self.requests
            if not request.ended or request.writing or request.loading
        ]

    # ── copies ───────────────────────────────────────────────────────────────────────────────

    def copy_ends(self, pick: int, first: int, wishes: list[Outcome]) -> None:
        """Some chunks of a copy end, in any order, well or badly."""
        self.take_effects()
        transfers = sorted(self.toy.transfers)
        if transfers:
            self._finish(transfers[pick % len(transfers)], first, len(wishes), wishes)

    def _finish(
        self, transfer: TransferId, first: int, count: int, wishes: Sequence[Outcome]
    ) -> None:
        unfinished = sorted(self.toy.transfers[transfer].unfinished)
        turned = unfinished[first % len(unfinished) :] + unfinished[: first % len(unfinished)]
        results = [
            (index, self.toy.finish(transfer, index, wish, self.now_s))
            for index, wish in zip(turned[:count], wishes, strict=False)
        ]
        arrived = self.stack.done(transfer, results, self.now_s)
        for resident in arrived:
            assert self.toy.memory[RAM, resident.slot] == resident.key
            assert self.toy.books[RAM][resident.key].ready
        for request in self._those(Being.ANSWERED):
            for n, key in enumerate(request.promised):
                if key not in self.toy.books[RAM]:  # its bytes turned out bad
                    request.promised = request.promised[:n]
                    break

    # ── trouble ──────────────────────────────────────────────────────────────────────────────

    def fail(self, trouble: Trouble, pick: int, keep_ram: bool) -> None:
        """Something goes wrong."""
        match trouble:
            case Trouble.DAMAGE:
                self._damage(pick)
            case Trouble.RESET:
                self._reset()
            case Trouble.RESTART:
                self._restart(pick, keep_ram)
            case Trouble.LOST_TIER if pick % len(self.shape.slot_counts):
                self._lose_tier(Level(pick % len(self.shape.slot_counts)))

    def unfence(self) -> None:
        """The engine has done everything that it had begun before the last reset."""
        self.toy.unfence()
        self.stack.unfence()

    def _damage(self, pick: int) -> None:
        """Bits flip below RAM."""
        whole = [
            (Level(level), key)
            for level, books in enumerate(self.toy.books)
            for key, kept in sorted(books.items())
            if level and kept.ready
        ]
        if whole:
            self.toy.damage(*whole[pick % len(whole)])

    def _lose_tier(self, level: Level) -> None:
        """A tier goes down, and comes back with nothing."""
        self.take_effects()
        for transfer, under_way in sorted(self.toy.transfers.items()):
            if level in (under_way.copy.source, under_way.copy.target):
                shed = [Outcome.SHED] * len(under_way.unfinished)
                self._finish(transfer, 0, len(shed), shed)
        tier = self.stack.tiers[level]
        slots = [Slot(slot) for slot in range(tier.slot_count)]
        self.stack.lose_tier(level, slots, self.now_s)
        self.toy.lose_tier(level)
        self.take_effects()
        assert not tier.free_count
        self.stack.free_held(level, slots)

    def _reset(self) -> None:
        taken = set(self.toy.transfers)
        self.stack.reset()
        self.toy.reset(taken)
        self.take_effects()
        self._after_reset()

    def _after_reset(self) -> None:
        for request in self.requests:
            request.loading = []
            request.writing = []
            request.being = Being.RUNNING
            request.computed = 0
        self._forget_ended()

    def _restart(self, split: int, keep_ram: bool) -> None:
        """Everything dies; a new stack takes in what the tiers' bytes say they hold."""
        old = self.toy
        self.requests = []
        self.toy = self._new_toy()
        self.stack = self._new_stack()
        for number, count in enumerate(self.shape.slot_counts):
            level = Level(number)
            slots = [Slot(slot) for slot in range(count)]
            self.stack.hold(level, slots)
            named: list[Entry] = []
            for slot in slots if level or keep_ram else []:
                key = ChunkKey(old.memory[level, slot])
                if key in old.parents:
                    named.append(Entry(key, parent_of(key), slot))
            self._adopt(level, named[:split])
            self._adopt(level, named[split:])
            rest = set(slots).difference(entry.slot for entry in named)
            self.stack.free_held(level, sorted(rest))
        self.take_effects()

    def _adopt(self, level: Level, entries: Sequence[Entry]) -> None:
        self.stack.adopt(level, entries)
        for entry in entries:
            self.toy.found(level, entry)

    # ── what always holds ────────────────────────────────────────────────────────────────────

    def rules_hold(self) -> None:
        """Every chunk is where all that happened says it must be; the rest is audited per call."""
        if self.untaken:
            return
        present = {key for books in self.toy.books for key in books}
        present.update(key for tier in self.stack.tiers for key in tier.entries)
        for key in sorted(present):
            says = self.stack_class.residence(self.stack, key, self.now_s)
            should = self.toy.residence(key, self.now_s)
            assert says == should, f"{key!r} is in {should}, the stack says {says}"

    def finish(self) -> None:
        """Let everything end: nobody waits for ever, nothing is left, a replay decides the same."""
        self._everyone_is_answered()
        self._everything_ends()
        replayed = list(replay_calls(self.log))
        assert replayed == self.log, "rule 10: the same calls made other decisions"

    def _everyone_is_answered(self) -> None:
        """With every tier hung, whoever waits is let go in time."""
        deadline_s = self.now_s + MAX_WAIT_S + 1.0
        while waiting := self._those(Being.WAITING):
            assert self.now_s < deadline_s, f"rule 8: {waiting[0].id} waits for ever"
            self.engine_step(0.5, False, 0, False)

    def _everything_ends(self) -> None:
        """Once all that goes on has ended, nothing is pinned, held, leased or remembered."""
        for request in list(self.requests):
            if request.loading:
                self._loaded(request)
            if request.writing:
                self._stored(request, list(request.writing), False)
            if not request.ended:
                self._end(request)
        self.unfence()
        self.stack.settle(self.now_s)
        self.take_effects()
        while self.toy.transfers:
            transfer = min(self.toy.transfers)
            self._finish(transfer, 0, 1, [Outcome.OK])
            self.stack.settle(self.now_s)
            self.take_effects()
        check(self.stack, self.now_s)
        for level, tier in enumerate(self.stack.tiers):
            assert not tier.pinned_count, f"tier {level}: something is pinned for ever"
            assert not tier.held, f"tier {level}: slots are held for ever: {tier.held}"
        assert not list(self.stack.promotions.leases()), "a lease that never ends"
        assert not self.stack.open_visits(), "a visit that never ends"
        assert not self.stack.transfers.open_copies(stale=None)

    # ── choosing ─────────────────────────────────────────────────────────────────────────────

    def _those(self, being: Being) -> list[Request]:
        return [r for r in self.requests if r.being is being and not r.ended]

    def _able(self, act: Act) -> list[Request]:
        """The requests to which it may happen."""
        match act:
            case Act.LOAD | Act.SKIP:
                return self._those(Being.ANSWERED)
            case Act.LOADED:
                return [r for r in self.requests if r.being is Being.LOADING]
            case Act.STORED:
                return [r for r in self.requests if r.writing]
            case Act.END:
                return [r for r in self.requests if not r.ended]
            case Act.OFFLOAD | Act.PREEMPT:
                return self._those(Being.RUNNING)
