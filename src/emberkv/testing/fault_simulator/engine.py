"""An engine: requests that share prefixes, a scheduler that asks as vLLM's does, and its worker.

Every promise that the engine relies on is tested where it relies on it: what it is told, how long
it waits, and each byte that it loads.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from emberkv.domain.hints import NO_HINTS, Hints, TokenRange
from emberkv.domain.types import RAM, ChunkKey, RequestId, Slot
from emberkv.live.arena import Arena
from emberkv.live.lookup import Lookup
from emberkv.live.manager import TierManager
from emberkv.live.steps import StepWork
from emberkv.testing.fault_simulator.setting import (
    CHUNK_BYTES,
    MAX_WAIT_S,
    TENANTS,
    TOKENS_PER_CHUNK,
    Answer,
    Fault,
    Setting,
    payload_of,
)
from emberkv.testing.toy_requests import MAX_DEPTH, chain_of, parent_of

MAX_REQUESTS: Final = 12
MAX_JOB_STEPS: Final = 5  # fewer than the steps for which a reset fences what jobs touch


class Stage(enum.Enum):
    """How far a request has come."""

    WAITING = "waiting"
    LOADING = "loading"
    LOADED = "loaded"  # and not yet scheduled again
    RUNNING = "running"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Request:
    """One request as the engine sees it; `device` chunks of it are in the device's own cache."""

    id: RequestId
    chain: tuple[ChunkKey, ...]
    device: int
    hints: Hints = NO_HINTS
    stage: Stage = Stage.WAITING
    computed: int = 0
    preemptions: int = 0
    asked_step: int = -2
    asked_at_s: float = 0.0
    deferred_steps: int = 0
    waited_s: float = 0.0
    leased: bool = False  # a promotion was planned for it, and it has not run since
    settled: bool = False

    def starts_over(self) -> None:
        """Nothing of it is on the device any more."""
        self.stage = Stage.WAITING
        self.computed = 0
        self.leased = self.settled = False
        self.deferred_steps = 0


@dataclass(slots=True, eq=False)
class Job:
    """Copies of one request between device and arena; `ends_step` is when the engine hears of it.

    `stale` jobs are from before a reset: they still touch their rows, and end nothing.
    """

    request: Request
    pairs: list[tuple[ChunkKey, Slot]]
    is_store: bool
    epoch: int
    begins_step: int
    ends_step: int
    begun: bool = False
    stale: bool = False
    read: list[bytes] = field(default_factory=list)


class WrongBytesError(AssertionError):
    """The engine was given other bytes than were computed for the chunk."""


