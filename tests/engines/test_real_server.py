"""The whole path on the real engine: every tier, every kind of restart, every other identity."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from real_server import BLOCK_TOKENS, PROMPT_TOKENS, Answered, RealServer, document

from emberkv.observe.metrics import METRICS
from emberkv.testing.models import make_random_model

pytestmark = pytest.mark.engine

WHOLE = PROMPT_TOKENS // BLOCK_TOKENS * BLOCK_TOKENS


@pytest.fixture
def make_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., RealServer]]:
    monkeypatch.setenv("EMBERKV_STRICT", "1")
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    servers: list[RealServer] = []

    def make(model: Path, instance: str, **options: str) -> RealServer:
        servers.append(RealServer(model, tmp_path, instance, **options))  # type: ignore[arg-type]
        return servers[-1]

    yield make
    for server in servers:
        server.end()


def instance_of(tmp_path: Path) -> str:
    """A keeper's name that no other run has."""
    return f"test-{tmp_path.parent.name}-{tmp_path.name}"[-60:]


def make_model(directory: Path, seed: int = 0) -> Path:
    make_random_model(directory, seed=seed)
    return directory


def test_every_tier_gives_back_what_was_computed(
    tmp_path: Path, make_server: Callable[..., RealServer]
) -> None:
    """RAM; RAM after SIGKILL; disk after the keeper's death too; reset; a new identity."""
    model = make_model(tmp_path / "model")
    instance = instance_of(tmp_path)
    server = make_server(model, instance)
    server.start()
    prompts = [document(seed) for seed in range(3)]
    first = [server.ask(prompt) for prompt in prompts]
    assert [each.sources.computed for each in first] == [PROMPT_TOKENS] * 3

    returned = [server.ask(prompt) for prompt in prompts]
    assert [each.sources.ram for each in returned] == [WHOLE] * 3
    assert _equal(returned, first)
    assert _equal([server.computed(prompt) for prompt in prompts], first)
    assert not first[0].equals(first[1])  # else nothing below would show anything
    _check_metrics_and_log(server, returned[-1].request_id)
    server.wait_until_written(3)

    server.kill()
    server.start()
    after_kill = [server.ask(prompt) for prompt in prompts]
    assert [each.sources.ram for each in after_kill] == [WHOLE] * 3
    assert _equal(after_kill, first)

    _kill_keeper_under_a_live_engine(server, prompts[0], first[0])

    server.kill()
    assert server.kill_keeper() is not None
    server.start()
    assert server.page().chunks("ram") == 0
    from_disk = [server.ask(prompt) for prompt in prompts]
    assert [each.sources.disk for each in from_disk] == [WHOLE] * 3
    assert _equal(from_disk, first)

    response = server.http.post("/reset_prefix_cache?reset_external=true")
    response.raise_for_status()
    again = server.ask(prompts[1])
    assert again.sources.computed == PROMPT_TOKENS
    assert again.equals(first[1])


def _equal(answers: list[Answered], others: list[Answered]) -> bool:
    return all(one.equals(other) for one, other in zip(answers, others, strict=True))


def _check_metrics_and_log(server: RealServer, request_id: str) -> None:
    page = server.http.get("/metrics").raise_for_status().text
    assert [metric.name for metric in METRICS if f"# HELP {metric.name}" not in page] == []
    for way in ("load", "store"):  # the times that the how-to takes from vLLM's own metrics
        for what in ("bytes", "time"):
            assert f"\nvllm:kv_offload_{way}_{what}_total{{" in page
    lines = [json.loads(line) for line in server.request_log.read_text().splitlines()]
    line = next(line for line in lines if request_id in line["external_id"])
    assert line["prompt_tokens"] == PROMPT_TOKENS
    assert line["ram_tokens"] == WHOLE
    assert line["computed_tokens"] == PROMPT_TOKENS - WHOLE
    assert line["why_not_more"] == "whole"


def _kill_keeper_under_a_live_engine(
    server: RealServer, prompt: list[int], before: Answered
) -> None:
    """RAM goes on at once; a new keeper comes, with the memory and with the disk."""
    old = server.kill_keeper()
    answered = server.ask(prompt)
    assert answered.equals(before)
    assert answered.sources.computed < PROMPT_TOKENS
    server.wait_until_written(3)  # the disk is back, and names what it holds
    assert server.keeper() not in {None, old}


def test_another_identity_gets_nothing_and_answers_right(
    tmp_path: Path, make_server: Callable[..., RealServer]
) -> None:
    """fp32, then bf16, then other weights under the same name and path: 0 hits each time."""
    model = make_model(tmp_path / "model")
    instance = instance_of(tmp_path)
    prompts = [document(seed) for seed in range(2)]
    server = make_server(model, instance)
    server.start()
    fp32 = [server.ask(prompt) for prompt in prompts]
    server.wait_until_written(2)
    server.kill()

    half = make_server(model, instance, dtype="bfloat16")
    half.start()
    for prompt in prompts:
        answered = half.ask(prompt)
        assert answered.sources.computed == PROMPT_TOKENS
        assert answered.equals(half.computed(prompt))
    half.kill()

    other = make_model(tmp_path / "other", seed=1)
    _replace_weights(model, other)
    changed = make_server(model, instance)
    changed.start()
    for prompt, before in zip(prompts, fp32, strict=True):
        answered = changed.ask(prompt)
        assert answered.sources.computed == PROMPT_TOKENS
        assert answered.equals(changed.computed(prompt))
        assert not answered.equals(before)


def _replace_weights(model: Path, other: Path) -> None:
    """Write other weights over a model's, in place: same name, same size, same times."""
    for theirs in other.glob("*.safetensors"):
        mine = model / theirs.name
        stat = mine.stat()
        assert stat.st_size == theirs.stat().st_size
        with mine.open("r+b") as target, theirs.open("rb") as source:
            shutil.copyfileobj(source, target)
        os.utime(mine, ns=(stat.st_atime_ns, stat.st_mtime_ns))
