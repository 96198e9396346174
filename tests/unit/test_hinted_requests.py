"""Hints, look-ahead and load-or-recompute as an engine meets them: through the manager."""

from __future__ import annotations

from modelled_engine import (
    TOKENS,
    ModelledDisk,
    ModelledEngine,
    Prompt,
    flat,
)

from emberkv.core.counts import Event
from emberkv.core.gates import DRAINING, OPEN, SHUT
from emberkv.domain.hints import Hints
from emberkv.domain.types import DISK, RAM
from emberkv.observe.requests import MissReason

LENGTH = 32 * TOKENS


def engine_with(
    texts: int, *, ram_slots: int = 64, disk: ModelledDisk | None = None
) -> ModelledEngine:
    """An engine that has computed `texts` prompts; they are on disk and not in RAM."""
    engine = ModelledEngine(flat, ram_slots=ram_slots, disk=disk)
    for at in range(texts):
        engine.play([Prompt(f"first-{at}", engine.now_s, LENGTH, text=f"t{at}")])
    engine.play([Prompt("filler", engine.now_s, ram_slots * TOKENS)])
    return engine


def again(engine: ModelledEngine, name: str, text: str, hints: Hints) -> float:
    """Serve a returning prompt; returns its time to first token."""
    engine.play([Prompt(name, engine.now_s + 1.0, LENGTH, hints, text)])
    return engine.first_token_s[name]


def why(engine: ModelledEngine, name: str) -> MissReason:
    return engine.facts[name].miss_reason


def loaded(engine: ModelledEngine) -> int:
    assert engine.manager is not None
    return engine.manager.stack.counts[Event.PROMOTED, RAM]


def test_max_load_tokens_is_kept() -> None:
    engine = engine_with(1)
    again(engine, "q", "t0", Hints(max_load_tokens=10 * TOKENS + 5))
    assert loaded(engine) == 10
    assert why(engine, "q") is MissReason.HINT


def test_tiers_are_kept_to() -> None:
    engine = engine_with(1)
    took_s = again(engine, "q", "t0", Hints(tiers=frozenset({"ram"})))
    assert took_s >= flat(0, LENGTH)
    assert why(engine, "q") is MissReason.HINT
    assert loaded(engine) == 0


def test_a_wait_of_nothing_takes_what_is_in_ram() -> None:
    engine = engine_with(1, disk=ModelledDisk(first_s=0.02))
    took_s = again(engine, "q", "t0", Hints(max_wait_s=0.0))
    assert took_s <= flat(0, LENGTH) + 0.005
    assert why(engine, "q") is MissReason.WAIT_SPENT


def test_a_shut_tier_is_named_as_the_reason() -> None:
    engine = engine_with(2)
    assert engine.manager is not None
    engine.manager.stack.set_gate(DISK, SHUT)
    again(engine, "shut", "t0", Hints())
    assert why(engine, "shut") is MissReason.TIER_SHUT
    engine.manager.stack.set_gate(DISK, DRAINING)
    again(engine, "draining", "t1", Hints())
    assert why(engine, "draining") is MissReason.WHOLE
    engine.manager.stack.set_gate(DISK, OPEN)


def test_what_is_not_worth_loading_is_computed_at_once_and_tried_now_and_then() -> None:
    disk = ModelledDisk()
    engine = engine_with(6, disk=disk)
    again(engine, "quick", "t0", Hints())
    disk.first_s, disk.chunk_s = 3.0, 0.5
    again(engine, "learns", "t1", Hints())
    engine.play([Prompt("rest", engine.now_s + 30.0, TOKENS)])
    disk.reads = 0
    for at in range(3):
        took_s = again(engine, f"q{at}", f"t{at + 2}", Hints(no_store=True))
        assert took_s <= flat(0, LENGTH) + 0.005
        assert why(engine, f"q{at}") is MissReason.NOT_WORTH
        engine.play([Prompt(f"rest{at}", engine.now_s + 20.0, TOKENS)])
    assert 0 < disk.reads <= 3 * 16


