"""The tier manager without an engine: the look-up protocol, reports, containment, the accounts."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

import pytest

from emberkv.core.audit import AuditedStack
from emberkv.core.limits import Limits
from emberkv.core.residents import Residents
from emberkv.domain.types import DISK, RAM, ChunkKey, Copy, Entry, Outcome, RequestId, Slot
from emberkv.errors import InvariantError
from emberkv.live.arena import FREE, READY, Arena, ArenaGeometry, create_memory
from emberkv.live.driver import CopyProgress, Found, Populated, Report, TierDown, TierUp
from emberkv.live.lookup import Lookup
from emberkv.live.manager import GAUGES_EVERY_S, STEPS_IN_FLIGHT, TierManager
from emberkv.observe import metrics
from emberkv.observe.requests import MissReason, RequestFacts
from emberkv.policy.eviction.lru import Lru

CHUNK_BYTES = 4096
RAM_SLOTS = 8
DISK_SLOTS = 32
STEP_S = 0.01
A, B, C = RequestId("a"), RequestId("b"), RequestId("c")


def chain(name: str, count: int) -> list[ChunkKey]:
    return [ChunkKey(f"{name}-{at}".encode()) for at in range(count)]


def entries_of(keys: Sequence[ChunkKey]) -> tuple[Entry, ...]:
    """A whole chain as a tier finds it, in slots 0, 1, …."""
    parents = [None, *keys]
    return tuple(Entry(key, parents[at], Slot(at)) for at, key in enumerate(keys))


class ScriptedDriver:
    """Implements `Driver`: reports what a test says, in that order; carries nothing out itself."""

    def __init__(self) -> None:
        geometry = ArenaGeometry(RAM_SLOTS, CHUNK_BYTES)
        fd = create_memory(geometry)
        self.arena = Arena(fd, geometry)
        os.close(fd)
        self.slot_counts = (RAM_SLOTS, DISK_SLOTS)
        self.reports: list[Report] = []
        self.copies: list[Copy] = []
        self.sealed: list[Slot] = []
        self.resets = 0
        self.reset_works = True
        self.fails: Exception | None = None
        self.closed: bool | None = None

    def submit(self, copies: Sequence[Copy]) -> None:
        self.copies += copies

    def seal(self, slots: Sequence[Slot]) -> None:
        self.sealed += slots

    def poll(self) -> list[Report]:
        if self.fails is not None:
            raise self.fails
        reports, self.reports = self.reports, []
        return reports

    def reset(self) -> bool:
        self.resets += 1
        return self.reset_works

    def close(self, *, clean: bool) -> None:
        self.closed = clean

    def end(self, outcome: Outcome = Outcome.OK, *, chunks: int | None = None) -> None:
        """Report every copy handed over, or the first `chunks` of each, as ended."""
        for copy in self.copies:
            ended = range(len(copy.keys))[:chunks]
            self.reports.append(
                CopyProgress(copy.transfer, tuple((at, outcome) for at in ended), 0.001)
            )
        if chunks is None:
            self.copies = []


class Engine:
    """An engine's scheduler as the manager sees it; asks, stores and loads as vLLM's does."""

    def __init__(self, *, ready: bool = True, strict: bool = True, **limits: float) -> None:
        self.driver = ScriptedDriver()
        tiers = [Residents(n, CHUNK_BYTES, Lru(n)) for n in self.driver.slot_counts]
        self.now_s = 100.0
        self.ended: list[RequestFacts] = []
        self.manager = TierManager(
            AuditedStack(tiers, Limits(**limits)),
            self.driver,
            lambda: self.now_s,
            self.ended.append,
            strict=strict,
        )
        if ready:
            self.say(Populated(0, RAM_SLOTS), Found(RAM, (), last=True), Found(DISK, (), last=True))
            self.step()

    def say(self, *reports: Report) -> None:
        self.driver.reports += reports

    def step(self, started: Sequence[RequestId] = (), preempted: Sequence[RequestId] = ()) -> None:
        self.manager.step_end(started, preempted)
        self.now_s += STEP_S

    def ask(self, request: RequestId, keys: Sequence[ChunkKey]) -> list[Lookup]:
        """One pass: every key up to the first miss."""
        answers = []
        for key in keys:
            answers.append(self.manager.lookup(request, key))
            if answers[-1] is Lookup.MISS:
                break
        return answers

    def store(self, request: RequestId, keys: Sequence[ChunkKey]) -> list[Slot]:
        """Compute and store a whole chain; returns the slots."""
        admitted = self.manager.prepare_store(request, keys, None) or []
        self.manager.complete_store(request, [key for key, _ in admitted])
        return [slot for _, slot in admitted]

    def on_disk(self, request: RequestId, keys: Sequence[ChunkKey]) -> None:
        """See to it that a chain is on disk alone, `request` having ended."""
        self.manager.begin(request)
        self.store(request, keys)
        self.driver.end()
        self.manager.finish(request)
        self.step()
        filler = RequestId(f"filler-{request}")
        self.manager.begin(filler)
        self.store(filler, chain(f"filler-{request}", RAM_SLOTS))
        self.driver.end()
        self.manager.finish(filler)
        self.step()
        assert not any(self.manager.stack.tiers[RAM].ready(key) for key in keys)


HIT, RETRY, MISS = Lookup.HIT, Lookup.RETRY, Lookup.MISS


# ── the look-up protocol ─────────────────────────────────────────────────────────────────────────


def test_what_is_in_ram_is_loaded_at_once() -> None:
    engine = Engine()
    keys = chain("x", 3)
    engine.manager.begin(A)
    slots = engine.store(A, keys)
    engine.manager.begin(B)
    assert engine.ask(B, [*keys, *chain("y", 1)]) == [HIT, HIT, HIT, MISS]
    assert engine.manager.prepare_load(B, keys) == slots
    assert engine.manager.origin(B, keys[0]) == RAM
    engine.manager.complete_load(B)


def test_a_chain_is_collected_waited_for_and_answered() -> None:
    engine = Engine()
    keys = chain("x", 5)
    engine.on_disk(A, keys)
    engine.manager.begin(B)
    unknown = chain("y", 1)
    assert engine.ask(B, [*keys, *unknown]) == [RETRY] * 5 + [MISS]
    assert engine.driver.copies == []  # a look-up alone moves nothing
    engine.step()
    assert [copy.keys for copy in engine.driver.copies] == [tuple(keys)]
    for _ in range(3):
        assert engine.ask(B, [*keys, *unknown]) == [RETRY, MISS]
        engine.step()
    engine.driver.end()
    assert engine.ask(B, [*keys, *unknown]) == [HIT] * 5 + [MISS]
    assert engine.manager.origin(B, keys[0]) == DISK
    assert len(engine.manager.prepare_load(B, keys)) == 5


def test_a_chain_partly_in_ram_is_promoted_for_the_rest() -> None:
    engine = Engine()
    keys = chain("x", 4)
    engine.on_disk(A, keys)
    engine.manager.begin(B)
    assert engine.ask(B, keys[:2]) == [RETRY] * 2
    engine.step()
    engine.driver.end()
    assert engine.ask(B, keys[:2]) == [HIT] * 2
    engine.manager.prepare_load(B, keys[:2])
    engine.manager.complete_load(B)
    engine.manager.begin(C)
    assert engine.ask(C, keys) == [HIT, HIT, RETRY, RETRY]
    engine.step()
    assert [copy.keys for copy in engine.driver.copies] == [tuple(keys[2:])]


def test_a_chain_longer_than_ram_is_answered_up_to_the_cut() -> None:
    engine = Engine(ready=False)
    keys = chain("x", RAM_SLOTS + 4)
    found = Found(DISK, entries_of(keys), last=True)
    engine.say(Populated(0, RAM_SLOTS), Found(RAM, (), last=True), found)
    engine.manager.begin(A)
    assert engine.ask(A, keys) == [RETRY] * len(keys)
    engine.step()
    engine.driver.end()
    assert engine.ask(A, keys) == [HIT] * RAM_SLOTS + [MISS]
    assert len(engine.manager.prepare_load(A, keys[:RAM_SLOTS])) == RAM_SLOTS
    engine.manager.complete_load(A)
    engine.manager.finish(A)
    assert engine.ended[-1].miss_reason is MissReason.NO_ROOM


def test_a_failed_chunk_ends_what_is_promised() -> None:
    engine = Engine()
    keys = chain("x", 5)
    engine.on_disk(A, keys)
    engine.manager.begin(B)
    engine.ask(B, keys)
    engine.step()
    (copy,) = engine.driver.copies
    bad = Outcome.CORRUPT
    results = tuple((at, bad if at == 2 else Outcome.OK) for at in range(5))
    engine.say(CopyProgress(copy.transfer, results, 0.0))
    assert engine.ask(B, keys) == [HIT, HIT, MISS]
    engine.manager.finish(B)
    assert engine.ended[-1].miss_reason is MissReason.TRANSFER_FAILED


def test_chunks_are_usable_as_they_arrive_when_the_wait_is_spent() -> None:
    engine = Engine(max_wait_s=0.05)
    keys = chain("x", 5)
    engine.on_disk(A, keys)
    engine.manager.begin(B)
    engine.ask(B, keys)
    engine.step()
    engine.driver.end(chunks=3)
    passes = 0
    while engine.ask(B, keys) == [RETRY, MISS]:
        engine.step()
        passes += 1
        assert passes < 20
    assert engine.ask(B, keys) == [HIT, HIT, HIT, MISS]
    engine.manager.finish(B)
    assert engine.ended[-1].miss_reason is MissReason.WAIT_SPENT
    assert engine.ended[-1].wait_s == pytest.approx(0.06, abs=STEP_S + 1e-6)


def test_a_tier_that_stops_is_not_waited_for() -> None:
    engine = Engine(max_wait_s=30.0, max_stall_s=0.05)
    keys = chain("x", 5)
    engine.on_disk(A, keys)
    engine.manager.begin(B)
    engine.ask(B, keys)
    engine.step()
    engine.now_s += 0.06
    assert engine.ask(B, keys) == [MISS]
    engine.manager.begin(C)
    assert engine.ask(C, keys) == [MISS]  # nor is anybody else made to wait for it
    engine.step()
    engine.driver.end()
    assert engine.ask(C, keys) == [HIT] * 5


def test_the_answer_stays_until_the_engine_has_room() -> None:
    """A request that is answered may not fit on the device in this step, nor in the next."""
    engine = Engine()
    keys = chain("x", 4)
    engine.on_disk(A, keys)
    engine.manager.begin(B)
    engine.ask(B, keys)
    engine.step()
    engine.driver.end()
    for _ in range(3):
        assert engine.ask(B, keys) == [HIT] * 4
        engine.step()
    engine.manager.begin(C)
    engine.store(C, chain("z", RAM_SLOTS))
    assert engine.ask(B, keys) == [HIT] * 4  # nothing of it has been evicted
    assert len(engine.manager.prepare_load(B, keys)) == 4


def test_a_request_that_started_without_loading_gives_its_promise_back() -> None:
    engine = Engine()
    keys = chain("x", 4)
    engine.on_disk(A, keys)
    engine.manager.begin(B)
    engine.ask(B, keys)
    engine.step()
    engine.step(started=[B])
    assert list(engine.manager.stack.promotions.leases()) == []


def test_a_resumed_request_gives_its_promise_back_when_it_stores() -> None:
    """The engine names new requests when they start, and resumed ones nowhere."""
    engine = Engine()
    keys = chain("x", 4)
    engine.on_disk(A, keys)
    engine.manager.begin(B)
    engine.step(started=[B])
    engine.step(preempted=[B])
    assert engine.ask(B, keys) == [RETRY, MISS]
    engine.step()
    assert engine.ask(B, keys) == [RETRY] * 4
    engine.step()
    assert len(list(engine.manager.stack.promotions.leases())) == 1
    engine.store(B, chain("y", 1))
    assert list(engine.manager.stack.promotions.leases()) == []


def test_a_request_preempted_between_two_steps_is_put_off_once() -> None:
    """An engine fails if a request loads in the very step that calls it preempted."""
    engine = Engine()
    keys = chain("x", 4)
    engine.manager.begin(A)
    engine.store(A, keys)
    engine.step(started=[A])
    assert engine.ask(A, keys) == [RETRY, MISS]
    engine.step(preempted=[A])
    assert engine.ask(A, keys) == [HIT] * 4
    assert engine.manager.facts(A).preemptions == 1


def test_a_request_nobody_announced_gets_nothing() -> None:
    assert Engine().ask(A, chain("x", 2)) == [MISS]


def test_loading_what_is_not_there_is_the_one_call_that_raises() -> None:
    engine = Engine(strict=False)
    engine.manager.begin(A)
    with pytest.raises(InvariantError, match="not ready"):
        engine.manager.prepare_load(A, chain("x", 1))


# ── reports ──────────────────────────────────────────────────────────────────────────────────────


def test_ram_is_used_once_it_is_backed_and_named() -> None:
    engine = Engine(ready=False)
    engine.manager.begin(A)
    keys = chain("x", 6)
    assert engine.store(A, keys[:2]) == []
    engine.say(Populated(0, 4))
    engine.step()
    assert engine.store(A, keys[:2]) == []  # what the slots held before is not known yet
    engine.say(Found(RAM, (), last=True))
    engine.step()
    assert sorted(engine.store(A, keys)) == [0, 1, 2, 3]  # the other half is not backed yet
    engine.say(Populated(4, 4))
    engine.step()
    assert len(engine.store(A, keys)) == 2


def test_chunks_found_in_ram_are_hits_and_those_of_empty_headers_free() -> None:
    engine = Engine(ready=False)
    keys = chain("x", 3)
    entries = [
        Entry(key, keys[at - 1] if at else None, Slot(5 - at)) for at, key in enumerate(keys)
    ]
    engine.say(Populated(0, RAM_SLOTS), Found(RAM, tuple(entries[:2]), last=False))
    engine.manager.begin(A)
    assert engine.ask(A, keys) == [HIT, HIT, MISS]
    engine.say(Found(RAM, tuple(entries[2:]), last=True), Found(DISK, (), last=True))
    engine.step()
    assert engine.ask(A, keys) == [HIT] * 3
    assert engine.manager.prepare_load(A, keys) == [5, 4, 3]
    assert engine.manager.stack.tiers[RAM].free_count == RAM_SLOTS - 3


def test_chunks_found_on_disk_are_promoted() -> None:
    engine = Engine(ready=False)
    keys = chain("x", 3)
    found = Found(DISK, entries_of(keys), last=True)
    engine.say(Populated(0, RAM_SLOTS), Found(RAM, (), last=True), found)
    engine.manager.begin(A)
    assert engine.ask(A, keys) == [RETRY] * 3
    engine.step()
    (copy,) = engine.driver.copies
    assert copy.source_slots == (0, 1, 2)


def test_a_tier_that_goes_down_holds_nothing_until_it_is_back() -> None:
    engine = Engine()
    keys = chain("x", 4)
    engine.on_disk(A, keys)
    engine.manager.begin(B)
    engine.ask(B, keys)
    engine.step()
    engine.driver.end(Outcome.SHED)
    engine.say(TierDown(DISK, "its process is gone"))
    assert engine.ask(B, keys) == [MISS]
    assert sample(engine, metrics.TIER_UP, "disk") == 0.0
    engine.manager.begin(C)
    engine.store(C, chain("z", 2))
    assert engine.driver.copies == []  # nothing is written behind
    engine.say(TierUp(DISK), Found(DISK, (Entry(keys[0], None, Slot(0)),), last=True))
    engine.step(started=[B])
    assert sample(engine, metrics.TIER_UP, "disk") == 1.0
    engine.manager.begin(RequestId("d"))
    assert engine.ask(RequestId("d"), keys) == [RETRY, MISS]


def test_a_tier_may_go_down_before_it_has_named_all_it_has() -> None:
    engine = Engine(ready=False)
    engine.say(Populated(0, RAM_SLOTS), Found(RAM, (), last=True))
    engine.say(Found(DISK, (Entry(chain("x", 1)[0], None, Slot(3)),), last=False))
    engine.say(TierDown(DISK, "read error"), TierUp(DISK), Found(DISK, (), last=True))
    engine.step()
    assert engine.manager.stack.tiers[DISK].free_count == DISK_SLOTS
    assert engine.manager.stack.tiers[DISK].held == {}


# ── reset ────────────────────────────────────────────────────────────────────────────────────────


def test_a_reset_forgets_everything_and_tells_the_driver() -> None:
    engine = Engine()
    keys = chain("x", 4)
    engine.on_disk(A, keys)
    engine.manager.reset()
    assert engine.driver.resets == 1
    assert (engine.driver.arena.headers["state"] == FREE).all()
    engine.manager.begin(B)
    assert engine.ask(B, keys) == [MISS]


def test_slots_of_engine_copies_are_fenced_through_a_reset() -> None:
    engine = Engine()
    keys = chain("x", 3)
    engine.manager.begin(A)
    assert len(engine.manager.prepare_store(A, keys, None)) == 3
    engine.manager.reset()
    assert engine.manager.stack.tiers[RAM].free_count == RAM_SLOTS - 3
    engine.manager.complete_store(A, keys)  # late: it ends nothing
    for _ in range(STEPS_IN_FLIGHT + 1):
        assert engine.manager.stack.tiers[RAM].free_count == RAM_SLOTS - 3
        engine.step()
    assert engine.manager.stack.tiers[RAM].free_count == RAM_SLOTS


def test_what_a_tier_names_after_a_reset_is_from_before_and_forgotten() -> None:
    engine = Engine(ready=False)
    engine.manager.reset()
    entry = Entry(chain("x", 1)[0], None, Slot(2))
    engine.say(Populated(0, RAM_SLOTS))
    engine.say(Found(RAM, (entry,), last=True), Found(DISK, (entry,), last=True))
    engine.manager.begin(A)
    assert engine.ask(A, chain("x", 1)) == [MISS]
    assert engine.manager.stack.tiers[RAM].free_count == RAM_SLOTS


def test_a_request_that_waits_through_a_reset_is_answered() -> None:
    engine = Engine()
    keys = chain("x", 4)
    engine.on_disk(A, keys)
    engine.manager.begin(B)
    engine.ask(B, keys)
    engine.step()
    engine.manager.reset()
    assert engine.ask(B, keys) == [MISS]
    engine.driver.end()
    engine.step()
    assert engine.manager.stack.tiers[RAM].held == {}


def test_a_disk_that_cannot_be_reset_is_said_so(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine()
    engine.driver.reset_works = False
    engine.manager.reset()
    assert "could not be reset in time" in caplog.text


# ── containment ──────────────────────────────────────────────────────────────────────────────────


def broken_engine() -> Engine:
    """An engine whose tiers have just met a defect."""
    engine = Engine(strict=False)
    engine.on_disk(A, chain("x", 2))
    engine.manager.begin(B)
    engine.driver.fails = InvariantError("a rule is broken")
    return engine


def test_a_defect_turns_the_tiers_off_and_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = broken_engine()
    manager, keys = engine.manager, chain("x", 2)
    with caplog.at_level(logging.ERROR):
        assert engine.ask(B, keys) == [MISS]
        assert not manager.serving
        for _ in range(3):
            assert engine.ask(B, keys) == [MISS]
            assert manager.prepare_store(B, chain("y", 2), None) is None
            manager.complete_store(B, chain("y", 2))
            manager.complete_load(B)
            engine.step(started=[B], preempted=[B])
            manager.begin(C)
            manager.finish(C)
    assert caplog.text.count("the tiers are off until the next start") == 1
    manager.finish(B)
    assert engine.ended[-1].miss_reason is MissReason.NOT_SERVING
    assert manager.facts(B) is None  # nothing piles up
    assert sample(engine, metrics.TIER_UP, "ram") == 0.0


def test_a_reset_reaches_what_outlives_the_engine_even_then() -> None:
    engine = broken_engine()
    engine.ask(B, chain("x", 2))
    assert (engine.driver.arena.headers["state"] == READY).any()
    engine.manager.reset()
    assert engine.driver.resets == 1
    assert not (engine.driver.arena.headers["state"] == READY).any()


def test_strict_raises_for_tests() -> None:
    engine = Engine()
    engine.driver.fails = InvariantError("a rule is broken")
    with pytest.raises(InvariantError, match="a rule is broken"):
        engine.step()


@pytest.mark.parametrize("call", ["reset", "shutdown", "samples"])
def test_no_call_raises_into_the_engine(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(strict=False)

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("defect")

    monkeypatch.setattr(engine.driver, "reset", fail)
    monkeypatch.setattr(engine.driver, "close", fail)
    monkeypatch.setattr(engine.manager.tally, "take", fail)
    engine.now_s += GAUGES_EVERY_S
    getattr(engine.manager, call)()
    assert not engine.manager.serving


def test_shutdown_is_a_clean_end() -> None:
    engine = Engine()
    engine.manager.shutdown()
    assert engine.driver.closed is True


# ── accounts ─────────────────────────────────────────────────────────────────────────────────────


def sample(engine: Engine, metric: metrics.Metric, *labels: str) -> float:
    """A metric's value in the next export."""
    engine.now_s += GAUGES_EVERY_S
    found = {(m, at): value for m, at, value in engine.manager.samples()}
    return found[metric, labels]


