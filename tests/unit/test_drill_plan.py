"""A drill's plan is followed while a storage works, and nothing else can reach a fault."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from keeper_processes import until

from emberkv import config
from emberkv.app import launch
from emberkv.domain.namespace import Namespace
from emberkv.domain.types import ChunkKey, Outcome, Slot
from emberkv.drills import keeper, plan
from emberkv.drills.faults import Fault, FaultyStorage, MixUp, Operation, Parts
from emberkv.drills.plan import FollowedPlan, Plan, PlannedFault, follow, write_plan
from emberkv.drills.slab_bytes import ForeignChunks, damage_slabs
from emberkv.errors import ConfigError
from emberkv.live.keeper.messages import DiskSettings
from emberkv.testing.storage import chunk_key, get, holds, payload_of, put, record_for
from emberkv.tiers.format import StoredNamespace
from emberkv.tiers.memory import MemoryStorage
from emberkv.tiers.slab import Slab
from emberkv.tiers.slab_directory import SlabDirectory, find_slabs

ROOT = Path(__file__).resolve().parents[2]
PAYLOAD_BYTES = 4096
TIMEOUT_S = 30.0


@contextmanager
def followed(tmp_path: Path) -> Iterator[tuple[FaultyStorage, Callable[[Plan], None]]]:
    """A storage that follows a plan, and what changes the plan and waits until it is followed."""
    path = tmp_path / "plan.json"
    write_plan(path, plan.NOTHING)
    storage = FaultyStorage(MemoryStorage(4, PAYLOAD_BYTES))
    thread = threading.Thread(target=follow, args=(storage, path))
    thread.start()

    def change(new: Plan) -> None:
        write_plan(path, new)
        until(lambda: plan.is_followed(path), "the plan is followed")

    yield storage, change
    storage.close()
    thread.join()


def test_faults_come_and_go_with_the_plan(tmp_path: Path) -> None:
    with followed(tmp_path) as (storage, change):
        put(storage, 1, 1)
        change(Plan((PlannedFault(Operation.READ, outcome="failed"),)))
        assert get(storage, 1, 1)[0] is Outcome.FAILED
        change(plan.NOTHING)
        assert holds(storage, 1, 1)
    assert plan.followed(tmp_path / "plan.json").chunks_met == 1


def test_a_hang_lasts_as_long_as_the_plan_says_so(tmp_path: Path) -> None:
    with followed(tmp_path) as (storage, change):
        put(storage, 1, 1)
        change(Plan((PlannedFault(Operation.READ, hangs=True),)))
        found: list[Outcome] = []
        reader = threading.Thread(target=lambda: found.append(get(storage, 1, 1)[0]))
        reader.start()
        assert storage.wait_until_held(1, TIMEOUT_S)
        assert found == []
        change(plan.NOTHING)
        reader.join(TIMEOUT_S)
        assert found == [Outcome.OK]


def test_latency_and_bandwidth_are_waited_for() -> None:
    waited: list[float] = []
    storage = FaultyStorage(
        MemoryStorage(4, PAYLOAD_BYTES),
        [Fault(Operation.WRITE, latency_s=0.25), Fault(Operation.READ, bytes_per_s=8192.0)],
        sleep=waited.append,
    )
    put(storage, 1, 1)
    get(storage, 1, 1)
    assert waited == [0.25, PAYLOAD_BYTES / 8192.0]


def read_mixed_up(mix_up: MixUp, parts: Parts, before: bytes = b"") -> bytes:
    """What comes back for chunk 1, of two that are stored."""
    storage = FaultyStorage(
        MemoryStorage(4, PAYLOAD_BYTES),
        foreign=lambda key: payload_of(77, PAYLOAD_BYTES) if key == chunk_key(1) else None,
    )
    for number in (1, 2):
        put(storage, number, number)
    storage.plan(Fault(Operation.READ, mix_up=mix_up, parts=parts))
    room = bytearray(before or PAYLOAD_BYTES)
    assert storage.read([record_for(1, 1)], [memoryview(room)]) == [Outcome.OK]
    return bytes(room)


def test_mixed_up_bytes_are_those_that_the_fault_is_named_after() -> None:
    right = payload_of(1, PAYLOAD_BYTES)
    quarters = [right[at : at + 1024] for at in range(0, PAYLOAD_BYTES, 1024)]
    parts = Parts(ranks=2, layers=2)
    old = payload_of(5, PAYLOAD_BYTES)
    assert read_mixed_up(MixUp.OTHER_CHUNK, parts) == payload_of(2, PAYLOAD_BYTES)
    assert read_mixed_up(MixUp.STALE_GENERATION, parts, old) == old
    assert read_mixed_up(MixUp.OTHER_NAMESPACE, parts) == payload_of(77, PAYLOAD_BYTES)
    assert read_mixed_up(MixUp.WRONG_RANK, parts) == b"".join(quarters[2:] + quarters[:2])
    shifted = [quarters[1], quarters[0], quarters[3], quarters[2]]
    assert read_mixed_up(MixUp.SHIFTED_LAYER, parts) == b"".join(shifted)


def slab_in(root: Path) -> Slab:
    stored = StoredNamespace(bytes(range(32)), {"name": "mine"})
    return SlabDirectory(root, 1 << 20).open_slab(stored, PAYLOAD_BYTES)


def test_a_damaged_slab_has_no_sound_chunk_left(tmp_path: Path) -> None:
    slab = slab_in(tmp_path)
    for number in range(3):
        put(slab, number, number)
    assert damage_slabs(tmp_path) == 3
    assert [get(slab, number, number)[0] for number in range(3)] == [Outcome.CORRUPT] * 3
    slab.close()


def test_chunks_of_another_slab_are_found_by_key(tmp_path: Path) -> None:
    slab = slab_in(tmp_path)
    put(slab, 3, 1)
    (directory,) = find_slabs(tmp_path)
    foreign = ForeignChunks(directory)
    assert foreign(chunk_key(3)) == payload_of(3, PAYLOAD_BYTES)
    assert foreign(ChunkKey(b"nobody")) is None
    slab.close()


# ── nothing but a drill reaches a fault ──────────────────────────────────────────────────────────


def test_no_key_of_the_configuration_changes_what_keeper_or_clock_a_server_gets() -> None:
    """Every key that `serve` can write, at once: the spec is the ordinary one."""
    options = launch.ServeOptions(
        model="m",
        ram_bytes=1 << 30,
        disk=Path("/d"),
        disk_bytes=1 << 30,
        chunk_tokens=32,
        eviction_policy="arc",
        keep_s=1.0,
        max_wait_s=1.0,
        max_stall_s=1.0,
        request_log=Path("/l"),
        instance="i",
        model_identity="x",
        on_busy_disk="refuse",
    )
    written = options.extra_config()
    assert (written["spec_name"], written["spec_module_path"]) == (launch.SPEC, launch.SPEC_MODULE)
    fields = {field.name for field in dataclasses.fields(config.Config)}
    assert not {name for name in fields if re.search("fault|drill|plan|clock|keeper_module", name)}
    for key in ("drill", "faults", "keeper_module", "plan", "clock_offset_s"):
        with pytest.raises(ConfigError, match="unknown key"):
            config.parse({"cpu_bytes_to_use": 1 << 30, key: 1})


def test_an_ordinary_server_loads_nothing_of_the_drills_whatever_its_environment(
    tmp_path: Path,
) -> None:
    """With the plan's variable set: what serves imports no module of the drills."""
    path = tmp_path / "plan.json"
    write_plan(path, Plan((PlannedFault(Operation.READ, outcome="failed"),)))
    source = ROOT / "src"
    rooms = ("config", "core", "engines", "live", "observe", "tiers")
    files = [
        file.relative_to(source)
        for room in rooms
        for file in sorted((source / "emberkv").glob(f"{room}*"))
        for file in (sorted(file.rglob("*.py")) if file.is_dir() else [file])
        if file.stem != "__main__"
    ]
    names = [".".join(file.with_suffix("").parts).removesuffix(".__init__") for file in files]
    code = f"""
import importlib, json, sys
for name in {names}:
    importlib.import_module(name)
print(json.dumps([name for name in sys.modules if name.startswith("emberkv.drills")]))
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, plan.PLAN_VARIABLE: str(path), "PYTHONPATH": str(ROOT / "src")},
    )
    assert json.loads(done.stdout.splitlines()[-1]) == []


def test_the_variable_is_read_in_the_drills_alone() -> None:
    package = ROOT / "src" / "emberkv"
    named = {
        str(path.relative_to(package).parts[0])
        for path in package.rglob("*.py")
        if re.search(r"PLAN_VARIABLE|EMBERKV_DRILL|emberkv\.drills", path.read_text("utf-8"))
    }
    assert named == {"app", "drills"}


def test_the_drills_refuse_a_process_that_no_drill_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(plan.PLAN_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match="spec_module_path"):
        plan.plan_path(os.environ)
    with pytest.raises(ConfigError, match="emberkv drill"):
        keeper.load()
    with pytest.raises(ConfigError):
        plan.plan_path({plan.PLAN_VARIABLE: str(tmp_path / "none")})


def test_a_plan_with_an_unknown_word_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text('{"fautls": []}')
    with pytest.raises(msgspec.ValidationError, match="fautls"):
        FollowedPlan(path).now()


def test_the_drills_keeper_opens_an_ordinary_slab_behind_its_faults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.json"
    write_plan(path, plan.NOTHING)
    monkeypatch.setenv(plan.PLAN_VARIABLE, str(path))
    root = tmp_path / "disk"
    root.mkdir()
    settings = DiskSettings(str(root), 1 << 20)
    storage = keeper.load()(settings, Namespace((("model", "m"),)), PAYLOAD_BYTES)
    assert put(storage, 1, 1) is Outcome.OK
    assert holds(storage, 1, Slot(1))
    storage.close()
