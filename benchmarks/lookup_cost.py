"""What a look-up costs: time in our calls per chunk that hits, and start-up with a full slab.

The first is measured through vLLM's manager interface as its connector calls it: one pass over a
chain of ready chunks, `lookup` per chunk. The second is the time from asking a keeper for the
tiers to the manager knowing every chunk of a full slab of 100,000, the scan included.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import report
from support.chains import arrive, chain_of, end_step, look_up, store
from support.slabs import fill_index
from support.tiers import (
    DiskTierPlan,
    freeze_heap,
    keeper,
    manager_over,
    resident_counts,
    step_until,
)
from support.timing import rounded

from emberkv.domain.types import DISK
from emberkv.live.arena import ArenaGeometry
from emberkv.testing.driver import InlineDriver

CHUNK_BYTES = 4096
GOAL_LOOKUP_US = 2.0
GOAL_START_S = 5.0


def measure_lookup(chunks: int, rounds: int) -> list[float]:
    """Microseconds per chunk of a chain that is all in RAM."""
    driver = InlineDriver(ArenaGeometry(chunks + 8, CHUNK_BYTES))
    manager = manager_over(driver, CHUNK_BYTES)
    end_step(manager)
    keys = chain_of("hit", chunks)
    store(manager, "writer", keys)
    context = arrive(manager, "reader", keys)
    found: list[float] = []
    for _ in range(rounds):
        began_s = time.perf_counter()
        hits = look_up(manager, keys, context)
        found.append((time.perf_counter() - began_s) / chunks * 1e6)
        end_step(manager)
        if hits != chunks:
            raise SystemExit(f"{hits} chunks hit instead of {chunks}")
    return found


def measure_start(chunks: int, rounds: int) -> list[float]:
    """Seconds until a manager knows a full slab, with a new keeper each time."""
    found: list[float] = []
    with tempfile.TemporaryDirectory(prefix="lookup-cost-") as made:
        plan = DiskTierPlan(Path(made), chunks)
        with keeper(64, CHUNK_BYTES, plan) as client:
            slots = client.slot_counts[DISK]
        fill_index(Path(made), CHUNK_BYTES, slots)
        for _ in range(rounds):
            began_s = time.perf_counter()
            with keeper(64, CHUNK_BYTES, plan) as client:
                manager = manager_over(client, CHUNK_BYTES)
                step_until(manager, lambda: resident_counts(manager)[DISK] == slots)  # noqa: B023
                found.append(time.perf_counter() - began_s)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=51)
    parser.add_argument("--starts", type=int, default=7)
    arguments = parser.parse_args()
    freeze_heap()
    by_length = {
        f"{chunks} chunks us": measure_lookup(chunks, arguments.rounds)
        for chunks in (128, 3125, 12500)
    }
    medians = {name: statistics.median(each) for name, each in by_length.items()}
    print(f"  microseconds per chunk: {medians}")
    worst_us = max(medians.values())
    report.write(
        "lookup-hit-per-chunk",
        worst_us,
        "us per chunk, the worst of three lengths",
        f"<= {GOAL_LOOKUP_US:.0f}",
        met=worst_us <= GOAL_LOOKUP_US,
        samples=rounded(by_length, 4),
    )
    starts = measure_start(100_000, arguments.starts)
    start_s = statistics.median(starts)
    report.write(
        "start-with-100000-chunks",
        start_s,
        "s from asking for a keeper to every chunk known",
        f"<= {GOAL_START_S:.0f}",
        met=start_s <= GOAL_START_S,
        samples=[round(each, 4) for each in starts],
    )


if __name__ == "__main__":
    main()
