"""`emberkv baseline` and `emberkv load` on the real engine, without tiers and with them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_server import BLOCK_TOKENS, DEVICE_BLOCKS, SERVE, RealServer

from emberkv.observe.baseline import read_baseline
from emberkv.testing.models import make_random_model

pytestmark = pytest.mark.engine

LENGTHS, REQUESTS = (128, 512), 40
WORKLOAD = (
    *("--lengths", ",".join(map(str, LENGTHS)), "--requests", str(REQUESTS)),
    *("--concurrency", "1,3", "--answer-tokens", "4"),
)


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[dict[str, RealServer]]:
    """The same model, served plainly and with tiers; neither is started."""
    model = tmp_path / "model"
    make_random_model(model, seed=0)
    name = f"load-{tmp_path.parent.name}-{tmp_path.name}"[-50:]
    found = {
        entry: RealServer(model, tmp_path, f"{name}-{entry}", entry=entry)
        for entry in ("plain", "serve")
    }
    yield found
    for server in found.values():
        server.end()


def emberkv(*arguments: object) -> subprocess.CompletedProcess[str]:
    words = [str(SERVE), *map(str, arguments)]
    return subprocess.run(words, check=False, capture_output=True, text=True, timeout=300)


def test_a_baseline_without_tiers_and_a_load_with_them(
    tmp_path: Path, servers: dict[str, RealServer]
) -> None:
    out = tmp_path / "baseline.json"
    plain, tiered = servers["plain"], servers["serve"]
    plain.start()
    done = emberkv("baseline", "--server", plain.server.url, "--out", out, *WORKLOAD)
    assert done.returncode == 0, done.stderr
    _check_baseline(out)
    watched = tmp_path / "watched.json"
    idle = emberkv("baseline", "--server", plain.server.url, "--out", watched, "--watch", 1)
    assert idle.returncode == 1
    assert "no request ended" in idle.stderr
    plain.kill()

    tiered.start()
    refused = emberkv("baseline", "--server", tiered.server.url, "--out", tmp_path / "no.json")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "runs with emberkv's tiers" in refused.stderr
    given = ("--server", tiered.server.url, *WORKLOAD, "--baseline", out)
    done = emberkv("load", *given, "--json")
    assert done.returncode in {0, 1}, done.stderr  # how quick is not this test's matter
    facts = json.loads(done.stdout)
    assert facts["server"]["has_tiers"]
    assert [sum(step["failed"].values()) for step in facts["steps"]] == [0, 0]
    assert len(facts["verdicts"]) == 2 * 2 * 3 * 3
    sources = [step["prompt_tokens_by_source"] for step in facts["steps"]]
    # More documents than the device holds: what returns, returns from RAM too.
    assert sum(each.get("host", 0) for each in sources) > 0
    asked = sum(sum(each.values()) for each in sources)
    assert 0.7 * REQUESTS * sum(LENGTHS) < asked <= REQUESTS * sum(LENGTHS)


def _check_baseline(out: Path) -> None:
    found = read_baseline(out)
    assert (found.server.model, found.server.max_model_tokens) == ("tiny", 1536)
    assert (found.server.block_tokens, found.server.device_blocks) == (BLOCK_TOKENS, DEVICE_BLOCKS)
    assert found.server.engine_version
    assert found.overall.requests == 2 * REQUESTS
    assert [each.up_to_tokens for each in found.classes] == [128, 512]
    assert [point.tokens for point in found.prefill] == [128, 256, 512]
    assert found.reused_share is not None
    assert 0.0 < found.reused_share < 0.6
    assert found.device_cache.preemptions is not None
