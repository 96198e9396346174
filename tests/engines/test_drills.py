"""Each drill on the real engine: the fault bites, everybody is answered right, the tier comes back.

Whether requests wait no longer than promised is the drill's own measurement, and on a machine that
does other things as well no test's: here a drill may only fail by being late.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from slow_model import make_slow_model

from emberkv.app.drilling.drills import DRILLS, Drill, run
from emberkv.app.drilling.load import Workload
from emberkv.app.drilling.scene import ANSWER_TOKENS, FRESH, Scene, shape_of
from emberkv.app.launch import ServeOptions
from emberkv.engines.vllm.command_line import Flags, Launch

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

PROMPT_TOKENS = 416
REQUESTS = 12
FLAGS = (
    *("--dtype", "float32", "--max-model-len", "512", "--enforce-eager"),
    *("--block-size", "32"),
)
LATE = ("waited longer", "still wait", "first tokens took")


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    patch = pytest.MonkeyPatch()
    patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    patch.setenv("HF_HUB_OFFLINE", "1")
    patch.setenv("EMBERKV_STRICT", "1")
    directory = tmp_path_factory.mktemp("drills")
    options = ServeOptions(
        model=str(make_slow_model(directory / "model")),
        ram_bytes=64 << 20,
        disk=Path("replaced"),
        disk_bytes=256 << 20,
        max_slowdown=2.0,  # on a busy machine a twentieth is no time for a disk to show anything
        vllm_arguments=FLAGS,
    )
    shape = shape_of(options, Launch(options.model, Flags(FLAGS), os.environ, True), PROMPT_TOKENS)
    workload = Workload.make(shape.returning, FRESH, PROMPT_TOKENS, ANSWER_TOKENS)
    playing = Scene(options, directory, shape, workload, REQUESTS)
    playing.measure()
    with playing.server:
        playing.begin()
        yield playing
        playing.end()
    patch.undo()


@pytest.mark.parametrize("drill", DRILLS, ids=[drill.name for drill in DRILLS])
def test_a_drill_is_survived(scene: Scene, drill: Drill) -> None:
    row = run(drill, scene)
    against = [part for part in row.detail.split("; ") if any(each in part for each in LATE)]
    assert row.passed or against, row.detail
    assert [part for part in _complaints(row.detail) if part not in against] == []
    facts = row.facts()
    assert list(facts) == ["drill", "passed", "detail", "p99_ratio"]
    assert isinstance(facts["p99_ratio"], float)
    assert facts["p99_ratio"] > 0


def _complaints(detail: str) -> list[str]:
    """What speaks against a drill."""
    known = (*LATE, "not answered", "differ from", "met no chunk", "nothing", "less than", "more")
    return [part for part in detail.split("; ") if any(each in part for each in known)]
