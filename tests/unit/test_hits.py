"""`emberkv hits`: a request log in figures, against sums made here."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from emberkv.app import hits
from emberkv.app.cli import main
from emberkv.observe.baseline import class_bound
from emberkv.observe.request_log import line_of
from emberkv.observe.requests import MissReason, RequestFacts

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: str | Path) -> tuple[int, str, str]:
        capsys.readouterr()
        status = main([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return call


def request(first_token_s: float | None, prompt: int | None = 400, **tokens: int) -> RequestFacts:
    given = {f"{source}_tokens": count for source, count in tokens.items()}
    return RequestFacts("r", prompt_tokens=prompt, first_token_s=first_token_s, **given)


def write(path: Path, requests: list[RequestFacts]) -> Path:
    path.write_text("".join(line_of(each) + "\n" for each in requests))
    return path


def test_tokens_times_and_reasons_are_those_of_the_log(tmp_path: Path) -> None:
    numbers = random.Random(5)
    requests = []
    for _ in range(300):
        prompt = numbers.randrange(100, 2000)
        parts = [numbers.choice((0, 0, 32, 64)) for _ in range(3)]
        facts = request(
            numbers.random(), prompt, **dict(zip(("device", "ram", "disk"), parts, strict=True))
        )
        facts.miss_reason = numbers.choice(list(MissReason))
        facts.wait_s = numbers.choice((0.0, 0.25))
        facts.stored_chunks = 3
        requests.append(facts)
    found = hits.figures(*hits.read(write(tmp_path / "log", requests)))
    assert (found.requests, found.stored_chunks, found.unreadable) == (300, 900, 0)
    for source in ("device", "ram", "disk", "computed"):
        assert found.tokens[source] == sum(getattr(r, f"{source}_tokens") for r in requests)
    for reason in MissReason:
        assert found.reasons[reason.value] == sum(r.miss_reason is reason for r in requests)
    assert found.waits is not None
    assert found.waits.count == sum(r.wait_s > 0 for r in requests)
    assert sum(group.requests for group in found.groups) == 300
    for group in found.groups:
        members = [
            r
            for r in requests
            if class_bound(r.prompt_tokens or 0) == group.up_to_tokens
            and slowest(r) == group.source
        ]
        assert group.requests == len(members)
        assert group.first_token is not None
        assert group.first_token.p50_s in {round(r.first_token_s or 0, 6) for r in members}
        asked = sum(r.prompt_tokens or 0 for r in members)
        reused = sum(r.device_tokens + r.ram_tokens + r.disk_tokens for r in members)
        assert group.reused_share == pytest.approx(reused / asked, abs=1e-4)


def slowest(facts: RequestFacts) -> str:
    if facts.disk_tokens:
        return "disk"
    if facts.ram_tokens:
        return "ram"
    return "device" if facts.device_tokens else "computed"


def test_what_is_saved_is_held_against_the_same_length(tmp_path: Path, run: Run) -> None:
    requests = [request(1.0) for _ in range(20)] + [request(0.25, ram=320) for _ in range(100)]
    requests += [request(0.01, 100), request(5.0, 2000, disk=1000)]
    status, out, _ = run("hits", write(tmp_path / "log", requests))
    assert status == 0
    rows = {tuple(line.split()[:2]): line.split() for line in out.splitlines()}
    assert rows["257-512", "ram"][2:] == ["100", "80", "%", "250ms", "250ms", "250ms", "75", "%"]
    assert rows["257-512", "computed"][-4:] == ["1.00s", "1.00s", "(1.00s)", "-"]
    assert rows["1025-2048", "disk"][-1] == "-"  # nothing of that length was computed
    assert "nobody waited for the disk" in out
    assert "why they got no more: not_asked 122" in out


def test_programs_get_the_same(tmp_path: Path, run: Run) -> None:
    requests = [request(1.0), request(0.5, ram=320), request(None, None)]
    status, out, _ = run("hits", write(tmp_path / "log", requests), "--json")
    facts = json.loads(out)
    assert status == 0
    assert facts["requests"] == 3
    assert facts["prompt_tokens_by_source"] == {
        "device": 0,
        "ram": 320,
        "disk": 0,
        "computed": 480,
    }
    assert [(each["source"], each["requests"]) for each in facts["groups"]] == [
        ("ram", 1),
        ("computed", 1),
    ]


def test_a_line_that_is_half_written_is_left_out(tmp_path: Path, run: Run) -> None:
    log = write(tmp_path / "log", [request(1.0)])
    log.write_text(log.read_text() + line_of(request(1.0))[:40])
    status, out, _ = run("hits", log)
    assert status == 0
    assert out.startswith(
        "1 requests; prompt tokens: device 0 %, ram 0 %, disk 0 %, computed 100 %"
    )
    assert "1 lines could not be read and are left out" in out


def test_what_is_no_request_log_is_said(tmp_path: Path, run: Run) -> None:
    status, _, error = run("hits", tmp_path / "nothing")
    assert status == 2
    assert "can't read the request log" in error
    other = tmp_path / "other"
    other.write_text('{"a": 1}\n')
    status, _, error = run("hits", other)
    assert status == 2
    assert "is no request log" in error
    empty = write(tmp_path / "empty", [])
    status, out, _ = run("hits", empty)
    assert status == 0
    assert "0 requests; prompt tokens: none yet" in out