class Engine:
    """Scheduler and worker of one engine process."""

    def __init__(self, setting: Setting, manager: TierManager, arena: Arena, epoch: int) -> None:
        self.setting = setting
        self.manager = manager
        self.arena = arena
        self.epoch = epoch
        self.step_number = 0
        self.requests: list[Request] = []
        self.jobs: list[Job] = []
        self.preempted: list[RequestId] = []
        self.loaded_chunks = 0
        self._names = 0

    @property
    def is_idle(self) -> bool:
        return not self.requests and not self.jobs

    # ── what happens to it ───────────────────────────────────────────────────────────────────

    def arrive(self) -> None:
        """A request comes in, most often with a prefix that others have too."""
        chance = self.setting.chance
        depth = chance.randint(1, MAX_DEPTH)
        path = [chance.randrange(4) // 3 for _ in range(depth)]
        device = chance.randrange(depth) if chance.random() < 0.15 else 0
        self._names += 1
        hints = self._some_hints()
        request = Request(RequestId(f"r{self._names}"), tuple(chain_of(path)), device, hints)
        self.requests.append(request)
        self.manager.begin(request.id, hints)
        if self.setting.plan.tells:
            chain = request.chain
            self.manager.describe(request.id, len(chain) * TOKENS_PER_CHUNK, lambda: chain)

    def _some_hints(self) -> Hints:
        chance = self.setting.chance
        if not self.setting.strikes(Fault.HINTED, 0.15):
            return NO_HINTS
        ranges = (TokenRange(0, chance.choice((None, 8)), chance.choice((0, 20, 60, 100)), 2.0),)
        session = chance.choice((None, "one", "two"))
        return Hints(
            priority=ranges if chance.random() < 0.5 else (),
            pin_s=chance.choice((None, None, 1.0)),
            session=session,
            end_of_session=session is not None and chance.random() < 0.3,
            tool_call_pending=chance.random() < 0.1,
            no_store=chance.random() < 0.1,
            max_load_tokens=chance.choice((None, None, None, 8)),
            max_wait_s=chance.choice((None, None, 0.0, 0.5)),
            tiers=chance.choice((None, None, None, frozenset({"ram"}), frozenset({"ram", "disk"}))),
            tenant=chance.choice((None, *TENANTS)),
        )

    def abort(self) -> None:
        """The client of a request goes away."""
        alive = [r for r in self.requests if r.stage is not Stage.ENDED]
        if alive:
            request = self.setting.chance.choice(alive)
            fault = {
                Stage.WAITING: Fault.ABORT_WHILE_WAITING if request.deferred_steps else Fault.ABORT,
                Stage.LOADING: Fault.ABORT_WHILE_LOADING,
            }.get(request.stage, Fault.ABORT)
            self.setting.seen.note(fault)
            self._finish(request)

    def reset_device(self) -> None:
        """The device's own cache is emptied, and the tiers are not."""
        for request in self.requests:
            if request.stage is Stage.RUNNING:
                self._preempt(request)
            if request.stage is Stage.WAITING and not request.deferred_steps:
                request.device = 0

    def reset(self, epoch: int) -> None:
        """New weights: nothing that is kept anywhere may be used any more."""
        self.epoch = epoch
        for job in self.jobs:
            job.stale = True
        for request in self.requests:
            if request.stage is Stage.RUNNING:
                self._preempt(request)
            elif request.stage is not Stage.ENDED:
                request.starts_over()
            request.device = 0
        self.requests = [r for r in self.requests if r.stage is not Stage.ENDED]
        self.manager.reset()

    # ── a step ───────────────────────────────────────────────────────────────────────────────

    def step(self) -> None:
        """Hear what the worker did, schedule, and have it do more."""
        chance = self.setting.chance
        self.step_number += 1
        self._hear_jobs()
        if self.setting.plan.tells:
            self.manager.step_done()
        preempts = False
        for request in list(self.requests):
            if request.stage is Stage.RUNNING and self.setting.strikes(Fault.PREEMPTION, 0.02):
                self._preempt(request)
                preempts = True
        started = self._resume()
        if not preempts:  # else nobody who waits is looked at
            started += self._admit()
        self.manager.step_end(started, self.preempted)
        self.preempted = []
        self._work()
        pieces: dict[RequestId, tuple[int, int]] = {}
        running = [r for r in self.requests if r.stage is Stage.RUNNING]
        for request in running:
            self._compute(request, pieces)
        if self.setting.plan.tells:
            decoding = tuple(r.id for r in running if r.id not in pieces)
            self.manager.step_begins(StepWork(pieces, decoding))
        if chance.random() < 0.05:
            self.count_events()
            self.manager.samples()

    def count_events(self) -> None:
        """Take note of what the core has counted, before an export does."""
        counts = self.manager.stack.counts
        for (event, _), count in counts.items():
            self.setting.seen.note(event, count)
        counts.clear()

    def _resume(self) -> list[RequestId]:
        """Requests that have loaded are scheduled, sooner or later; returns who is new."""
        resumed = []
        for request in self.requests:
            if request.stage is Stage.LOADED and self.setting.chance.random() < 0.8:
                request.stage = Stage.RUNNING
                resumed.append(request)
        return [request.id for request in resumed if not request.preemptions]

    def _admit(self) -> list[RequestId]:
        """Look waiting requests up; returns who is new and starts without loading."""
        started = []
        for request in [r for r in self.requests if r.stage is Stage.WAITING]:
            if self.setting.strikes(Fault.NOT_ASKED, 0.03):
                continue
            if self._look_up(request) and not request.preemptions:
                started.append(request.id)
        return started

    def _preempt(self, request: Request) -> None:
        request.starts_over()
        request.preemptions += 1
        self.preempted.append(request.id)

    def _finish(self, request: Request) -> None:
        loads = request.stage is Stage.LOADING
        request.stage = Stage.ENDED
        if not loads:
            self.requests.remove(request)
        if request.id in self.preempted:
            self.preempted.remove(request.id)
        self.manager.finish(request.id)

    # ── look-up ──────────────────────────────────────────────────────────────────────────────

    def _look_up(self, request: Request) -> bool:
        """One pass over a request's chain; whether it starts to run without loading."""
        setting, manager = self.setting, self.manager
        keys = request.chain[request.device :]
        lease = manager.stack.promotions.lease(request.id)
        waits = lease is not None and not lease.ahead
        if setting.plan.tells:
            manager.asks(request.id, request.device * TOKENS_PER_CHUNK)
        said: list[Lookup] = []
        for key in keys:
            said.append(manager.lookup(request.id, key))
            if said[-1] is Lookup.MISS:
                break
        answer = self._answer_of(request, keys, said, waits)
        setting.seen.note(answer)
        if answer is Answer.HELD:
            request.deferred_steps = 0  # asked anew, and if preempted put off anew
            return False
        if answer in (Answer.WAIT, Answer.PUT_OFF, Answer.COLLECTED):
            self._deferred(request, answer)
            return False
        request.deferred_steps = 0
        if setting.strikes(Fault.NO_DEVICE_ROOM, 0.1):
            return False
        request.settled = request.leased = False
        hits = said.count(Lookup.HIT)
        if not hits:
            request.stage = Stage.RUNNING
            request.computed = request.device
            return True
        for key in keys[:hits]:
            level = manager.origin(request.id, key)
            assert 0 <= level < len(manager.stack.tiers)
        at_odds = request.id in self.preempted  # in a step that calls it preempted
        assert not at_odds, f"{request.id} is to load, and the engine can't in this step"
        slots = manager.prepare_load(request.id, keys[:hits])
        request.stage = Stage.LOADING
        self._add_job(request, list(zip(keys[:hits], slots, strict=True)), is_store=False)
        return False

    def _answer_of(
        self, request: Request, keys: Sequence[ChunkKey], said: list[Lookup], waits: bool
    ) -> Answer:
        """What kind of answer a pass has had; it must be one that the protocol knows."""
        ram = self.manager.stack.tiers[RAM]
        hits = said.count(Lookup.HIT)
        for key, each in zip(keys, said, strict=False):
            ready = each is not Lookup.HIT or ram.ready(key)
            assert ready, f"{request.id} is told that {key.hex()} is there"
        if self.manager._requests[request.id].held:
            assert said.count(Lookup.RETRY) == 1
            return Answer.HELD
        if Lookup.RETRY in said:
            if said[0] is Lookup.RETRY and self._is_put_off(request):
                assert request.preemptions, f"{request.id} is put off, and never was preempted"
                answer = Answer.PUT_OFF
            else:
                answer = Answer.WAIT if waits else Answer.COLLECTED
            if answer is not Answer.COLLECTED:
                assert said in ([Lookup.RETRY], [Lookup.RETRY, Lookup.MISS])
            return answer
        if request.leased:
            request.settled = True
            if hits == len(keys):
                return Answer.SETTLED_WHOLE
            return Answer.SETTLED_IN_PART if hits else Answer.SETTLED_WITHOUT
        if hits == len(keys):
            return Answer.ALL_IN_RAM
        return Answer.HEAD_IN_RAM if hits else Answer.NOTHING_KNOWN

    def _is_put_off(self, request: Request) -> bool:
        state = self.manager._requests[request.id]
        return state.put_off

    def _deferred(self, request: Request, answer: Answer) -> None:
        """Count how long a request waits for its promotion: nobody waits without end.

        Time in which the engine did not ask does not count.
        """
        now_s = self.setting.clock()
        request.deferred_steps += 1
        if answer is Answer.PUT_OFF:
            assert request.deferred_steps == 1, f"{request.id} is put off twice in a row"
            return
        assert not request.settled, f"{request.id} was answered and waits again"
        if answer is Answer.COLLECTED:
            request.leased = True
            request.waited_s = 0.0
            request.asked_step, request.asked_at_s = self.step_number, now_s
            return
        if self.step_number == request.asked_step + 1:
            request.waited_s += now_s - request.asked_at_s
        request.asked_step, request.asked_at_s = self.step_number, now_s
        asked_s = request.hints.max_wait_s
        most_s = MAX_WAIT_S if asked_s is None else min(asked_s, MAX_WAIT_S)
        assert request.waited_s < most_s, f"{request.id} has waited {request.waited_s:.2f} s"

    # ── computing ────────────────────────────────────────────────────────────────────────────

    def _compute(self, request: Request, pieces: dict[RequestId, tuple[int, int]]) -> None:
        """The request gets on; what it computes is offered, and one day it ends."""
        chance = self.setting.chance
        first = request.computed if chance.random() < 0.7 else 0
        had = request.computed
        request.computed = min(len(request.chain), had + chance.randint(1, 3))
        if request.computed > had:
            pieces[request.id] = had * TOKENS_PER_CHUNK, request.computed * TOKENS_PER_CHUNK
        keys = request.chain[first : request.computed]
        if keys:
            admitted = self.manager.prepare_store(
                request.id, keys, parent_of(keys[0]), first * TOKENS_PER_CHUNK
            )
            assert admitted is not None
            if admitted:
                self._add_job(request, admitted, is_store=True)
        if request.computed == len(request.chain) and chance.random() < 0.5:
            self._finish(request)

    # ── the worker ───────────────────────────────────────────────────────────────────────────

    def _add_job(
        self, request: Request, pairs: list[tuple[ChunkKey, Slot]], *, is_store: bool
    ) -> None:
        chance = self.setting.chance
        begins = self.step_number + chance.randrange(2)
        ends = begins + 1 + chance.randrange(MAX_JOB_STEPS - 2)
        self.jobs.append(Job(request, pairs, is_store, self.epoch, begins, ends))

    def _work(self) -> None:
        """Begin what is due; a store's rows are half written until its job ends."""
        for job in self.jobs:
            if job.begun or job.begins_step > self.step_number:
                continue
            job.begun = True
            for key, slot in job.pairs:
                if job.is_store:
                    row = payload_of(key, job.epoch)
                    self.arena.row(slot)[: CHUNK_BYTES // 2] = row[: CHUNK_BYTES // 2]
                else:
                    self._read(job, key, slot)

    def _read(self, job: Job, key: ChunkKey, slot: Slot) -> None:
        """Read a row, at the beginning of a load and again at its end: it must stay as it is."""
        row = bytes(self.arena.row(slot))
        if job.stale:
            return
        self.loaded_chunks += 1
        if row != payload_of(key, job.epoch):
            raise WrongBytesError(
                f"{job.request.id} loads {key.hex()} from slot {slot} and finds other bytes: "
                f"{self._name_of(row)}"
            )

    def _name_of(self, row: bytes) -> str:
        for epoch in range(self.epoch + 1):
            for key in self.manager.stack.toy.parents:  # type: ignore[attr-defined]
                if payload_of(key, epoch) == row:
                    return f"those of {key.hex()} in epoch {epoch}, not {self.epoch}"
        return "those of no chunk"

    def _hear_jobs(self) -> None:
        """Jobs that have ended, in any order."""
        ended = [job for job in self.jobs if job.ends_step <= self.step_number]
        self.jobs = [job for job in self.jobs if job.ends_step > self.step_number]
        self.setting.chance.shuffle(ended)
        for job in ended:
            for key, slot in job.pairs:
                if job.is_store:
                    self.arena.row(slot)[:] = payload_of(key, job.epoch)
                else:
                    self._read(job, key, slot)
            if job.stale:
                continue
            if job.is_store:
                self.manager.complete_store(job.request.id, {key for key, _ in job.pairs})
            else:
                self._loaded(job)

    def _loaded(self, job: Job) -> None:
        request = job.request
        self.manager.complete_load(request.id)
        if request.stage is Stage.ENDED:
            self.requests.remove(request)
        else:
            request.stage = Stage.LOADED
            request.computed = request.device + len(job.pairs)
