"""How much memory is left, from the files that say so."""

from __future__ import annotations

from pathlib import Path

import pytest

from emberkv.live.keeper.host_memory import available_bytes

GIB = 1 << 30


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """A machine with 10 GiB available and no control group."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "groups").mkdir()
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {10 << 20} kB\n")
    return tmp_path


def left(host: Path) -> int | None:
    return available_bytes(host / "proc", host / "groups")


def group(host: Path, path: str, **files: object) -> None:
    directory = host / "groups" / path
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (directory / name.replace("__", ".")).write_text(f"{content}\n")


def test_without_groups_it_is_what_the_machine_has(host: Path) -> None:
    assert left(host) == 10 * GIB


def test_the_tightest_group_above_us_counts(host: Path) -> None:
    (host / "proc/self/cgroup").write_text("0::/outer/inner\n")
    group(host, "outer", memory__max=4 * GIB, memory__current=GIB)
    group(host, "outer/inner", memory__max="max", memory__current=GIB)
    assert left(host) == 3 * GIB


def test_cached_files_of_a_group_can_be_given_up(host: Path) -> None:
    (host / "proc/self/cgroup").write_text("0::/g\n")
    stat = f"anon {GIB}\ninactive_file {GIB // 2}\nactive_file {GIB // 2}"
    group(host, "g", memory__max=4 * GIB, memory__current=2 * GIB, memory__stat=stat)
    assert left(host) == 3 * GIB


def test_version_1_of_control_groups_counts_too(host: Path) -> None:
    (host / "proc/self/cgroup").write_text("9:name=systemd:/\n4:memory:/g\n0::/\n")
    files = {"memory__limit_in_bytes": 2 * GIB, "memory__usage_in_bytes": GIB}
    group(host, "memory/g", **files)
    assert left(host) == GIB


def test_a_group_that_is_over_its_limit_leaves_nothing(host: Path) -> None:
    (host / "proc/self/cgroup").write_text("0::/g\n")
    group(host, "g", memory__max=GIB, memory__current=2 * GIB)
    assert left(host) == 0


def test_where_nothing_is_said_nothing_is_known(tmp_path: Path) -> None:
    assert available_bytes(tmp_path, tmp_path) is None
