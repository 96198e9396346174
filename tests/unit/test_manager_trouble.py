"""The tier manager without an engine: resets, defects of ours, and its accounts."""

from __future__ import annotations

import logging

import pytest
from scripted_engine import (
    CHUNK_BYTES,
    DISK_SLOTS,
    RAM_SLOTS,
    STEP_S,
    A,
    B,
    C,
    Engine,
    chain,
    sample,
)

from emberkv.domain.types import DISK, RAM, Entry, Outcome, Slot
from emberkv.errors import InvariantError
from emberkv.live.arena import FREE, READY
from emberkv.live.driver import Found, Populated, TierDown
from emberkv.live.lookup import Lookup
from emberkv.live.manager import GAUGES_EVERY_S, STEPS_IN_FLIGHT
from emberkv.observe import metrics
from emberkv.observe.requests import MissReason

HIT, RETRY, MISS = Lookup.HIT, Lookup.RETRY, Lookup.MISS


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
