"""Facts of this machine that decide what fits: memory, control groups, shared memory, disk.

Everything is read from files whose place is an argument, so that tests can bring a machine along.
"""

from __future__ import annotations

import os
import resource
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from emberkv.errors import StorageError, UsageError

PROC: Final = Path("/proc")
CGROUPS: Final = Path("/sys/fs/cgroup")
SHM: Final = Path("/dev/shm")
ENGINE_PROCESS_NAME: Final = "VLLM::EngineCor"  # the kernel keeps 15 letters


@dataclass(frozen=True, slots=True)
class Machine:
    """Memory of the machine, as far as this process may have it."""

    ram_bytes: int
    ram_limit: str  # what sets it, for messages
    available_bytes: int
    shm_bytes: int | None
    locked_bytes: int | None  # None: no limit


def this_machine(proc: Path = PROC, cgroups: Path = CGROUPS, shm: Path = SHM) -> Machine:
    """What this process sees. Raises `UsageError` where there is no Linux `/proc`."""
    from emberkv.live.keeper.host_memory import available_bytes

    total_bytes = _total_bytes(proc)
    limits = [(total_bytes, "this machine's RAM"), *_group_limits(proc, cgroups)]
    ram_bytes, ram_limit = min(limits, key=lambda limit: limit[0])
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    left_bytes = available_bytes(proc, cgroups)
    return Machine(
        ram_bytes=ram_bytes,
        ram_limit=ram_limit,
        available_bytes=ram_bytes if left_bytes is None else min(left_bytes, ram_bytes),
        shm_bytes=_size_of_file_system(shm),
        locked_bytes=None if soft_limit == resource.RLIM_INFINITY else soft_limit,
    )


def _total_bytes(proc: Path) -> int:
    for line in _text(proc / "meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == "MemTotal":
            return int(value.split()[0]) << 10
    raise UsageError(f"{proc / 'meminfo'} does not tell this machine's RAM; emberkv needs Linux")


def _group_limits(proc: Path, cgroups: Path) -> list[tuple[int, str]]:
    """The limit of each control group from ours up to the root, of version 1 or 2."""
    found: list[tuple[int, str]] = []
    for line in _text(proc / "self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            roots, name = [cgroups, cgroups / "unified"], "memory.max"
        elif "memory" in controllers.split(","):
            roots, name = [cgroups / "memory"], "memory.limit_in_bytes"
        else:
            continue
        for root in roots:
            group = root / path.lstrip("/")
            for place in (group, *group.parents):
                if not place.is_relative_to(root):
                    break
                limit = _text(place / name).strip()
                if limit.isdigit():
                    found.append((int(limit), f"the memory limit of control group {path}"))
    return found


def is_orphaned_engine(pid: int, proc: Path = PROC) -> bool:
    """Whether a process is a vLLM engine whose server has died and left it to the system."""
    name, _, facts = _text(proc / str(pid) / "stat").rpartition(") ")
    is_engine = name.partition("(")[2].startswith(ENGINE_PROCESS_NAME)
    if not is_engine or facts.split()[1:2] != ["1"]:
        return False
    # In a container the server itself may be process 1.
    return "vllm" not in _text(proc / "1/cmdline").lower()


def _size_of_file_system(path: Path) -> int | None:
    try:
        status = os.statvfs(path)
    except OSError:
        return None
    return status.f_blocks * status.f_frsize


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class DiskSpace:
    """A directory for the disk tier: what is free there, and what emberkv has there already."""

    directory: Path
    free_bytes: int
    slabs_bytes: int


def disk_space(directory: Path) -> DiskSpace:
    """Look at a directory. Raises `ConfigError` or `StorageError`."""
    from emberkv.tiers.slab_directory import describe_slabs, require_directory

    require_directory(directory)
    try:
        status = os.statvfs(directory)
    except OSError as error:
        raise StorageError(f"can't look at {directory}: {error.strerror}") from error
    slabs_bytes = sum(slab.size_bytes for slab in describe_slabs(directory))
    return DiskSpace(directory, status.f_bavail * status.f_frsize, slabs_bytes)


def require_writable(directory: Path) -> None:
    """Raise `UsageError` if this process can't make files in a directory."""
    if not os.access(directory, os.W_OK | os.X_OK):
        raise UsageError(
            f"can't write in {directory}: make it writable for this user, or name another"
        )


def require_log_file(path: Path) -> None:
    """Raise `UsageError` if a file can't be made or written at a path."""
    if path.is_dir():
        raise UsageError(f"--request-log {path} is a directory; name a file in it")
    if not path.parent.is_dir():
        raise UsageError(f"--request-log {path}: {path.parent} is no directory; create it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"--request-log {path} can't be written by this user; name another file")


def direct_io_works(directory: Path) -> bool:
    """Write and read a block around the page cache, in a directory made and removed for it.

    Raises `StorageError` if nothing can be written there.
    """
    from emberkv.tiers.block_io import supports_direct_io

    try:
        with tempfile.TemporaryDirectory(prefix=".emberkv-probe-", dir=directory) as place:
            directory_fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                return supports_direct_io(directory_fd)
            finally:
                os.close(directory_fd)
    except OSError as error:
        raise StorageError(f"can't write in {directory}: {error.strerror}") from error
