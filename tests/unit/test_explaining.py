"""Why a request did not hit, and what a prompt would get: told by a manager in this process."""

from __future__ import annotations

import pytest
from operated_engine import CHUNK_TOKENS, operations_on, prompt, serve
from scripted_engine import RAM_SLOTS, A, B, C, Engine, chain

from emberkv.app import stories
from emberkv.domain.types import DISK, RAM, Outcome, RequestId
from emberkv.errors import ControlError, UsageError
from emberkv.live.control.messages import (
    Explanation,
    Place,
    PurgeScope,
    Stretch,
    WhyRequest,
)
from emberkv.live.driver import CopyProgress
from emberkv.live.lookup import Lookup
from emberkv.live.operations import About, Operations

HIT, RETRY, MISS = Lookup.HIT, Lookup.RETRY, Lookup.MISS


def brief(explanation: Explanation) -> list[tuple[int, int, Place, str | None]]:
    return [(s.first, s.end, s.place, s.reason) for s in explanation.stretches]


# ── why a request did not hit ────────────────────────────────────────────────────────────────────


def test_a_hit_from_ram_and_one_from_disk() -> None:
    engine = Engine()
    operations = operations_on(engine)
    serve(engine, A, chain("x", 3))
    serve(engine, B, chain("x", 3))
    assert brief(operations.why_request("b")) == [(0, 3, Place.RAM, None)]
    operations.purge(PurgeScope.RAM)
    serve(engine, C, chain("x", 3))
    explanation = operations.why_request("client-c")
    assert brief(explanation) == [(0, 3, Place.DISK, None)]
    assert stories.summary(explanation) == (
        "client-c got 30 of 33 prompt tokens (0 device, 0 RAM, 30 disk), after 10 ms of waiting; "
        "the last 3 are no whole chunk of 10 and are always computed."
    )


def test_what_was_never_stored_and_what_was_evicted() -> None:
    engine = Engine()
    operations = operations_on(engine)
    serve(engine, A, chain("x", 3))
    explanation = operations.why_request("a")  # at its time nobody had them
    assert brief(explanation) == [(0, 3, Place.NOWHERE, "never_seen")]
    for level in (RAM, DISK):  # out of both tiers
        serve(engine, RequestId(f"other-{level}"), chain(f"other-{level}", RAM_SLOTS))
    for at in range(4):
        serve(engine, RequestId(f"more-{at}"), chain(f"more-{at}", RAM_SLOTS))
    assert serve(engine, B, chain("x", 3)) == [MISS]
    explanation = operations.why_request("b")
    (stretch,) = explanation.stretches
    assert (stretch.place, stretch.reason) == (Place.NOWHERE, "evicted")
    assert "evicted from disk by lru" in stories.summary(explanation)
    assert [h.event for h in stretch.happened] == [
        "admitted",
        "written_behind",
        "evicted",
        "evicted",
    ]


def test_what_happened_after_the_answer_is_not_told_as_its_reason() -> None:
    """The request itself stored what it did not find."""
    engine = Engine()
    operations = operations_on(engine)
    serve(engine, A, chain("x", 2))
    serve(engine, B, [*chain("x", 2), *chain("y", 2)])
    explanation = operations.why_request("b")
    assert brief(explanation) == [
        (0, 2, Place.RAM, None),
        (2, 4, Place.NOWHERE, "never_seen"),
    ]
    assert all(not s.happened for s in explanation.stretches[1:])


def test_a_failed_read_and_a_spent_wait() -> None:
    engine = Engine(max_wait_s=0.05)
    operations = operations_on(engine)
    keys = chain("x", 5)
    engine.on_disk(A, keys)
    manager = engine.manager
    manager.begin(B)
    manager.describe(B, 50, lambda: keys)
    engine.ask(B, keys)
    engine.step()
    (copy,) = engine.driver.copies
    results = tuple((at, Outcome.CORRUPT if at == 2 else Outcome.OK) for at in range(5))
    engine.say(CopyProgress(copy.transfer, results, 0.0))
    assert engine.ask(B, keys) == [HIT, HIT, MISS]
    manager.prepare_load(B, keys[:2])
    manager.facts(B).disk_tokens = 20  # type: ignore[union-attr]
    engine.step()
    explanation = operations.why_request("b")
    assert brief(explanation)[:2] == [
        (0, 2, Place.DISK, None),
        (2, 3, Place.DISK, "transfer_failed"),
    ]
    assert "lost" in [h.event for h in explanation.stretches[1].happened]

    engine = Engine(max_wait_s=0.05)
    operations = operations_on(engine)
    engine.on_disk(A, keys)
    engine.manager.begin(C)
    engine.manager.describe(C, 50, lambda: keys)
    while engine.ask(C, keys)[0] is RETRY:
        engine.step()
    assert brief(operations.why_request("c"))[0] == (0, 1, Place.DISK, "wait_spent")