def test_requests_that_queue_are_looked_ahead_for() -> None:
    """A long prompt holds the engine; those behind it find their chunks in RAM at their turn."""
    engine = engine_with(2, ram_slots=512, disk=ModelledDisk(first_s=0.3))
    assert engine.manager is not None
    begin_s = engine.now_s + 1.0
    engine.play(
        [
            Prompt("long", begin_s, 200 * TOKENS),
            Prompt("behind-0", begin_s + 0.01, LENGTH, text="t0"),
            Prompt("behind-1", begin_s + 0.01, LENGTH, text="t1"),
        ]
    )
    for name in ("behind-0", "behind-1"):
        facts = engine.facts[name]
        assert facts.miss_reason is MissReason.WHOLE
        assert facts.wait_s == 0.0
    assert loaded(engine) == 2 * 31


def test_look_ahead_stays_within_its_share_of_ram() -> None:
    engine = engine_with(4, ram_slots=100, disk=ModelledDisk(first_s=0.1))
    assert engine.manager is not None
    stack = engine.manager.stack
    begin_s = engine.now_s + 1.0
    most = 0
    settle = stack.settle

    def watched(now_s: float) -> None:
        nonlocal most
        settle(now_s)
        held = sum(lease.pinned for lease in stack.promotions.leases() if lease.ahead)
        most = max(most, held)

    stack.settle = watched  # type: ignore[method-assign]
    engine.play(
        [Prompt("long", begin_s, 90 * TOKENS)]
        + [Prompt(f"behind-{at}", begin_s + 0.01, LENGTH, text=f"t{at}") for at in range(4)]
    )
    assert 0 < most <= 25


def test_a_request_that_ends_in_the_queue_holds_nothing() -> None:
    engine = engine_with(1, ram_slots=512)
    assert engine.manager is not None
    prompt = Prompt("gone", engine.now_s, LENGTH, text="t0")
    engine.manager.begin(prompt.request)
    engine.manager.describe(prompt.request, prompt.tokens, lambda: prompt.keys)
    engine.manager.step_end((), ())
    assert engine.manager.stack.promotions.lease(prompt.request) is not None
    engine.manager.finish(prompt.request)
    assert engine.manager.stack.promotions.lease(prompt.request) is None
    for _ in range(3):
        engine.play([Prompt(f"next-{engine.now_s}", engine.now_s + 1.0, TOKENS)])
    ram = engine.manager.stack.tiers[RAM]
    assert not any(ram.entries[key].pins for key in prompt.keys if key in ram.entries)


def test_first_tokens_are_timed() -> None:
    engine = engine_with(1)
    engine.play([Prompt("q", engine.now_s + 1.0, LENGTH)])
    facts = engine.facts["q"]
    assert facts.first_token_s is not None
    assert abs(facts.first_token_s - engine.first_token_s["q"]) < 1e-6
    assert facts.output_tokens == 1


def test_unusable_hints_are_counted_and_named_once(caplog: object) -> None:
    engine = ModelledEngine(flat, ram_slots=8)
    assert engine.manager is not None
    for _ in range(3):
        engine.manager.complaints.take([("unknown", "colour")])
    samples = {(metric.name, labels): value for metric, labels, value in engine.manager.samples()}
    assert samples["emberkv:hints_unusable", ("unknown",)] == 3


def test_who_came_later_does_not_make_an_earlier_request_late() -> None:
    """A long new prompt right behind a returning one is held until that has its chunks."""
    disk = ModelledDisk(first_s=0.03, chunk_s=0.0005)
    engine = engine_with(1, disk=disk)
    again(engine, "teaches", "t0", Hints(no_store=True))
    assert engine.manager is not None
    engine.play([Prompt("filler-2", engine.now_s + 1.0, 64 * TOKENS)])
    begin_s = engine.now_s + 1.0
    engine.play(
        [
            Prompt("returns", begin_s, LENGTH, text="t0"),
            Prompt("long", begin_s, 150 * TOKENS),
        ]
    )
    assert engine.facts["long"].held_s > 0.0
    assert engine.first_token_s["returns"] < flat(0, LENGTH)
    assert engine.first_token_s["long"] < 1.05 * (flat(0, LENGTH) + flat(0, 150 * TOKENS))
