"""`emberkv baseline` and `emberkv load` on a real HTTP server, as a user types them."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from toy_engine import MODEL, ToyEngine, serving

from emberkv.app.cli import load as load_command
from emberkv.app.cli import main
from emberkv.app.load.client import Client, is_loopback, server_url
from emberkv.errors import UsageError
from emberkv.observe.baseline import Baseline, read_baseline

SMALL = ("--lengths", "100,400", "--requests", "40", "--concurrency", "1,4", "--answer-tokens", "4")
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def engine() -> Iterator[ToyEngine]:
    with serving(ToyEngine()) as engine:
        yield engine


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command; returns its status and what it printed."""

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        words = [str(argument) for argument in arguments]
        monkeypatch.setattr(sys, "argv", ["emberkv", *words])
        capsys.readouterr()
        status = main(words)
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


def record(run: Run, engine: ToyEngine, out: Path, *more: str) -> Baseline:
    status, _, errors = run("baseline", "--server", engine.url, "--out", out, *SMALL, *more)
    assert status == 0, errors
    return read_baseline(out)


def test_a_baseline_holds_what_was_felt(run: Run, engine: ToyEngine, tmp_path: Path) -> None:
    found = record(run, engine, tmp_path / "b.json")
    assert (found.how, found.server.model, found.server.engine_version) == (
        "workload",
        MODEL,
        "0.0-toy",
    )
    assert (found.server.max_model_tokens, found.server.block_tokens) == (4200, 16)
    assert not found.server.has_tiers
    assert found.overall.requests == 80
    assert [each.up_to_tokens for each in found.classes] == [128, 512]
    assert found.lengths == {"up to 128": 40, "257-512": 40}
    assert [step.concurrency for step in found.steps] == [1, 4]
    assert found.overall.inter_token is not None
    assert found.overall.inter_token.count == 80 * 3
    first, end = found.overall.first_token, found.overall.end_to_end
    assert first is not None
    assert end is not None
    assert 0 < first.p50_s <= first.p95_s <= first.p99_s
    assert end.p50_s > first.p50_s
    assert [point.tokens for point in found.prefill] == [128, 256, 400]
    assert found.reused_share is not None
    assert 0.2 < found.reused_share < 0.5
    assert found.device_cache.preemptions == 0
    assert found.device_cache.evictions is None
    assert any("--kv-cache-metrics" in note for note in found.notes)
    assert any("fewer than 100 requests" in note for note in found.notes)
    assert found.command.startswith("emberkv baseline --server")
    assert 1 <= engine.most_at_once <= 4  # on a busy machine no two need to meet


def test_requests_are_what_vllm_takes(run: Run, engine: ToyEngine, tmp_path: Path) -> None:
    record(run, engine, tmp_path / "b.json", "--no-prefill")
    assert len(engine.bodies) == 80 + 1  # and one to warm up
    body = engine.bodies[-1]
    assert (body["model"], body["max_tokens"], body["temperature"]) == (MODEL, 4, 0)
    assert body["ignore_eos"]
    assert body["stream"]


def test_load_asks_the_same_prompts_as_the_baseline(
    run: Run, engine: ToyEngine, tmp_path: Path
) -> None:
    record(run, engine, tmp_path / "b.json", "--no-prefill")
    before = sorted(engine.prompts)
    engine.prompts.clear()
    status, _, _ = run("load", "--server", engine.url, *SMALL)
    assert status == 0
    assert sorted(engine.prompts) == before


def test_load_says_every_figure_as_json(run: Run, engine: ToyEngine) -> None:
    status, out, _ = run("load", "--server", engine.url, *SMALL, "--json")
    facts = json.loads(out)
    assert status == 0
    assert [step["concurrency"] for step in facts["steps"]] == [1, 4]
    for step in facts["steps"]:
        assert step["overall"]["requests"] == 40
        sources = step["prompt_tokens_by_source"]
        assert sources["device"] > 0
        assert sources["computed"] > 0
    assert "verdicts" not in facts


def test_a_broken_budget_is_exit_status_1(run: Run, engine: ToyEngine, tmp_path: Path) -> None:
    """The baseline's figures are made a thousandth, then a thousand times what they are."""
    true = record(run, engine, tmp_path / "b.json", "--no-prefill")
    for factor, status, held in ((0.001, 1, "over"), (1000.0, 0, "within")):
        path = tmp_path / f"{factor}.json"
        path.write_bytes(msgspec.json.encode(_times(msgspec.to_builtins(true), factor)))
        got, out, _ = run("load", "--server", engine.url, *SMALL, "--baseline", path, "--json")
        assert got == status
        verdicts = json.loads(out)["verdicts"]
        assert {each["held"] for each in verdicts} == {held, "too few"}
        got, out, _ = run("load", "--server", engine.url, *SMALL, "--baseline", path)
        assert got == status
        assert re.search(rf"first token .*{held}", out)


def _times(value: object, factor: float) -> object:
    if isinstance(value, dict):
        return {
            key: each * factor if key in {"p50_s", "p95_s", "p99_s"} else _times(each, factor)
            for key, each in value.items()
        }
    if isinstance(value, list | tuple):
        return [_times(each, factor) for each in value]
    return value


