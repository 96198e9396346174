"""`emberkv doctor` says of each fact what it means and what to do."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from emberkv.app import findings
from emberkv.app.findings import Finding, Level
from emberkv.app.fit import RamPlan
from emberkv.app.machine import DiskSpace, Machine
from emberkv.engines.vllm.command_line import Flags, Need
from emberkv.live.keeper.messages import Holder, Role, Status
from emberkv.live.keeper.status import KeeperInfo
from emberkv.tiers.slab_directory import SlabInfo

GIB = 1 << 30
SPEC_KEYS = {"spec_name": "EmberOffloadingSpec", "spec_module_path": "emberkv.engines.vllm"}


ENGINE = (Holder(Role.MANAGER, 77, 0), Holder(Role.WORKER, 78, 0))


def never(pid: int) -> bool:
    return False


def machine(
    available_gib: int = 60, shm_bytes: int | None = 32 * GIB, locked_bytes: int | None = None
) -> Machine:
    return Machine(64 * GIB, "this machine's RAM", available_gib * GIB, shm_bytes, locked_bytes)


def levels(found: list[Finding]) -> list[str]:
    return [finding.level.value for finding in found]


def test_what_is_wrong_says_what_to_do() -> None:
    """Every level but ok comes with a remedy, whatever the facts."""
    plan = RamPlan(90 * GIB, 6 * GIB, (), machine())
    found = [
        findings.check_engine(None, ("0.32",), is_tested=False),
        findings.check_engine("0.31.0", ("0.32",), is_tested=False),
        findings.check_memory(machine(), plan),
        findings.check_memory(machine(1), RamPlan(20 * GIB, 6 * GIB, (), machine(1))),
        findings.check_shm(machine(shm_bytes=64 << 20)),
        findings.check_shm(machine(shm_bytes=None)),
        findings.check_locked_memory(machine(locked_bytes=1), GIB, on_cpu=False),
        findings.check_disk(DiskSpace(Path("/kv"), GIB, 0), 2 * GIB, direct_io=True),
        findings.check_disk(DiskSpace(Path("/kv"), GIB, 0), None, direct_io=False),
        findings.check_hash(Flags([]), "xxhash", {}),
        findings.check_hash(Flags([]), "sha256", {}),
        findings.check_ghosts(["vllm_offload_1.mmap"]),
        *findings.check_keepers([KeeperInfo("blue", None), KeeperInfo("red", status(()))], never),
        *findings.check_offloading_flags(Flags(["--cpu-offload-gb=4", "--kv-offloading-size=4"])),
        *findings.read_transfer_config("{")[0],
        *findings.read_transfer_config("{}")[0],
    ]
    assert Level.OK not in {finding.level for finding in found}
    assert [finding for finding in found if not finding.do] == []


def test_a_tested_engine_is_ok_and_another_fails() -> None:
    assert findings.check_engine("0.32.1", ("0.32",), is_tested=True).level == "ok"
    untested = findings.check_engine("0.33.0", ("0.32",), is_tested=False)
    assert (untested.level, untested.do) == (
        "fail",
        "install vLLM 0.32.x, or an emberkv that knows this version",
    )


def test_memory_is_held_against_the_machine_and_against_what_is_free() -> None:
    needs = (Need("weights", 10 * GIB),)
    assert findings.check_memory(machine(), None).level == "ok"
    fits = findings.check_memory(machine(), RamPlan(40 * GIB, 6 * GIB, needs, machine()))
    assert fits.level == "ok"
    assert "8.0 GiB beyond the reserve" in fits.found
    busy = findings.check_memory(machine(20), RamPlan(40 * GIB, 6 * GIB, needs, machine(20)))
    assert busy.level == "warn"
    full = findings.check_memory(machine(), RamPlan(60 * GIB, 6 * GIB, needs, machine()))
    assert full.level == "fail"
    assert "at most --ram 48GiB fits" in full.found


def test_pinning_matters_only_where_there_is_a_device() -> None:
    small = machine(locked_bytes=8 << 20)
    assert findings.check_locked_memory(small, GIB, on_cpu=False).level == "warn"
    assert findings.check_locked_memory(small, GIB, on_cpu=True).level == "ok"
    assert findings.check_locked_memory(small, None, on_cpu=False).level == "ok"
    assert findings.check_locked_memory(machine(), GIB, on_cpu=False).level == "ok"


def test_the_disk_is_held_against_its_size_and_direct_io() -> None:
    space = DiskSpace(Path("/kv"), 10 * GIB, 0)
    assert findings.check_disk(space, 5 * GIB, direct_io=True).level == "ok"
    assert findings.check_disk(space, 11 * GIB, direct_io=True).level == "fail"
    assert findings.check_disk(space, 5 * GIB, direct_io=False).level == "warn"


@pytest.mark.parametrize(
    ("arguments", "environment", "level"),
    [
        ([], {}, "ok"),
        (["--prefix-caching-hash-algo", "sha256"], {}, "warn"),
        (["--prefix-caching-hash-algo", "xxhash"], {}, "fail"),
        (["--prefix-caching-hash-algo", "xxhash_cbor"], {"PYTHONHASHSEED": "0"}, "ok"),
    ],
)
def test_a_hash_is_stable_likely_or_not(
    arguments: list[str], environment: dict[str, str], level: str
) -> None:
    assert findings.check_hash(Flags(arguments), "sha256_cbor", environment).level == level


def status(holders: tuple[Holder, ...]) -> Status:
    return Status(
        pid=4711,
        instance="red",
        namespace=(),
        arena_bytes=3 * GIB,
        ready_chunks=7,
        holders=holders,
        age_s=12.0,
        seconds_left=None if holders else 480.0,
        disk="off",
        chunks_under_way=0,
    )


def test_a_keeper_without_an_engine_is_told_with_what_it_holds_and_how_long() -> None:
    assert levels(findings.check_keepers([], never)) == ["ok"]
    (serving,) = findings.check_keepers([KeeperInfo("red", status(ENGINE))], never)
    assert serving.level == "ok"
    (left_over,) = findings.check_keepers([KeeperInfo("red", status(()))], never)
    assert left_over.level == "warn"
    assert "holds 3.0 GiB of an engine that is gone for 480 s more" in left_over.found
    assert "kill 4711" in left_over.do


def test_an_engine_whose_server_is_gone_is_told() -> None:
    (orphan,) = findings.check_keepers([KeeperInfo("red", status(ENGINE))], lambda pid: pid == 77)
    assert orphan.level == "warn"
    assert orphan.do.endswith("kill -9 77")


def slab(name: str, problem: str | None = None, size_bytes: int = GIB) -> SlabInfo:
    return SlabInfo(
        directory=Path("/kv") / f"emberkv-{name}",
        namespace=None,
        geometry=None,
        size_bytes=size_bytes,
        chunks=3,
        last_used_s=time.time(),
        in_use=False,
        problem=problem,
    )


def test_slabs_of_other_namespaces_and_damaged_ones_are_told() -> None:
    assert levels(findings.check_slabs([], None)) == ["ok"]
    assert levels(findings.check_slabs([slab("a")], 2 * GIB)) == ["ok"]
    assert levels(findings.check_slabs([slab("a")], GIB // 2)) == ["warn"]
    several = findings.check_slabs([slab("a"), slab("b")], None)
    assert levels(several) == ["warn"]
    assert "2 namespaces" in several[0].found
    damaged = findings.check_slabs([slab("a", problem="cut short")], None)
    assert levels(damaged) == ["warn", "ok"]


def test_weight_offloading_is_not_taken_for_kv_offloading() -> None:
    assert levels(findings.check_offloading_flags(Flags([]))) == ["ok"]
    (found,) = findings.check_offloading_flags(Flags(["--cpu-offload-gb", "4"]))
    assert "nothing to do with the KV cache" in found.found
    size = Flags(["--kv-offloading-size", "4"])
    assert levels(findings.check_offloading_flags(size)) == ["fail"]
    assert levels(findings.check_offloading_flags(size, by_spec=True)) == ["warn"]


def test_the_reset_that_reaches_the_tiers_is_named() -> None:
    assert "reset_external=true" in findings.check_reset({}).do
    assert "VLLM_SERVER_DEV_MODE=1" in findings.check_reset({}).found
    assert "VLLM_SERVER_DEV_MODE" not in findings.check_reset({"VLLM_SERVER_DEV_MODE": "1"}).found


def transfer(connector: str = "EmberConnector", **extra: object) -> str:
    keys = SPEC_KEYS | {"cpu_bytes_to_use": GIB, "offload_prompt_only": False} | extra
    config = {"kv_connector": connector, "kv_role": "kv_both", "kv_connector_extra_config": keys}
    if connector == "EmberConnector":
        config["kv_connector_module_path"] = "emberkv.engines.vllm.connector"
    return json.dumps(config)


@pytest.mark.parametrize("connector", ["EmberConnector", "OffloadingConnector"])
def test_a_sound_configuration_is_read(connector: str) -> None:
    found, config = findings.read_transfer_config(transfer(connector))
    assert levels(found) == ["ok"]
    assert config is not None
    assert config.ram_bytes == GIB


@pytest.mark.parametrize(
    ("text", "level", "message"),
    [
        (transfer(eviction_polcy="lru"), "fail", "did you mean 'eviction_policy'"),
        (transfer(offload_prompt_only=True), "warn", "answers are not kept"),
        (transfer("LMCacheConnectorV1"), "fail", "not emberkv's"),
        (transfer(spec_module_path="emberkv"), "fail", "spec_module_path is 'emberkv'"),
        (transfer().replace("kv_both", "kv_producer"), "fail", "kv_role is 'kv_producer'"),
        (transfer().replace("vllm.connector", "connector"), "fail", "kv_connector_module_path"),
        (transfer(cpu_bytes_to_use=float("nan")), "fail", "cpu_bytes_to_use must be a whole"),
        (transfer(cpu_bytes_to_use=float("inf")), "fail", "cpu_bytes_to_use must be a whole"),
        (transfer(keep_s=float("inf")), "fail", "keep_s must be a number of seconds"),
        (transfer(instance="a b"), "fail", "instance must be 1 to 64 letters"),
        (transfer(secondary_tiers=[{"type": "fs", "root_dir": "a\0b"}]), "fail", "root_dir of a"),
        ("[]", "fail", "no object kv_connector_extra_config"),
    ],
)
def test_a_configuration_that_leads_elsewhere_is_told(text: str, level: str, message: str) -> None:
    found, _ = findings.read_transfer_config(text)
    (told,) = (finding for finding in found if message in finding.found)
    assert told.level == level
