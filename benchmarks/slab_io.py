"""Slab write and read, checksums included, against fio with the same size, depth and direct I/O.

Both sides move as many bytes in the same file, in requests of equal size, one at a time per
thread, each thread a fixed share, to and from memory of one kind. The slab joins consecutive slots,
so fio's block is the joined run; "scattered" has hardly any consecutive slots, and fio's block is
one chunk. Sides are interleaved, who goes first alternates, and the ratio is that of the medians.

Also the time to open a full slab of 100,000 chunks and list its entries.
"""

from __future__ import annotations

import argparse
import json
import mmap
import random
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import report
import xxhash

from emberkv.domain.types import ChunkKey, Outcome, Slot
from emberkv.tiers.base import Record
from emberkv.tiers.format import DATA_FILE, SlabGeometry, SlotRecord, StoredNamespace
from emberkv.tiers.payload_file import RUN_BYTES
from emberkv.tiers.slab import Slab
from emberkv.tiers.slab_directory import SlabDirectory

KIB = 1 << 10
MIB = 1 << 20
SIZES = {"128KiB": 128 * KIB, "128KiB-scattered": 128 * KIB, "1MiB": MIB, "4MiB": 4 * MIB}
GOAL_RATIO = 0.85
REST_S = 1.0  # before each measurement: what the device still does of the last one is not charged
GOAL_OPEN_S = 5.0
FULL_SLAB_CHUNKS = 100_000
NAMESPACE = StoredNamespace(b"slab-io benchmark", {"purpose": "benchmark"})