def test_tables_fit_eighty_columns(
    run: Run, engine: ToyEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drawn as wide as they want, they are narrow enough."""
    record(run, engine, tmp_path / "b.json", "--no-prefill")
    monkeypatch.setattr(load_command, "console", lambda: Console(highlight=False, width=300))
    _, out, _ = run("load", "--server", engine.url, *SMALL, "--baseline", tmp_path / "b.json")
    assert "4 at a time: 40 requests, 0 failed" in out
    assert "prompt tokens: computed" in out
    tables = [line.rstrip() for line in out.splitlines() if not line.startswith(("none", "toy"))]
    assert max(len(line) for line in tables if "budget" not in line and ";" not in line) <= 80


def test_failed_requests_are_counted_and_are_exit_status_1(run: Run) -> None:
    with serving(ToyEngine(fail_every=5)) as engine:
        status, out, _ = run("load", "--server", engine.url, *SMALL)
    assert status == 1
    assert "failed 8 times: 400: no such token" in out


def test_a_server_that_knows_no_such_tokens_is_a_clear_line(run: Run) -> None:
    with serving(ToyEngine(fail_every=1)) as engine:
        status, _, errors = run("load", "--server", engine.url, *SMALL)
    assert status == 1
    assert errors.count("\n") == 1
    assert "--vocabulary" in errors


def test_a_server_with_tiers_has_no_baseline(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "b.json"
    with serving(ToyEngine(tiers=True)) as engine:
        status, _, errors = run("baseline", "--server", engine.url, "--out", out, *SMALL)
        assert status == 2
        assert "start it as plain vllm serve, or add --with-tiers" in errors
        assert engine.prompts == []
        assert record(run, engine, out, "--with-tiers", "--no-prefill").server.has_tiers


def test_watching_reads_the_engines_own_histograms(
    run: Run, engine: ToyEngine, tmp_path: Path
) -> None:
    """With traffic of the operator's own meanwhile, and nothing of ours but single requests."""
    done = threading.Event()

    async def traffic() -> None:
        async with Client(engine.url, 30.0) as client:
            while not done.is_set():
                await client.complete(MODEL, [5] * 300, 4)

    thread = threading.Thread(target=lambda: asyncio.run(traffic()))
    thread.start()
    out = tmp_path / "b.json"
    try:
        given = ("--watch", "1", "--prefill-lengths", "100,200")
        status, said, errors = run("baseline", "--server", engine.url, "--out", out, *given)
    finally:
        done.set()
        thread.join()
    assert status == 0, errors
    found = read_baseline(out)
    assert (found.how, found.steps, found.classes) == ("watched", (), ())
    assert found.overall.requests > 0
    assert found.overall.first_token is not None
    assert found.lengths.keys() == {"up to 500"}
    assert [point.tokens for point in found.prefill] == [100, 200]
    assert len([each for each in engine.prompts if len(each) != 300]) == 2 * 3
    assert "as fine as the buckets" in said


def test_watching_an_idle_server_finds_nothing(run: Run, engine: ToyEngine, tmp_path: Path) -> None:
    given = ("--out", tmp_path / "b.json", "--watch", "1", "--no-prefill")
    status, _, errors = run("baseline", "--server", engine.url, *given)
    assert status == 1
    assert "no request ended in 1 s" in errors
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", [("load",), ("baseline", "--out", "b.json")])
def test_a_server_elsewhere_is_not_loaded_by_mistake(
    run: Run, tmp_path: Path, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    status, _, errors = run(*command, "--server", "http://192.0.2.1:8000")
    assert status == 2
    assert "--this-server-is-mine" in errors


def test_addresses_of_servers() -> None:
    assert server_url("http://localhost:8000/v1/") == "http://localhost:8000"
    assert [is_loopback(f"http://{host}:1") for host in ("localhost", "127.0.0.2", "[::1]")] == [
        True,
        True,
        True,
    ]
    assert not is_loopback("http://example.com")
    for wrong in ("localhost:8000", "ftp://x", "", "http://", "http://a:b", "http://a:99999"):
        with pytest.raises(UsageError, match="no address of a server"):
            server_url(wrong)


@pytest.mark.parametrize(
    ("given", "status", "said"),
    [
        (("--lengths", "100,9000"), 2, "--lengths 9000 is too long: the server takes 4184"),
        (("--lengths", "100,x"), 2, "no list of whole numbers"),
        (("--model", "other"), 2, "the server has no model 'other'; it has toy"),
        (("--returning", "2"), 2, "returning"),
        (("--baseline", "none.json"), 2, "can't read the baseline"),
        (("--vocabulary", "5"), 2, "--vocabulary must be 1000"),
    ],
)
def test_mistakes_are_one_line(
    run: Run, engine: ToyEngine, given: tuple[str, ...], status: int, said: str
) -> None:
    got, _, errors = run("load", "--server", engine.url, *given)
    assert got == status
    assert said in errors
    assert errors.count("\n") == 1


def test_nobody_there_is_the_worlds_fault(run: Run) -> None:
    with serving(ToyEngine()) as engine:
        url = engine.url
    status, _, errors = run("load", "--server", url)
    assert status == 1
    assert f"{url} does not answer" in errors


def test_without_the_libraries_it_is_said_what_to_install(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    status, _, errors = run("load", "--server", "http://127.0.0.1:1")
    assert status == 2
    assert "pip install 'emberkv[load]'" in errors