def test_chunks_behind_a_break_are_told_apart() -> None:
    engine = Engine()
    operations = operations_on(engine)
    serve(engine, A, chain("x", 4))
    (first, *_) = chain("x", 1)
    stack = engine.manager.stack
    for tier in stack.tiers:  # lost, as a checksum shows it
        tier.lose(tier.entries[first])
    stack.take_effects()
    assert brief(operations.why_prompt(prompt("x", 4), None)) == [
        (0, 1, Place.NOWHERE, "written_behind"),
        (1, 4, Place.RAM, "behind_a_break"),
    ]


def test_purge_and_reset_are_told() -> None:
    engine = Engine()
    operations = operations_on(engine)
    serve(engine, A, chain("x", 3))
    engine.driver.begin_reset = lambda: None  # type: ignore[method-assign]
    operations.purge(PurgeScope.ALL)
    assert brief(operations.why_prompt(prompt("x", 3), None)) == [(0, 3, Place.NOWHERE, "purge")]
    serve(engine, B, chain("y", 3))
    engine.manager.reset()
    assert brief(operations.why_prompt(prompt("y", 3), None)) == [(0, 3, Place.NOWHERE, "reset")]
    # What was never there was not purged.
    assert brief(operations.why_prompt(prompt("z", 1), None)) == [
        (0, 1, Place.NOWHERE, "never_seen")
    ]


def test_a_request_that_ended_before_its_chunks_were_computed_is_named() -> None:
    engine = Engine()
    operations = operations_on(engine)
    engine.manager.begin(A).external_id = "client-a"
    engine.manager.describe(A, 33, lambda: chain("x", 3))
    engine.ask(A, chain("x", 3))
    engine.step()
    engine.manager.finish(A)  # aborted
    (stretch,) = operations.why_prompt(prompt("x", 3), None).stretches
    assert (stretch.reason, stretch.asked_before) == ("never_seen", "client-a")


def test_what_the_device_cache_held_is_told() -> None:
    engine = Engine()
    operations = operations_on(engine)
    keys = chain("x", 4)
    serve(engine, A, keys)
    facts = engine.manager.begin(B)
    engine.manager.describe(B, 43, lambda: keys)
    engine.manager.asks(B, 20)
    engine.ask(B, keys[2:])
    engine.manager.prepare_load(B, keys[2:])
    facts.ram_tokens = 20
    assert brief(operations.why_request("b")) == [
        (0, 2, Place.DEVICE, None),
        (2, 4, Place.RAM, None),
    ]


def test_without_the_connector_only_what_was_looked_up_is_known() -> None:
    engine = Engine()
    operations = operations_on(engine)
    serve(engine, A, chain("x", 2))
    engine.manager.begin(B)
    engine.ask(B, [*chain("x", 2), *chain("y", 3)])
    engine.manager.prepare_load(B, chain("x", 2))
    engine.manager.facts(B).ram_tokens = 20  # type: ignore[union-attr]
    explanation = operations.why_request("b")
    assert not explanation.all_known
    assert brief(explanation) == [
        (0, 2, Place.RAM, None),
        (2, 3, Place.NOWHERE, "never_seen"),
    ]


def test_a_request_that_waits_is_told_as_such() -> None:
    engine = Engine()
    operations = operations_on(engine)
    engine.on_disk(A, chain("x", 3))
    engine.manager.begin(B)
    engine.manager.describe(B, 33, lambda: chain("x", 3))
    assert "has not been looked up yet" in stories.summary(operations.why_request("b"))
    engine.ask(B, chain("x", 3))
    engine.step()
    explanation = operations.why_request("b")
    assert brief(explanation) == [(0, 3, Place.DISK, "not_given_yet")]
    assert stories.summary(explanation).startswith("b, which is still here, got 0 of 33")


def test_a_preempted_request_is_told_as_it_was_first_admitted() -> None:
    engine = Engine()
    operations = operations_on(engine)
    serve(engine, A, chain("x", 2))
    keys = [*chain("x", 2), *chain("y", 2)]
    engine.manager.begin(B)
    engine.manager.describe(B, 43, lambda: keys)
    engine.ask(B, keys)
    engine.manager.prepare_load(B, keys[:2])
    engine.manager.facts(B).ram_tokens = 20  # type: ignore[union-attr]
    engine.step(started=[B])
    engine.manager.complete_load(B)
    before = brief(operations.why_request("b"))
    engine.step(preempted=[B])
    engine.manager.prepare_store(B, keys[2:], keys[1])
    engine.manager.complete_store(B, keys[2:])
    engine.step()
    assert engine.ask(B, keys)[0] is RETRY  # put off for one step
    engine.step()
    assert engine.ask(B, keys) == [HIT] * 4
    assert brief(operations.why_request("b")) == before
    engine.manager.finish(B)
    assert brief(operations.why_request("b")) == before
    assert before == [(0, 2, Place.RAM, None), (2, 4, Place.NOWHERE, "never_seen")]


