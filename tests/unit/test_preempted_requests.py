"""Look-ups of requests that were preempted: who may have run since is not given anything to load.

An engine fails if a request loads in the very step that calls it preempted.
"""

from __future__ import annotations

import pytest
from scripted_engine import A, B, Engine, chain

from emberkv.live.lookup import Lookup
from emberkv.live.steps import StepWork

KEYS = chain("a", 3)
NOTHING = StepWork({}, ())


def preempted(engine: Engine) -> None:
    """A has run, all of it is in RAM, and a step has said that A was put back."""
    engine.manager.begin(A)
    engine.store(A, KEYS)
    engine.step(started=[A])
    engine.step(preempted=[A])


def test_it_gets_its_chunks_at_once() -> None:
    engine = Engine()
    preempted(engine)
    assert engine.ask(A, KEYS) == [Lookup.HIT] * 3


def test_it_keeps_getting_them_while_there_is_no_room_for_it() -> None:
    engine = Engine()
    engine.manager.step_begins(NOTHING)
    preempted(engine)
    for _ in range(5):
        assert engine.ask(A, KEYS) == [Lookup.HIT] * 3
        engine.step()
        engine.manager.step_begins(NOTHING)


def test_where_nobody_tells_who_runs_it_computes_instead_and_is_not_put_off() -> None:
    engine = Engine()
    preempted(engine)
    assert engine.ask(A, KEYS) == [Lookup.HIT] * 3
    for _ in range(5):
        engine.step()
        assert engine.ask(A, KEYS) == [Lookup.MISS]


@pytest.mark.parametrize("asked", [False, True])
def test_it_loads_nothing_when_it_was_preempted_between_two_steps(asked: bool) -> None:
    """It was resumed, with or without a look-up: the device may have held all of it."""
    engine = Engine()
    engine.manager.step_begins(NOTHING)
    preempted(engine)
    if asked:
        engine.ask(A, KEYS)
    engine.step()
    engine.manager.step_begins(StepWork({}, (A,)))
    engine.step()
    engine.manager.step_begins(NOTHING)
    assert engine.ask(A, KEYS) == [Lookup.RETRY, Lookup.MISS]
    engine.step(preempted=[A])
    assert engine.ask(A, KEYS) == [Lookup.HIT] * 3


def test_its_promise_is_given_back_when_it_is_resumed() -> None:
    """It may generate for minutes before it has a whole chunk to store."""
    engine = Engine()
    keys = chain("x", 3)
    engine.on_disk(B, keys)
    engine.manager.step_begins(NOTHING)
    preempted(engine)
    engine.ask(A, keys)
    engine.step()
    assert len(list(engine.manager.stack.promotions.leases())) == 1
    engine.manager.step_begins(StepWork({A: (0, 1)}, ()))
    assert list(engine.manager.stack.promotions.leases()) == []


def test_it_loads_nothing_if_it_was_not_asked_for_in_the_step_before() -> None:
    engine = Engine()
    preempted(engine)
    engine.step()
    assert engine.ask(A, KEYS) == [Lookup.MISS]
