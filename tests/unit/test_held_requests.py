"""Requests that are held for an earlier one: what a queue of them costs, and that it ends."""

from __future__ import annotations

from scripted_engine import A, B, C, Engine, chain

from emberkv.live.lookup import Lookup

FIRST, SECOND = chain("a", 4), chain("b", 3)


def held() -> Engine:
    """A waits for its disk; B, with three chunks in RAM, would make it late and is held."""
    engine = Engine(max_stall_s=1000.0)
    engine.on_disk(A, FIRST)
    engine.manager.begin(C)
    engine.store(C, SECOND)
    engine.manager.finish(C)
    stack = engine.manager.stack
    stack.computed({A: (0, 1000)}, 0, 1000.0)  # a second per token
    engine.manager.begin(A)
    engine.manager.describe(A, len(FIRST) + 1, lambda: FIRST)
    engine.manager.begin(B)
    engine.manager.describe(B, 100, lambda: SECOND)
    assert engine.ask(A, FIRST) == [Lookup.RETRY] * 4
    engine.step()
    return engine


def test_a_held_request_costs_two_calls_a_step() -> None:
    engine = held()
    assert engine.ask(A, FIRST) == [Lookup.RETRY, Lookup.MISS]
    assert engine.ask(B, [*SECOND, *chain("new", 1)]) == [*[Lookup.HIT] * 3, Lookup.RETRY]
    for _ in range(5):
        engine.step()
        engine.ask(A, FIRST)
        assert engine.ask(B, [*SECOND, *chain("new", 1)]) == [Lookup.RETRY, Lookup.MISS]


def test_it_is_answered_once_the_other_is_late_anyway() -> None:
    engine = held()
    asked = [*SECOND, *chain("new", 1)]
    engine.ask(B, asked)
    engine.step()
    engine.now_s += 100.0
    assert engine.ask(B, asked) == [*[Lookup.HIT] * 3, Lookup.MISS]


def test_it_is_answered_once_the_other_has_gone() -> None:
    engine = held()
    asked = [*SECOND, *chain("new", 1)]
    engine.ask(B, asked)
    engine.step()
    assert engine.ask(B, asked) == [Lookup.RETRY, Lookup.MISS]
    engine.manager.finish(A)
    engine.step()
    assert engine.ask(B, asked) == [*[Lookup.HIT] * 3, Lookup.MISS]
