"""The tier manager: what an engine's adapter calls, on the engine's scheduler thread.

It keeps the look-up protocol (a chain is collected in one pass, promoted as a whole, waited for
in two calls a step however long it is, and then answered without another wait), and carries the
core's effects to the driver:

    lookup … lookup, step_end │ lookup, lookup, step_end │ lookup … lookup, prepare_load
    collect          promote  │ wait             wait    │ answer

It never raises into the engine: a defect of ours turns the tiers off and is logged once. With
`strict` it raises, for tests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence

from emberkv.core.guard import Guard
from emberkv.core.stack import TierStack
from emberkv.domain.hints import NO_HINTS, Hints
from emberkv.domain.types import RAM, ChunkKey, Level, RequestId, Slot
from emberkv.live.canaries import Canaries
from emberkv.live.carrier import Carrier
from emberkv.live.collect import look_up, still_held
from emberkv.live.complaints import Complaints
from emberkv.live.control.turns import Turns, contained, exclusive
from emberkv.live.driver import Driver
from emberkv.live.fates import Fates
from emberkv.live.look_ahead import LookAhead
from emberkv.live.lookup import Lookup
from emberkv.live.preempted import Preempted
from emberkv.live.recent import Recent
from emberkv.live.requests import Answering, RequestState
from emberkv.live.steps import Steps, StepWork, with_token
from emberkv.live.watch import Watch
from emberkv.observe.metrics import ENGINE_BYTES, LOAD_SECONDS
from emberkv.observe.requests import MissReason, RequestFacts
from emberkv.observe.tally import Sample, Tally

logger = logging.getLogger(__name__)

LOAD = ("load",)
STORE = ("store",)
GAUGES_EVERY_S = 1.0

STEPS_IN_FLIGHT = 64
"""More steps than any engine schedules ahead of what its workers have done: pipeline stages + 1."""


class TierManager:
    """One engine's tiers. Calls come from the engine's scheduler thread; others take `turns`.

    `clock` gives monotonic seconds. `on_finished` receives the facts of each request that ends.
    """

    def __init__(
        self,
        stack: TierStack,
        driver: Driver,
        clock: Callable[[], float],
        on_finished: Callable[[RequestFacts], None],
        *,
        strict: bool = False,
        guard: Guard | None = None,
    ) -> None:
        self.stack = stack
        self.driver = driver
        self.serving = True
        self.reset_is_durable = True
        self.tally = Tally()
        self.turns = Turns()
        self.fates = Fates(stack.journal)
        self.recent = Recent()
        self._clock = clock
        self._on_finished = on_finished
        self._strict = strict
        self._carrier = Carrier(stack, driver, self.tally)
        self.steps = Steps()
        self._requests: dict[RequestId, RequestState] = {}
        self._look_ahead = LookAhead(stack)
        self._deferred: list[RequestState] = []
        self._preempted_ones = Preempted()
        self.complaints = Complaints(self.tally)
        self.watch = Watch(stack, self.tally, guard)
        self.canaries: Canaries | None = None
        self._step = 0
        self._drained_step = -1
        self._unfence_step: int | None = None
        self._now_s = 0.0
        self._exported_at_s = 0.0

    # ── requests ─────────────────────────────────────────────────────────────────────────────

    @exclusive
    def begin(self, request: RequestId, hints: Hints = NO_HINTS) -> RequestFacts:
        """A request has arrived; returns its facts, for the adapter to complete."""
        state = self._requests[request] = RequestState(request, hints, self._clock())
        if hints.max_load_tokens is not None:
            state.chunk_limit = hints.max_load_tokens // self.stack.terms.tokens_per_chunk
        if hints is not NO_HINTS:
            self._begun(state, None)
        return state.facts

    def describe(
        self, request: RequestId, prompt_tokens: int, keys: Callable[[], Sequence[ChunkKey]]
    ) -> None:
        """What some engines tell of a request: its prompt's length, and all keys of its chain."""
        state = self._requests.get(request)
        if state is not None:
            state.facts.prompt_tokens = prompt_tokens
            state.keys = keys
            state.trail.names(keys, prompt_tokens // self.stack.terms.tokens_per_chunk)
            self._begun(state, prompt_tokens)
            self._look_ahead.add(state)

    @contained
    def _begun(self, state: RequestState, prompt_tokens: int | None) -> None:
        self.stack.begin(RequestId(state.facts.request), state.hints, prompt_tokens)

    def asks(self, request: RequestId, device_tokens: int) -> None:
        """The engine is about to look a request up behind what its device holds."""
        state = self._requests.get(request)
        if state is not None:
            state.first_token = device_tokens - device_tokens % self.stack.terms.tokens_per_chunk
            if not state.facts.preemptions:
                state.facts.device_tokens = device_tokens
            self._asked_for(request, device_tokens)

    @contained
    def _asked_for(self, request: RequestId, device_tokens: int) -> None:
        self.stack.economy.backlog.has(request, device_tokens)

    @exclusive
    def finish(self, request: RequestId) -> None:
        """A request is over; copies for it may still end later."""
        state = self._requests.pop(request, None)
        if state is None:
            return
        self._look_ahead.remove(request)
        self._preempted_ones.forget(request)
        try:
            self._end_wait(state, self._clock())
            if self.serving:
                self.stack.end(request)
            else:
                state.facts.miss_reason = MissReason.NOT_SERVING
            self.tally.ended(state.facts)
            self.recent.end(state.trail, self._clock())
            self._on_finished(state.facts)
        except Exception as error:
            self.give_up(error)

    def facts(self, request: RequestId) -> RequestFacts | None:
        state = self._requests.get(request)
        return None if state is None else state.facts

    def prompt_tokens(self, request: RequestId) -> int | None:
        """The length of a request's prompt, where the engine has told it."""
        state = self._requests.get(request)
        return None if state is None else state.facts.prompt_tokens

    # ── look up ──────────────────────────────────────────────────────────────────────────────

    def lookup(self, request: RequestId, key: ChunkKey) -> Lookup:
        """What to tell the engine of the next chunk of a request's chain. O(1)."""
        state = self._requests.get(request)
        if state is None or not self.serving:
            return Lookup.MISS
        try:
            if state.asked_step != self._step:
                self._begin_pass(state, request)
            if state.put_off or state.answering is Answering.WAIT:
                state.index += 1
                return Lookup.RETRY if state.index == 1 else Lookup.MISS
            if state.passes:
                return Lookup.MISS
            was_deferred = state.deferred
            answer = look_up(self.stack, state, key, self._now_s)
            if state.deferred and not was_deferred:
                self._deferred.append(state)
            if answer is Lookup.RETRY:
                state.waits_step = self._step
            elif answer is Lookup.HIT and self.canaries and self.canaries.takes(state, key):
                state.facts.miss_reason = MissReason.CANARY
                return Lookup.MISS
            return answer
        except Exception as error:
            self.give_up(error)
            return Lookup.MISS

    def origin(self, request: RequestId, key: ChunkKey) -> Level:
        """The tier that a chunk answered as HIT came from, for this request."""
        return self.stack.origin(request, key)

    def _begin_pass(self, state: RequestState, request: RequestId) -> None:
        if self._drained_step != self._step:  # before anything is said to be missing
            self._drained_step = self._step
            self.turns.begin_pass()
            self._drain(self._clock())
        state.asked_step = self._step
        state.index = 0
        was_held, state.held = state.held, False
        # One that has run was preempted just now, between two steps. step_end will say so, and the
        # engine fails if a request loads in the step that calls it preempted.
        state.put_off, state.may_run = state.may_run, False
        state.passes = self._preempted_ones.may_have_run(state, self._step)
        if state.put_off:
            state.waits_step = self._step
            return
        if state.passes and state.answering is not Answering.WAIT:
            return
        if was_held and still_held(self.stack, state, self._now_s):
            state.put_off = state.held = True
            state.waits_step = self._step
            return
        if state.answering is Answering.COLLECT:
            state.trail.begin_pass()
            state.chain.clear()
            state.deferred = False
            state.facts.miss_reason = MissReason.WHOLE
            state.levels = self.stack.open_levels(request)
            self._look_ahead.remove(request)
        elif state.answering is Answering.WAIT:
            now_s = self._clock()
            if not self.stack.waiting(request, self._step, now_s):
                self._settle_wait(state, request, now_s)
        if state.answering is Answering.WAIT:
            state.waits_step = self._step
        else:
            state.trail.mark = self.fates.mark(self._now_s)

    def _settle_wait(self, state: RequestState, request: RequestId, now_s: float) -> None:
        state.answering = Answering.SETTLED
        self._end_wait(state, now_s)
        cut = self.stack.cut_reason(request)
        if cut is not None:
            state.facts.miss_reason = MissReason(cut.value)

    def _end_wait(self, state: RequestState, now_s: float) -> None:
        if state.wait_began_s is not None:
            state.facts.wait_s += now_s - state.wait_began_s
            self.tally.waited(now_s - state.wait_began_s)
            self.watch.waited(state, now_s - state.wait_began_s, now_s)
            state.wait_began_s = None

    # ── engine ↔ RAM ─────────────────────────────────────────────────────────────────────────

    @exclusive
    def prepare_load(self, request: RequestId, keys: Sequence[ChunkKey]) -> list[Slot]:
        """Pin chunks answered as HIT in this step; returns their slots, in order.

        The one call that raises: bytes that are not there can't be loaded.
        """
        state = self._requests.get(request)
        first_token = 0 if state is None else state.first_token
        residents = self.stack.load(request, keys, self._clock(), first_token)
        slots = [resident.slot for resident in residents]
        self._loading(request, slots)
        return slots

    @contained
    def _loading(self, request: RequestId, slots: Sequence[Slot]) -> None:
        self._carrier.mark_used(slots)
        self._carrier.carry_out()
        state = self._requests[request]
        state.answering = Answering.COLLECT
        state.load_began_s = self._clock()
        self.tally.add(ENGINE_BYTES, LOAD, len(slots) * self.stack.tiers[RAM].chunk_bytes)

    @contained
    def complete_load(self, request: RequestId) -> None:
        """The engine has read what `prepare_load` pinned."""
        state = self._requests.get(request)
        if state is not None and state.load_began_s is not None:
            load_s = self._clock() - state.load_began_s
            state.facts.load_s += load_s
            self.tally.add(LOAD_SECONDS, (), load_s)
            state.load_began_s = None
        self.stack.loaded(request, self._clock())

    @contained
    def prepare_store(
        self,
        request: RequestId,
        keys: Sequence[ChunkKey],
        parent: ChunkKey | None,
        first_token: int = 0,
    ) -> list[tuple[ChunkKey, Slot]]:
        """Consecutive chunks that will be computed by the end of this step; which to keep, where.

        The first begins at `first_token`, after `parent` if there is one. None once tiers are off.
        """
        self._started(request)  # the engine names a request that it resumes nowhere else
        admitted = self.stack.offload(request, keys, parent, self._clock(), first_token)
        self._carrier.carry_out()
        self._carrier.mark_writing(admitted)
        rows = [(resident.key, resident.slot) for resident in admitted]
        if self.canaries is None:
            return rows
        beside = dict([*rows, *self.canaries.offered(request, keys)])
        return [(key, beside[key]) for key in keys if key in beside]

    @contained
    def complete_store(self, request: RequestId, keys: Collection[ChunkKey]) -> None:
        """The engine has written chunks that `prepare_store` admitted."""
        if self.canaries is not None:
            self.canaries.written(request, keys)
        stored = self.stack.stored(request, keys, self._clock())
        if not stored:
            return
        slots = [resident.slot for resident in stored]
        self._carrier.mark_ready(slots)
        self.tally.add(ENGINE_BYTES, STORE, len(slots) * self.stack.tiers[RAM].chunk_bytes)
        state = self._requests.get(request)
        if state is not None:
            state.facts.stored_chunks += len(stored)
        written = self._carrier.carry_out()
        self.driver.seal([slot for slot in slots if slot not in written])

    # ── steps ────────────────────────────────────────────────────────────────────────────────

    @contained
    def step_end(self, started: Collection[RequestId], preempted: Collection[RequestId]) -> None:
        """The engine has decided what to run next; promotions are planned here."""
        now_s = self._clock()
        self._drain(now_s)
        for request in preempted:
            self._preempted(request)
        for request in started:
            self._started(request)
        for state in self._deferred:
            request = RequestId(state.facts.request)
            if self._requests.get(request) is state and state.deferred:
                self.stack.promote(request, state.chain, now_s, state.first_token, self._step)
                state.answering = Answering.WAIT
                state.wait_began_s = now_s
        self._deferred.clear()
        self.stack.settle(now_s)
        self._look_ahead.step(now_s)
        self._carrier.carry_out()
        if self.canaries is not None:
            self.canaries.step()
        if self._unfence_step is not None and self._step >= self._unfence_step:
            self.stack.unfence()
            if self.canaries is not None:
                self.canaries.unfence()
            self._unfence_step = None
        self.fates.take(now_s)
        self._step += 1
        self.turns.end_pass()

    def step_begins(self, work: StepWork) -> None:
        """The engine is about to compute this; told by engines that say so."""
        self.steps.begin(work, self._clock())
        for request in self._preempted_ones.resumed(work):
            self._resumed(request)

    @contained
    def _resumed(self, request: RequestId) -> None:
        self._started(request)

    @contained
    def step_done(self) -> None:
        """The oldest step that began has ended: learn from it, and note whose tokens it made."""
        now_s = self._clock()
        done = self.steps.end(now_s)
        if done is None:
            return
        if done.work.pieces:
            self.stack.computed(done.work.pieces, len(done.work.decoding), done.seconds)
        for request in with_token(done.work, self.prompt_tokens):
            state = self._requests.get(request)
            if state is not None:
                self.watch.token(state, now_s)
                state.got_token(now_s)
        self.watch.step_done(now_s)
        self.watch.decide(now_s)

    @exclusive
    def reset(self) -> None:
        """Forget everything in every tier: the KV of before must not be served again.

        Also once the tiers are off, since what they hold outlives this engine. `reset_is_durable`
        says whether it holds for the engine that comes after a crash too.
        """
        self.reset_is_durable = False
        self._forget()
        self.fates.cleared(None, "reset", self._clock())
        try:
            self._carrier.free_all()
            self.reset_is_durable = self.driver.reset()
            if not self.reset_is_durable:
                logger.error("the disk tier could not be reset in time; it is off")
        except Exception as error:
            self.give_up(error)

    @exclusive
    def begin_purge(self) -> None:
        """What `reset` does, without waiting until the tiers below have made it durable.

        Between passes only. `driver.reset_is_owed` says when they have.
        """
        self._forget()
        self.fates.cleared(None, "purge", self._clock())
        self._carrier.free_all()
        self.driver.begin_reset()

    @contained
    def attend(self) -> None:
        """Take note of what the driver has done, for an engine that is idle. Between passes."""
        now_s = self._clock()
        self._drain(now_s)
        self._carrier.carry_out()
        self.fates.take(now_s)

    @contained
    def _forget(self) -> None:
        fenced = self.stack.shadows.clear()
        if self.canaries is not None:
            self.canaries.reset(fenced)
        self.stack.reset()
        self._carrier.forget()
        self._unfence_step = self._step + STEPS_IN_FLIGHT
        self._deferred.clear()
        now_s = self._clock()
        for state in self._requests.values():
            self._end_wait(state, now_s)
            state.answering = Answering.COLLECT
            state.load_began_s = None

    @exclusive
    def samples(self) -> list[Sample]:
        """What the metrics show, if anything has changed since the last time."""
        try:
            return self._samples(self._clock())
        except Exception as error:
            self.give_up(error)
            return []

    def _samples(self, now_s: float) -> list[Sample]:
        fresh = self.tally.fresh or bool(self.stack.counts)
        if not fresh and now_s - self._exported_at_s < GAUGES_EVERY_S:
            return []
        self._exported_at_s = now_s
        waiting = sum(s.answering is Answering.WAIT for s in self._requests.values())
        return self.tally.take(self.stack, waiting)

    def here(self) -> list[RequestState]:
        """The requests that have not ended, the newest first."""
        return list(reversed(self._requests.values()))

    @exclusive
    def shutdown(self) -> None:
        """Let go of the tiers; a clean end."""
        try:
            if self.canaries is not None:
                self.canaries.close()
            self.driver.close(clean=True)
        except Exception as error:
            self.give_up(error)

    def give_up(self, error: Exception) -> None:
        """Turn the tiers off for good: an error of ours must not become the engine's."""
        if self._strict:
            raise error
        if not self.serving:
            return
        self.serving = False
        self.turns.end_pass()
        for level in range(len(self.stack.tiers)):
            self.tally.tier_up(Level(level), up=False, reason=f"an error of emberkv: {error!r}")
        logger.error("the tiers are off until the next start: %r", error, exc_info=error)

    # ── inner ────────────────────────────────────────────────────────────────────────────────

    def _started(self, request: RequestId) -> None:
        """The engine runs the request: what was promised to it has served."""
        self.stack.scheduled(request)
        state = self._requests.get(request)
        if state is not None:
            state.answering = Answering.COLLECT
            state.may_run = True

    def _preempted(self, request: RequestId) -> None:
        state = self._requests.get(request)
        if state is not None:
            state.answering = Answering.COLLECT
            self._preempted_ones.add(request, state, self._step)
            state.facts.preemptions += 1
            self.stack.preempted(request)

    def _drain(self, now_s: float) -> None:
        self._now_s = now_s
        self._carrier.drain(now_s)
