"""What `emberkv status` says of costs, chunks and the guard, in words that people read."""

from __future__ import annotations

from pathlib import Path

import pytest
from operated_engine import operations_on, serve, served
from scripted_engine import A, Engine, chain

from emberkv.app.cli import main
from emberkv.app.figures import fact
from emberkv.app.guard_words import guard_line, guard_lines
from emberkv.app.load.tables import sources_line
from emberkv.core.gates import OPEN, SHUT
from emberkv.core.guard import Budget, Guard, GuardConfig, Limit, Signal
from emberkv.domain.types import DISK
from emberkv.live.control import address


def guard() -> Guard:
    budget = Budget(Signal.FIRST_TOKEN, (Limit(None, 1.0),))
    return Guard(GuardConfig(budgets=(budget,)), 2)


def test_facts_are_no_python() -> None:
    assert fact({"0": 0.26409412, "512": 0.2, "none": {}}) == "(0: 0.2641, 512: 0.2, none: none)"
    assert [fact(each) for each in (1.0, 3, None, "open")] == ["1", "3", "none", "open"]
    assert [fact(each) for each in ([], ["a", {"b": 2}])] == ["none", "a; (b: 2)"]


def test_the_guard_says_how_far_tiers_are_open_and_why() -> None:
    watching = guard()
    lines = list(guard_lines(watching.as_facts()))
    assert lines[0] == "guard: ram open, disk open"
    assert lines[1].startswith("  ttft_p99: 0 of 0 samples are over budget; the window")
    watching.by_hand(DISK, SHUT, 3.0)
    lines = list(guard_lines(watching.as_facts()))
    assert lines[0] == "guard: ram open, disk by_hand"
    assert lines[-1].startswith("  last change: disk, ")
    watching.by_hand(DISK, OPEN, 4.0)
    assert guard_line(watching.as_facts()) == "ram open, disk open"


def test_status_shows_chunks_costs_and_guard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(address.RUNTIME_DIR_VARIABLE, str(tmp_path / "run"))
    engine = Engine()
    operations = operations_on(engine)
    operations.facts["guard"] = guard().as_facts
    operations.facts["costs"] = lambda: {"compute_s_per_1000_tokens": {"0": 0.264094}}
    server = served(operations)
    serve(engine, A, chain("x", 3))
    assert main(["status"]) == 0
    shown = capsys.readouterr().out
    assert main(["top", "--once"]) == 0
    top = capsys.readouterr().out
    server.close()
    assert "chunks of ram since the start: admitted 3" in shown
    assert "guard: ram open, disk open" in shown
    assert "costs: compute_s_per_1000_tokens (0: 0.2641)" in shown
    assert "{" not in shown + top
    assert "guard    ram open, disk open" in top


def test_sources_have_the_names_that_they_have_elsewhere() -> None:
    said = sources_line({"computed": 60, "device": 10, "host": 30})
    assert said == "prompt tokens: computed 60 (60%), device 10 (10%), ram 30 (30%)"
