"""A real engine's calls on the tier stack, replayed without it: the same decisions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from slow_model import make_slow_model

from emberkv.sim.calls import replay_calls

pytestmark = pytest.mark.engine

SCRIPT = Path(__file__).parents[1] / "support" / "recorded_engine.py"


def test_the_simulator_decides_what_the_engine_was_told(tmp_path: Path) -> None:
    """With the plain spec: RAM for two of three prompts, the third comes back from disk."""
    model, directory = tmp_path / "model", tmp_path / "kv"
    make_slow_model(model)
    directory.mkdir()
    log = tmp_path / "engine.log"
    with log.open("wb") as errors:
        run = subprocess.run(
            [sys.executable, str(SCRIPT), str(model), str(directory)],
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, "PYTHONPATH": str(SCRIPT.parent)},
            timeout=600,
            check=False,
        )
    assert run.returncode == 0, log.read_text(errors="replace")[-4000:]
    got = json.loads(run.stdout.splitlines()[-1])
    assert [cached for cached, _ in got[:3]] == [0, 0, 0]
    assert all(cached >= 640 for cached, _ in got[3:6])
    assert [tokens for _, tokens in got[3:6]] == [tokens for _, tokens in got[:3]]
    assert [tokens for _, tokens in got[7:]] == [tokens for _, tokens in got[:3]]

    lines = (directory / "calls.jsonl").read_text(encoding="utf-8").splitlines()
    calls = {json.loads(line)[0] for line in lines}
    assert {"residence", "promote", "waiting", "load", "offload", "stored", "done"} <= calls
    assert list(replay_calls(lines)) == lines
