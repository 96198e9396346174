"""The tier manager without an engine: the look-up protocol, and what drivers report."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripted_engine import (
    DISK_SLOTS,
    RAM_SLOTS,
    STEP_S,
    A,
    B,
    C,
    Engine,
    ScriptedDriver,
    chain,
    entries_of,
    sample,
)

from emberkv.config import Config, DiskConfig
from emberkv.domain.types import DISK, RAM, Entry, Outcome, RequestId, Slot
from emberkv.engines.vllm.build import build_manager
from emberkv.errors import InvariantError
from emberkv.live.driver import CopyProgress, Found, Populated, TierDown, TierUp
from emberkv.live.lookup import Lookup
from emberkv.observe import metrics
from emberkv.observe.requests import MissReason

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


def test_a_ram_tier_that_is_full_when_it_is_taken_over_serves() -> None:
    engine = Engine(ready=False)
    keys = chain("x", RAM_SLOTS)
    engine.say(Populated(0, RAM_SLOTS), Found(RAM, entries_of(keys), last=False))
    engine.say(Found(RAM, (), last=True), Found(DISK, (), last=True))
    engine.manager.begin(A)
    assert engine.ask(A, keys) == [HIT] * RAM_SLOTS


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


def test_a_tier_that_was_asked_for_and_never_came_is_shown_as_down() -> None:
    driver = ScriptedDriver()
    driver.slot_counts = (RAM_SLOTS,)
    settings = Config(ram_bytes=1 << 20, disk=DiskConfig(Path("/kv"), 1 << 20))
    built = build_manager(driver, settings, tokens_per_chunk=16, clock=lambda: 100.0)
    found = {(metric, at): value for metric, at, value in built.tiers.samples()}
    assert found[metrics.TIER_UP, ("disk",)] == 0.0
    assert found[metrics.TIER_UP, ("ram",)] == 1.0
    built.shutdown()


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
