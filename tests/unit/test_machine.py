"""What a machine has, read from files of a machine that a test brings along."""

from __future__ import annotations

from pathlib import Path

import pytest

from emberkv.app.machine import (
    Machine,
    direct_io_works,
    disk_space,
    is_orphaned_engine,
    this_machine,
)
from emberkv.errors import ConfigError, StorageError, UsageError

GIB = 1 << 30


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A machine of 64 GiB, in no control group."""
    place = tmp_path / "proc"
    (place / "self").mkdir(parents=True)
    (place / "meminfo").write_text(
        f"MemTotal: {64 << 20} kB\nMemFree: 1 kB\nMemAvailable: {40 << 20} kB\n"
    )
    (place / "self/cgroup").write_text("")
    return place


@pytest.fixture
def groups(tmp_path: Path) -> Path:
    place = tmp_path / "cgroup"
    place.mkdir()
    return place


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_without_control_groups_the_machine_is_the_limit(proc: Path, groups: Path) -> None:
    machine = this_machine(proc, groups)
    assert machine.ram_bytes == 64 * GIB
    assert machine.ram_limit == "this machine's RAM"
    assert machine.available_bytes == 40 * GIB


def test_a_limit_of_any_group_above_counts(proc: Path, groups: Path) -> None:
    (proc / "self/cgroup").write_text("0::/kube/pod/box\n")
    write(groups / "kube/pod/box/memory.max", "max\n")
    write(groups / "kube/pod/memory.max", f"{16 * GIB}\n")
    write(groups / "kube/memory.max", f"{32 * GIB}\n")
    machine = this_machine(proc, groups)
    assert machine.ram_bytes == 16 * GIB
    assert "control group /kube/pod/box" in machine.ram_limit
    assert machine.available_bytes <= 16 * GIB


def test_the_older_kind_of_control_group_counts(proc: Path, groups: Path) -> None:
    (proc / "self/cgroup").write_text("4:cpu,memory:/box\n1:name=systemd:/box\n0::/\n")
    write(groups / "memory/box/memory.limit_in_bytes", f"{8 * GIB}\n")
    write(groups / "memory/memory.limit_in_bytes", "9223372036854771712\n")
    assert this_machine(proc, groups).ram_bytes == 8 * GIB


def test_the_size_of_shared_memory_is_told_or_unknown(proc: Path, groups: Path) -> None:
    assert (this_machine(proc, groups, shm=proc).shm_bytes or 0) > 0
    assert this_machine(proc, groups, shm=proc / "absent").shm_bytes is None


def test_a_machine_without_proc_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="needs Linux"):
        this_machine(tmp_path / "absent", tmp_path)


@pytest.mark.parametrize(
    ("name", "parent", "first_process", "orphaned"),
    [
        ("VLLM::EngineCor", 1, "/sbin/init", True),
        ("VLLM::EngineCor", 900, "/sbin/init", False),
        ("VLLM::EngineCor", 1, "python\0-m\0vllm.entrypoints.openai.api_server", False),
        ("a (strange) one", 1, "/sbin/init", False),
    ],
)
def test_an_engine_left_to_the_system_is_told_from_one_with_a_server(
    proc: Path, name: str, parent: int, first_process: str, orphaned: bool
) -> None:
    write(proc / "77/stat", f"77 ({name}) S {parent} 77 77 0\n")
    write(proc / "1/cmdline", first_process)
    assert is_orphaned_engine(77, proc) is orphaned
    assert not is_orphaned_engine(78, proc)


def test_this_very_machine_can_be_read() -> None:
    machine = this_machine()
    assert isinstance(machine, Machine)
    assert 0 < machine.available_bytes <= machine.ram_bytes


def test_the_space_of_a_directory_is_told(tmp_path: Path) -> None:
    space = disk_space(tmp_path)
    assert space.free_bytes > 0
    assert space.slabs_bytes == 0
    with pytest.raises(ConfigError, match="does not exist"):
        disk_space(tmp_path / "absent")


def test_probing_direct_io_leaves_nothing_and_touches_no_file_of_others(tmp_path: Path) -> None:
    (tmp_path / "probe").write_text("the user's")
    direct_io_works(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["probe"]
    assert (tmp_path / "probe").read_text() == "the user's"


def test_a_directory_that_can_not_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="can't write in"):
        direct_io_works(tmp_path / "absent")
