"""Whether what was asked for fits this machine; if not, which number is too large and what fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from emberkv.app.machine import DiskSpace, Machine
from emberkv.domain.units import format_size, size_argument
from emberkv.engines.vllm.command_line import KV_SPACE_VARIABLE, Need
from emberkv.errors import UsageError

DEFAULT_RESERVE_SHARE: Final = 0.10


def default_reserve_bytes(machine: Machine) -> int:
    """What is left to the operating system, the page cache and neighbours unless told otherwise."""
    return int(machine.ram_bytes * DEFAULT_RESERVE_SHARE)


@dataclass(frozen=True, slots=True)
class RamPlan:
    """Who gets how much of the machine's memory."""

    tier_bytes: int
    reserve_bytes: int
    needs: tuple[Need, ...]
    machine: Machine

    @property
    def engine_bytes(self) -> int:
        return sum(need.size_bytes for need in self.needs)

    @property
    def most_bytes(self) -> int:
        """The largest tier that fits; may be negative."""
        return self.machine.ram_bytes - self.engine_bytes - self.reserve_bytes

    def require_fit(self) -> None:
        """Raise `UsageError` naming what is too large and what fits."""
        if self.tier_bytes <= self.most_bytes:
            return
        takes = f", the engine takes {_sum(self.needs)}" if self.needs else ""
        shares = (
            f"{self.machine.ram_limit} is {format_size(self.machine.ram_bytes)}{takes}, and "
            f"--reserve keeps {format_size(self.reserve_bytes)}"
        )
        if self.most_bytes > 0:
            raise UsageError(
                f"--ram {size_argument(self.tier_bytes)} is too large: {shares}; "
                f"at most --ram {size_argument(self.most_bytes)} fits"
            )
        largest = max(self.needs, key=lambda need: need.size_bytes, default=None)
        cure = "make --reserve smaller"
        if largest is not None and largest.size_bytes > self.reserve_bytes:
            cure = f"make room: {_cure(largest)}"
        raise UsageError(f"no --ram fits: {shares}; {cure}")


def _sum(needs: Sequence[Need]) -> str:
    total = format_size(sum(need.size_bytes for need in needs))
    parts = " + ".join(f"{need.purpose} {format_size(need.size_bytes)}" for need in needs)
    return f"{total} ({parts})"


def _cure(need: Need) -> str:
    if "--gpu-memory-utilization" in need.purpose:
        return (
            f"set {KV_SPACE_VARIABLE} to the GiB that vLLM's own cache needs, or pass "
            "--gpu-memory-utilization 0.4 after --"
        )
    return f"less for {need.purpose}"


def require_disk_fit(size_bytes: int, space: DiskSpace) -> None:
    """Raise `UsageError` if a disk tier of a size does not fit into its file system."""
    most_bytes = space.free_bytes + space.slabs_bytes
    if size_bytes <= most_bytes:
        return
    held = ""
    if space.slabs_bytes:
        held = f" and {format_size(space.slabs_bytes)} in emberkv's own slabs"
    raise UsageError(
        f"--disk-size {size_argument(size_bytes)} is too large: {space.directory} has "
        f"{format_size(space.free_bytes)} free{held}; "
        f"at most --disk-size {size_argument(most_bytes)} fits"
    )


def require_chunk_fits(option: str, size_bytes: int, needed_bytes: int, chunk_tokens: int) -> None:
    """Raise `UsageError` if a tier is smaller than the least that holds one chunk."""
    if size_bytes < needed_bytes:
        raise UsageError(
            f"{option} {size_argument(size_bytes)} is smaller than one chunk of {chunk_tokens} "
            f"tokens, which takes {size_argument(needed_bytes)} with its header; make it larger, "
            "or chunks smaller"
        )