def test_requests_are_found_by_id_or_a_part_of_it() -> None:
    engine = Engine()
    operations = operations_on(engine)
    serve(engine, RequestId("cmpl-blue-0-12345678"), chain("x", 1))
    for name in ("cmpl-blue-0-12345678", "client-cmpl-blue-0-12345678", "blue"):
        explanation = operations.answer(WhyRequest(name))
        assert isinstance(explanation, Explanation)
        assert explanation.request is not None
    with pytest.raises(UsageError, match="the newest are client-cmpl-blue-0-12345678"):
        operations.why_request("green")


# ── dry runs ─────────────────────────────────────────────────────────────────────────────────────


def test_a_dry_run_tells_what_a_request_then_gets_and_changes_nothing() -> None:
    engine = Engine()
    operations = operations_on(engine)
    serve(engine, A, chain("x", 3))
    stack = engine.manager.stack
    before = [list(tier.policy.victims()) for tier in stack.tiers], dict(stack.counts)
    explanation = operations.why_prompt(prompt("x", 5, more_tokens=4), None)
    assert ([list(tier.policy.victims()) for tier in stack.tiers], dict(stack.counts)) == before
    assert brief(explanation) == [
        (0, 3, Place.RAM, None),
        (3, 5, Place.NOWHERE, "never_seen"),
    ]
    assert explanation.stretches[1].keys == tuple(chain("x", 5)[3:])
    assert serve(engine, B, chain("x", 5)) == [HIT, HIT, HIT, MISS]
    assert stories.summary(explanation).startswith(
        "A request would get 30 of 54 tokens from the tiers now (30 RAM, 0 disk); from token 30 on:"
    )


def test_a_salt_makes_other_chunks() -> None:
    engine = Engine()
    operations = operations_on(engine)
    serve(engine, A, chain("x", 3))
    (stretch,) = operations.why_prompt(prompt("x", 3), "salt").stretches
    assert stretch.place is Place.NOWHERE


def test_what_is_on_its_way_counts_and_what_is_being_computed_does_not() -> None:
    engine = Engine()
    operations = operations_on(engine)
    engine.on_disk(A, chain("x", 3))
    assert brief(operations.why_prompt(prompt("x", 3), None)) == [(0, 3, Place.DISK, None)]
    engine.manager.begin(B)
    engine.ask(B, chain("x", 3))
    engine.step()
    assert brief(operations.why_prompt(prompt("x", 3), None)) == [(0, 3, Place.COMING, None)]
    engine.manager.begin(C)
    engine.manager.prepare_store(C, chain("y", 2), None)
    assert brief(operations.why_prompt(prompt("y", 2), None)) == [(0, 2, Place.WRITING, "writing")]


def test_a_prompt_shorter_than_a_chunk() -> None:
    explanation = operations_on(Engine()).why_prompt(prompt("x", 0, more_tokens=7), None)
    assert explanation.stretches == ()
    assert "shorter than a chunk of 10 tokens" in stories.summary(explanation)
    assert len(stories.lines(explanation)) == 1


def test_prompts_that_can_not_be_hashed_are_refused() -> None:
    engine = Engine()
    with pytest.raises(UsageError, match="whole numbers"):
        operations_on(engine).why_prompt([-1], None)
    bare = Operations(engine.manager, About("blue", CHUNK_TOKENS), lambda: engine.now_s)
    with pytest.raises(ControlError, match="EmberConnector"):
        bare.why_prompt([1], None)


def test_every_event_and_place_has_its_sentence() -> None:
    from emberkv.core.counts import Event
    from emberkv.observe.requests import MissReason

    assert set(stories.HAPPENED) == {event.value for event in Event}
    assert set(stories.PLACES) == set(Place)
    explained = set(stories.REASONS) | set(stories.HAPPENED) | {"not_stored"}
    assert {reason.value for reason in MissReason} <= explained
    stretch = Stretch(0, 1, Place.NOWHERE, False, "something_new")
    explanation = operations_on(Engine()).why_prompt([], None)
    assert stories.why(explanation, stretch) == "something new"