@dataclass(frozen=True)
class Plan:
    """What one measurement moves."""

    directory: Path
    chunk_bytes: int
    total_bytes: int
    threads: int
    batch_bytes: int
    scattered: bool

    @property
    def chunks(self) -> int:
        return self.total_bytes // self.chunk_bytes

    @property
    def batch_chunks(self) -> int:
        return max(1, self.batch_bytes // self.chunk_bytes)

    @property
    def request_bytes(self) -> int:
        """What the slab sends to the device in one system call: a run of consecutive slots."""
        together = 1 if self.scattered else max(1, RUN_BYTES // self.chunk_bytes)
        return self.chunk_bytes * min(together, self.batch_chunks)


class SlabSide:
    """A slab, moved from and to page-aligned memory that is new for every run, as fio's is."""

    def __init__(self, plan: Plan) -> None:
        size_bytes = SlabGeometry(plan.chunks, plan.chunk_bytes).total_bytes
        self._plan = plan
        self.slab: Slab = SlabDirectory(plan.directory, size_bytes).open_slab(
            NAMESPACE, plan.chunk_bytes
        )

    def write(self) -> float:
        """Write every slot once; bytes per second, making the checksums included."""

        def batch(rows: list[memoryview], slots: Sequence[int]) -> None:
            records = [
                Record(key_of(slot), None, Slot(slot), xxhash.xxh3_64_intdigest(row))
                for slot, row in zip(slots, rows, strict=False)
            ]
            outcomes = self.slab.write(records, rows[: len(records)])
            if any(outcome is not Outcome.OK for outcome in outcomes):
                raise SystemExit(f"the slab refused: {set(outcomes)}")

        return self._run(batch)

    def read(self) -> float:
        """Read every slot once; bytes per second, comparing the checksums included."""

        def batch(rows: list[memoryview], slots: Sequence[int]) -> None:
            records = [Record(key_of(slot), None, Slot(slot)) for slot in slots]
            outcomes = self.slab.read(records, rows[: len(records)])
            if any(outcome is not Outcome.OK for outcome in outcomes):
                raise SystemExit(f"the slab refused: {set(outcomes)}")

        return self._run(batch)

    def _run(self, batch: Callable[[list[memoryview], Sequence[int]], None]) -> float:
        plan = self._plan
        step = plan.request_bytes // plan.chunk_bytes
        runs = [range(at, min(at + step, plan.chunks)) for at in range(0, plan.chunks, step)]
        random.Random(2).shuffle(runs)
        slots = [slot for run in runs for slot in run]
        batches = [
            slots[at : at + plan.batch_chunks] for at in range(0, plan.chunks, plan.batch_chunks)
        ]
        arena = memoryview(mmap.mmap(-1, plan.threads * plan.batch_chunks * plan.chunk_bytes))
        arena[:] = random.Random(1).randbytes(len(arena))

        def thread(nth: int) -> None:
            first = nth * plan.batch_chunks
            rows = [
                arena[at * plan.chunk_bytes : (at + 1) * plan.chunk_bytes]
                for at in range(first, first + plan.batch_chunks)
            ]
            for taken in batches[nth :: plan.threads]:  # a fixed share, as fio's threads have
                batch(rows, taken)

        with ThreadPoolExecutor(plan.threads) as pool:
            began_s = time.perf_counter()
            done = [pool.submit(thread, nth) for nth in range(plan.threads)]
            for each in done:
                each.result()
            return plan.chunks * plan.chunk_bytes / (time.perf_counter() - began_s)


def key_of(slot: int) -> ChunkKey:
    """A distinct key of 32 bytes."""
    return ChunkKey(slot.to_bytes(8, "big") * 4)


def fio(plan: Plan, operation: str) -> float:
    """Bytes per second that fio reaches with as many threads and bytes, in equal requests."""
    share_bytes = plan.total_bytes // plan.threads
    slab_data = plan.directory / NAMESPACE.directory_name / DATA_FILE
    words = [
        "fio", "--name=floor", f"--filename={slab_data}", "--direct=1",
        f"--rw=rand{operation}", f"--bs={plan.request_bytes}", "--ioengine=psync", "--thread",
        f"--numjobs={plan.threads}", f"--size={share_bytes}", f"--offset_increment={share_bytes}",
        "--group_reporting", "--output-format=json", "--allow_file_create=0",
        "--randseed=3", "--end_fsync=0", "--mem=shm", "--scramble_buffers=0",
    ]  # fmt: skip
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    rate: float = json.loads(done.stdout)["jobs"][0][operation]["bw_bytes"]
    return rate


def measure(plan: Plan, repeats: int) -> dict[str, dict[str, list[float]]]:
    """GB/s of both sides, by operation, interleaved; the first round only lays out the files."""
    side = SlabSide(plan)
    if not side.slab.direct_io:
        raise SystemExit(f"{plan.directory} has no direct I/O: nothing to compare")
    rates: dict[str, dict[str, list[float]]] = {}
    try:
        for turn in range(repeats + 1):
            for operation, ours in (("write", side.write), ("read", side.read)):
                both = {"slab": ours, "fio": lambda word=operation: fio(plan, word)}
                if operation == "read":
                    side.write()  # not counted: what fio wrote last has no checksums
                order = list(both) if turn % 2 else list(reversed(both))
                for name in order:
                    time.sleep(REST_S)
                    rate = both[name]() / 1e9
                    if turn:
                        rates.setdefault(operation, {}).setdefault(name, []).append(round(rate, 3))
    finally:
        side.slab.close()
    return rates


def measure_open(directory: Path, chunks: int, repeats: int) -> list[float]:
    """Seconds to open a full slab of `chunks` chunks and list them."""
    size_bytes = SlabGeometry(chunks, 4 * KIB).total_bytes
    slabs = SlabDirectory(directory, size_bytes)
    slabs.open_slab(NAMESPACE, 4 * KIB).close()
    rows = b"".join(
        SlotRecord(key_of(slot), key_of(slot - 1) if slot else None, slot, 1, slot, 0).encode()
        for slot in range(chunks)
    )
    with (directory / NAMESPACE.directory_name / "slab.index").open("r+b") as index:
        index.seek(4096)
        index.write(rows)
    seconds: list[float] = []
    for _ in range(repeats):
        began_s = time.perf_counter()
        slab = slabs.open_slab(NAMESPACE, 4 * KIB)
        found = sum(1 for _ in slab.entries())
        seconds.append(round(time.perf_counter() - began_s, 4))
        slab.close()
        if found != chunks:
            raise SystemExit(f"{found} entries instead of {chunks}")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--directory", type=Path, help="on the disk to measure (default: a new one)"
    )
    parser.add_argument("--total-mib", type=int, default=1024, help="bytes per measurement")
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--batch-kib", type=int, default=1024, help="bytes per call of a thread")
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    if shutil.which("fio") is None:
        raise SystemExit("fio is not installed; install it first (Debian: apt-get install fio)")
    with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="slab-io-") as made:
        for name, chunk_bytes in SIZES.items():
            directory = Path(made) / name
            directory.mkdir()
            plan = Plan(
                directory,
                chunk_bytes,
                arguments.total_mib * MIB,
                arguments.threads,
                arguments.batch_kib * KIB,
                name.endswith("scattered"),
            )
            for operation, rates in measure(plan, arguments.repeats).items():
                medians = {side: statistics.median(each) for side, each in rates.items()}
                ratio = medians["slab"] / medians["fio"]
                print(f"  {operation} {name}: GB/s {medians}")
                report.write(
                    f"slab-{operation}-{name}",
                    ratio,
                    f"x of fio in requests of {plan.request_bytes >> 10} KiB",
                    f">= {GOAL_RATIO}",
                    met=ratio >= GOAL_RATIO,
                    samples=rates,
                )
            shutil.rmtree(directory)
        seconds = measure_open(Path(made), FULL_SLAB_CHUNKS, arguments.repeats)
    median_s = statistics.median(seconds)
    report.write(
        "slab-open-100000-chunks",
        median_s,
        "s",
        f"<= {GOAL_OPEN_S:.0f}",
        met=median_s <= GOAL_OPEN_S,
        samples=seconds,
    )


if __name__ == "__main__":
    main()