def test_the_facts_of_a_request() -> None:
    engine = Engine()
    keys = chain("x", 4)
    engine.on_disk(A, keys)
    facts = engine.manager.begin(B)
    assert engine.manager.facts(B) is facts
    engine.ask(B, [*keys, *chain("y", 1)])
    engine.step()
    engine.driver.end()
    engine.ask(B, [*keys, *chain("y", 1)])
    engine.manager.prepare_load(B, keys)
    engine.now_s += 0.25
    engine.manager.complete_load(B)
    admitted = engine.manager.prepare_store(B, chain("y", 2), keys[-1])
    engine.manager.complete_store(B, [key for key, _ in admitted])
    engine.manager.finish(B)
    assert engine.ended[-1] is facts
    assert facts.miss_reason is MissReason.NOT_STORED
    assert facts.wait_s == pytest.approx(STEP_S)
    assert facts.load_s == pytest.approx(0.25)
    assert facts.stored_chunks == 2
    assert engine.manager.facts(B) is None


def test_a_request_that_ends_while_it_waits_has_waited() -> None:
    engine = Engine()
    keys = chain("x", 4)
    engine.on_disk(A, keys)
    engine.manager.begin(B)
    engine.ask(B, keys)
    engine.step()
    engine.now_s += 0.5
    engine.manager.finish(B)
    assert engine.ended[-1].wait_s == pytest.approx(0.5 + STEP_S)
    assert list(engine.manager.stack.promotions.leases()) == []


