"""How much memory this process may still take: the machine's, and its control groups'."""

from __future__ import annotations

from pathlib import Path
from typing import Final

PROC: Final = Path("/proc")
CGROUPS: Final = Path("/sys/fs/cgroup")


def available_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """The least of what the machine and each control group above us have left; None if unknown.

    Cached file pages count as available, since the kernel gives them up.
    """
    limits = [_machine(proc), *_groups(proc, cgroups)]
    known = [limit for limit in limits if limit is not None]
    return max(0, min(known)) if known else None


def _machine(proc: Path) -> int | None:
    for line in _text(proc / "meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) << 10
    return None


def _groups(proc: Path, cgroups: Path) -> list[int | None]:
    """What each group from ours up to the root has left (version 2, or version 1's memory tree)."""
    left: list[int | None] = []
    for line in _text(proc / "self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            root, names = cgroups, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root = cgroups / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        group = root / path.lstrip("/")
        while group != root.parent:
            left.append(_left_in(group, *names))
            group = group.parent
    return left


def _left_in(group: Path, limit_name: str, usage_name: str) -> int | None:
    limit, usage = _text(group / limit_name).strip(), _text(group / usage_name).strip()
    if not limit.isdigit() or not usage.isdigit():
        return None  # no limit
    reclaimable = 0
    for line in _text(group / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "active_file"):
            reclaimable += int(value)
    return int(limit) - int(usage) + reclaimable


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
