"""Promotion from disk without an engine: our slab against vLLM's own file tier.

Both sides are asked through vLLM's manager interface, as its connector asks, by a thread that asks
again at once: the time is from the first look-up of the chain to the pass in which all of it hits.
Both read with direct I/O from the same file system into RAM that is there already, each round with
a new keeper, or manager, whose RAM tier is empty. Ours verifies every chunk's checksum; vLLM's has
none. Twice: 2,048 chunks of 128 KiB, and a 4,096-token document of SmolLM2-135M in float32, which
is 128 chunks of 32 tokens. Beside them fio reads as many bytes in blocks of a chunk, which says how
much faster than vLLM's tier anything could be on this disk.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import report
from support.chains import arrive, chain_of, end_step, look_up, store
from support.floors import FioFloor
from support.native_tier import native_manager
from support.tiers import (
    DiskTierPlan,
    is_usable,
    keeper,
    manager_over,
    resident_counts,
    step_until,
)
from support.timing import interleave, ratio_of_medians, rounded
from vllm.v1.kv_offload.base import OffloadingManager, OffloadKey

from emberkv.domain.types import DISK

DEADLINE_S = 120.0
REST_S = 1.0  # before each promotion: what a disk still owes for the last one is not charged


@dataclass(frozen=True)
class Case:
    """One promotion, and by how much it is to be faster."""

    claim: str
    chunks: int
    chunk_bytes: int
    goal: float


CASES = (
    Case("promotion-2048x128KiB", 2048, 128 << 10, 3.0),
    Case("promotion-32-token-chunks", 128, 30 * (48 << 10), 1.2),
)


def promotion_s(manager: OffloadingManager, keys: Sequence[OffloadKey], name: str) -> float:
    """Seconds from the first look-up of a chain to its hit."""
    context = arrive(manager, name, keys)
    began_s = time.perf_counter()
    while (hits := look_up(manager, keys, context)) is None:
        end_step(manager)
        if time.perf_counter() - began_s > DEADLINE_S:
            raise SystemExit(f"{name}: no hit within {DEADLINE_S:.0f} s")
    took_s = time.perf_counter() - began_s
    end_step(manager)
    if hits != len(keys):
        raise SystemExit(f"{name}: {hits} chunks hit instead of {len(keys)}")
    return took_s


class Sides:
    """The two tiers, filled with the same chain; each call promotes it once."""

    def __init__(self, case: Case, directory: Path) -> None:
        self._case = case
        self._ram_chunks = case.chunks + 64
        self._keys = chain_of(case.claim, case.chunks)
        self._native_dir = directory / "native"
        self._native_dir.mkdir()
        ours = directory / "slab"
        ours.mkdir()
        self._disk = DiskTierPlan(ours, case.chunks)
        self._fill_ours()
        self._fill_native()

    def _fill_ours(self) -> None:
        with keeper(self._ram_chunks, self._case.chunk_bytes, self._disk) as client:
            manager = manager_over(client, self._case.chunk_bytes)
            step_until(manager, lambda: is_usable(manager))
            for slot in range(self._case.chunks):
                row = client.arena.row(slot)
                row[:8] = slot.to_bytes(8, "little")
                row.release()
            store(manager, "writer", self._keys)
            step_until(manager, lambda: not manager.tiers.stack.transfers.under_way(DISK))
            if resident_counts(manager)[DISK] != self._case.chunks:
                raise SystemExit("the slab did not take the chain in")

    def _fill_native(self) -> None:
        with self._native() as manager:
            store(manager, "writer", self._keys)
            deadline_s = time.monotonic() + DEADLINE_S
            while manager._transfer_jobs and time.monotonic() < deadline_s:
                time.sleep(0.01)
                end_step(manager)
        files = sum(1 for _ in self._native_dir.rglob("*.bin"))
        if files != self._case.chunks:
            raise SystemExit(f"vLLM's file tier wrote {files} files instead of {self._case.chunks}")

    def _native(self) -> AbstractContextManager[OffloadingManager]:
        return native_manager(self._ram_chunks, self._case.chunk_bytes, self._native_dir)

    def ours(self) -> float:
        with keeper(self._ram_chunks, self._case.chunk_bytes, self._disk) as client:
            manager = manager_over(client, self._case.chunk_bytes)
            on_disk = self._case.chunks
            step_until(
                manager,
                lambda: is_usable(manager) and resident_counts(manager)[DISK] == on_disk,
            )
            return promotion_s(manager, self._keys, "emberkv")

    def native(self) -> float:
        with self._native() as manager:
            end_step(manager)
            return promotion_s(manager, self._keys, "native")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--directory", type=Path, help="on the disk to measure (default: a new one)"
    )
    arguments = parser.parse_args()
    for case in CASES:
        with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="promotion-") as made:
            sides = Sides(case, Path(made))
            fio = FioFloor(Path(made), case.chunks, case.chunk_bytes)
            seconds = interleave(
                {"emberkv s": sides.ours, "native s": sides.native, "fio s": fio.measure_s},
                arguments.rounds,
                rest_s=REST_S,
            )
        mib = case.chunks * case.chunk_bytes / (1 << 20)
        for side, each in seconds.items():
            median_s = statistics.median(each)
            print(f"  {case.claim} {side}: {median_s:.3f}, {mib / median_s:.0f} MiB/s")
        ratio = ratio_of_medians(seconds["native s"], seconds["emberkv s"])
        most = ratio_of_medians(seconds["native s"], seconds["fio s"])
        report.write(
            case.claim,
            ratio,
            f"x faster than vLLM's file tier, first look-up to hit; fio alone {most:.2f} x",
            f">= {case.goal:g}",
            met=ratio >= case.goal,
            samples=rounded(seconds, 4),
        )


if __name__ == "__main__":
    main()