def test_samples_are_differences_and_gauges() -> None:
    engine = Engine()
    engine.manager.begin(A)
    engine.store(A, chain("x", 3))
    first = {(m, at): value for m, at, value in engine.manager.samples()}
    assert first[metrics.CHUNKS, ("ram", "admitted")] == 3
    assert first[metrics.ENGINE_BYTES, ("store",)] == 3 * CHUNK_BYTES
    assert first[metrics.TIER_CHUNKS, ("ram",)] == 3
    assert first[metrics.TIER_USED_BYTES, ("ram",)] == 3 * CHUNK_BYTES
    assert first[metrics.TIER_CAPACITY_BYTES, ("disk",)] == DISK_SLOTS * CHUNK_BYTES
    assert first[metrics.COPIES_QUEUED, ("disk",)] == 3
    assert engine.manager.samples() == []  # nothing is new, and gauges were just shown
    engine.driver.end()
    engine.step()
    second = {(m, at): value for m, at, value in engine.manager.samples()}
    assert (metrics.CHUNKS, ("ram", "admitted")) not in second
    assert second[metrics.CHUNKS, ("disk", "written_behind")] == 3
    assert second[metrics.COPY_BYTES, ("ram", "disk")] == 3 * CHUNK_BYTES
    assert second[metrics.COPIES_QUEUED, ("disk",)] == 0


