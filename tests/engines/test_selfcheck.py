"""The self-check on the real engine: it agrees where all is well, and names each planted fault."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from lying_server import BLOCK_TOKENS, FAULTY_SPEC, FLAGS, LAYERS, Bench, check_of, options_for

from emberkv.app.own_server import OwnServer
from emberkv.app.selfcheck import (
    EAGER_SPEC,
    Finding,
    Row,
    Source,
    finding,
)
from emberkv.drills.faults import MixUp, Operation
from emberkv.drills.plan import (
    NOTHING,
    PLAN_VARIABLE,
    Plan,
    PlannedFault,
    write_plan,
)
from emberkv.testing.models import make_random_model
from emberkv.tiers.slab_directory import find_slabs

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """One server for all planted faults; another namespace's slab lies beside its own."""
    patch = pytest.MonkeyPatch()
    patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    patch.setenv("HF_HUB_OFFLINE", "1")
    patch.setenv("EMBERKV_STRICT", "1")
    directory = tmp_path_factory.mktemp("selfcheck")
    theirs = directory / "theirs"
    theirs.mkdir()
    model = make_random_model(directory / "model-0", layers=LAYERS, seed=0)
    other = make_random_model(directory / "model-1", layers=LAYERS, seed=1)
    with OwnServer(options_for(other), theirs, spec=EAGER_SPEC) as foreign:
        check = check_of(foreign)
        prompts = check.measure()
        assert all(row.agrees for row in check.cold_and_device(prompts))
        check.settle(prompts)
    assert foreign.disk is not None
    (slab,) = find_slabs(foreign.disk)
    plan_path = directory / "plan.json"
    write_plan(plan_path, Plan(layers=LAYERS, foreign_slab=str(slab)))
    mine = directory / "mine"
    mine.mkdir()
    environment = {PLAN_VARIABLE: str(plan_path)}
    with OwnServer(options_for(model), mine, spec=FAULTY_SPEC, environment=environment) as server:
        yield Bench(server, plan_path)
    patch.undo()


def loads_chunks(row: Row) -> bool:
    """Whether there is more than one chunk to mix up."""
    return row.prompt_tokens >= 2 * BLOCK_TOKENS


@pytest.mark.parametrize("mix_up", MixUp)
def test_a_fault_between_disk_and_ram_is_caught(bench: Bench, mix_up: MixUp) -> None:
    bench.push_out()
    bench.plant(Plan((PlannedFault(Operation.READ, mix_up=mix_up),)))
    planted = bench.rows(Source.DISK)
    bench.plant(NOTHING)
    assert finding(planted) is Finding.DIFFERENT
    assert [row for row in planted if loads_chunks(row) and row.agrees] == []
    assert [row.problem for row in planted] == [""] * len(planted)
    bench.push_out()
    assert finding(bench.rows(Source.DISK)) is Finding.AGREES


@pytest.mark.parametrize("mix_up", [MixUp.OTHER_CHUNK, MixUp.SHIFTED_LAYER, MixUp.STALE_GENERATION])
def test_a_fault_between_ram_and_device_is_caught(bench: Bench, mix_up: MixUp) -> None:
    bench.push_out()
    assert finding(bench.rows(Source.DISK)) is Finding.AGREES  # and all of it is in RAM now
    bench.overwrite_device()
    bench.plant(Plan(loads=mix_up))
    planted = bench.rows(Source.RAM)
    bench.plant(NOTHING)
    assert finding(planted) is Finding.DIFFERENT
    assert [row for row in planted if loads_chunks(row) and row.agrees] == []
    bench.server.reset_device()
    assert finding(bench.rows(Source.RAM)) is Finding.AGREES


def test_an_answer_from_the_wrong_place_is_no_pass(bench: Bench) -> None:
    bench.push_out()
    rows = bench.rows(Source.RAM)  # they come from disk
    assert finding(rows) is Finding.ELSEWHERE
    assert any("from elsewhere" in row.problem for row in rows)


def test_the_command_checks_every_source_and_leaves_nothing_behind(tmp_path: Path) -> None:
    model = make_random_model(tmp_path / "model")
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(
        [
            *(str(Path(sys.executable).with_name("emberkv")), "selfcheck", str(model)),
            *("--ram", "64MiB", "--disk", str(disk), "--disk-size", "256MiB"),
            *("--chunk-tokens", "64", "--json", "--", *FLAGS),
        ],
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(done.stdout)
    assert {row["source"] for row in rows} == {source.value for source in Source}
    assert {row["prompt_tokens"] for row in rows} >= {32, 64, 65, 192, 224}
    assert all(row["agrees"] and not row["problem"] for row in rows)
    assert list(disk.iterdir()) == []
