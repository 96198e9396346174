"""What a look-up has answered stays there until the step is over, whatever is tried beside it."""

from __future__ import annotations

import pytest
from scripted_engine import RAM_SLOTS, A, B, C, Engine, chain

from emberkv.domain.types import RAM, RequestId
from emberkv.live.lookup import Lookup


def test_a_probe_does_not_evict_what_the_look_up_has_just_promised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine()
    keys = chain("x", 4)
    engine.on_disk(A, keys)
    engine.manager.begin(B)
    engine.store(B, keys[:1])
    engine.manager.finish(B)
    engine.driver.end()
    others = chain(f"filler-{A}", RAM_SLOTS - 1)  # used after the head of the chain
    engine.manager.begin(C)
    assert engine.manager.prepare_store(C, others, None) == []
    engine.manager.finish(C)
    engine.step()
    monkeypatch.setattr(engine.manager.stack, "pays", lambda level, *_: level == RAM)
    reader = RequestId("reader")
    engine.manager.begin(reader)
    assert engine.ask(reader, keys) == [Lookup.HIT, Lookup.MISS]
    assert len(engine.manager.prepare_load(reader, keys[:1])) == 1