def test_failures_are_counted_by_kind() -> None:
    engine = Engine()
    engine.manager.begin(A)
    engine.store(A, chain("x", 3))
    engine.driver.end(Outcome.FULL)
    engine.step()
    assert sample(engine, metrics.COPY_FAILURES, "ram", "disk", "full") == 3


def test_stored_rows_are_sealed_unless_they_are_written_behind() -> None:
    """What is written behind is checksummed on the way; the rest would not be."""
    engine = Engine()
    engine.manager.begin(A)
    engine.store(A, chain("x", 2))
    assert engine.driver.sealed == []
    engine.say(TierDown(DISK, "gone"))
    engine.driver.end(Outcome.SHED)
    engine.driver.reports.reverse()
    engine.step()
    slots = engine.store(A, chain("z", 2))
    assert engine.driver.sealed == slots


def test_headers_follow_the_chunks() -> None:
    engine = Engine()
    arena = engine.driver.arena
    keys = chain("x", 3)
    engine.manager.begin(A)
    slots = engine.store(A, keys)
    assert [arena.entry(slot) for slot in slots] == [
        Entry(key, keys[at - 1] if at else None, slot)
        for at, (key, slot) in enumerate(zip(keys, slots, strict=True))
    ]
    assert (arena.headers["state"][slots] == READY).all()
    ticks = arena.headers["tick"][slots].tolist()
    assert ticks == sorted(ticks)
    engine.driver.end()
    engine.manager.finish(A)
    engine.step()
    engine.manager.begin(B)
    engine.store(B, chain("y", RAM_SLOTS))
    assert {arena.entry(Slot(at)).key for at in range(RAM_SLOTS)} == set(chain("y", RAM_SLOTS))
