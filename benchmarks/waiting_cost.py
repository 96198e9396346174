"""Time in our calls per engine step while a long request waits for its promotion.

Once with copies held back, so that every step is a waiting one, for prompts of 10k to 400k tokens:
it must not grow with the length. Once through a keeper that reads the chain from a slab, where the
steps also take in the chunks as they arrive. A step is the look-ups of one pass, `on_schedule_end`
and `get_stats`, called as vLLM's connector calls them.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import report
from support.chains import arrive, chain_of, end_step, look_up, store
from support.tiers import (
    DiskTierPlan,
    freeze_heap,
    is_usable,
    keeper,
    manager_over,
    resident_counts,
    step_until,
)
from support.timing import percentile, rounded

from emberkv.domain.types import DISK, ChunkKey, Slot
from emberkv.engines.vllm.manager import EmberOffloadingManager
from emberkv.live.arena import ArenaGeometry
from emberkv.testing.driver import InlineDriver
from emberkv.tiers.base import Record
from emberkv.tiers.memory import MemoryStorage

CHUNK_BYTES = 4096
KEEPER_CHUNK_BYTES = 256 << 10
GOAL_MS = 0.2
GOAL_GROWTH = 1.5
LENGTHS = {
    "10k tokens, 32 a chunk": 313,
    "100k tokens, 32 a chunk": 3125,
    "100k tokens, 16 a chunk": 6250,
    "400k tokens, 32 a chunk": 12500,
}


def milliseconds_of_step(manager: EmberOffloadingManager, keys: list, context: object) -> float:
    """One step of the engine in which the request is asked for and does not start."""
    began_s = time.perf_counter()
    look_up(manager, keys, context)
    end_step(manager)
    return (time.perf_counter() - began_s) * 1e3


def measure_held_back(chunks: int, steps: int) -> tuple[float, list[float]]:
    """Milliseconds of the first step, which collects the chain, and of each waiting step."""
    below = MemoryStorage(chunks, CHUNK_BYTES)
    keys = chain_of("waiting", chunks)
    records = [
        Record(ChunkKey(key), ChunkKey(keys[at - 1]) if at else None, Slot(at))
        for at, key in enumerate(keys)
    ]
    payload = memoryview(bytearray(CHUNK_BYTES))
    below.write(records, [payload] * chunks)
    driver = InlineDriver(ArenaGeometry(chunks + 8, CHUNK_BYTES), [below])
    manager = manager_over(driver, CHUNK_BYTES)
    end_step(manager)
    driver.hold_back = True
    context = arrive(manager, "waiter", keys)
    first_ms = milliseconds_of_step(manager, keys, context)
    found = [milliseconds_of_step(manager, keys, context) for _ in range(steps)]
    if look_up(manager, keys, context) is not None:
        raise SystemExit("the request did not wait")
    return first_ms, found


def measure_keeper(directory: Path, chunks: int, rounds: int) -> list[list[float]]:
    """Milliseconds of each step from the second look-up pass to the hit, per promotion."""
    found: list[list[float]] = []
    plan = DiskTierPlan(directory, chunks)
    keys = chain_of("waiting", chunks)
    with keeper(chunks, KEEPER_CHUNK_BYTES, plan) as client:
        manager = manager_over(client, KEEPER_CHUNK_BYTES)
        step_until(manager, lambda: is_usable(manager))
        store(manager, "writer", keys)
        step_until(manager, lambda: not manager.tiers.stack.transfers.under_way(DISK))
    for turn in range(rounds):
        with keeper(chunks, KEEPER_CHUNK_BYTES, plan) as client:
            manager = manager_over(client, KEEPER_CHUNK_BYTES)
            step_until(
                manager,
                lambda: is_usable(manager) and resident_counts(manager)[DISK] == chunks,  # noqa: B023
            )
            context = arrive(manager, f"waiter {turn}", keys)
            milliseconds_of_step(manager, keys, context)
            steps: list[float] = []
            hits = None
            while hits is None:
                began_s = time.perf_counter()
                hits = look_up(manager, keys, context)
                end_step(manager)
                steps.append((time.perf_counter() - began_s) * 1e3)
            if hits != chunks:
                raise SystemExit(f"{hits} chunks were promoted instead of {chunks}")
            found.append(steps[:-1])  # the last answers the request, it does not wait any more
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=7, help="promotions through the keeper")
    parser.add_argument("--directory", type=Path, help="on a disk with room for 2 GiB")
    arguments = parser.parse_args()
    freeze_heap()
    waits: dict[str, list[float]] = {}
    for name, chunks in LENGTHS.items():
        first_ms, waits[name] = measure_held_back(chunks, arguments.steps)
        each = waits[name]
        print(
            f"  {name}: {statistics.median(each):.4f} ms a waiting step "
            f"(p99 {percentile(each, 0.99):.4f}); the first step, once: {first_ms:.2f} ms"
        )
    medians = {name: statistics.median(each) for name, each in waits.items()}
    worst_ms = max(medians.values())
    growth = medians["400k tokens, 32 a chunk"] / medians["10k tokens, 32 a chunk"]
    print(f"  400k against 10k tokens: {growth:.2f} x (goal <= {GOAL_GROWTH})")
    report.write(
        "waiting-step",
        worst_ms,
        "ms in our calls per step, the worst of four lengths",
        f"<= {GOAL_MS}, and it does not grow with the length",
        met=worst_ms <= GOAL_MS and growth <= GOAL_GROWTH,
        samples=rounded({name: each[:200] for name, each in waits.items()}, 5),
    )
    with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="waiting-cost-") as made:
        promotions = measure_keeper(
            Path(made), LENGTHS["100k tokens, 32 a chunk"], arguments.rounds
        )
    means = [statistics.mean(steps) for steps in promotions]
    slowest = [max(steps) for steps in promotions]
    print(
        f"  through a keeper: mean {statistics.median(means):.4f} ms a step, "
        f"slowest step {statistics.median(slowest):.3f} ms (medians of {len(means)} promotions)"
    )
    mean_ms = statistics.median(means)
    report.write(
        "waiting-step-through-keeper",
        mean_ms,
        "ms in our calls per step, mean over a promotion of 3,125 chunks that arrive meanwhile",
        f"<= {GOAL_MS}",
        met=mean_ms <= GOAL_MS,
        samples=rounded({"mean ms": means, "slowest ms": slowest}, 5),
    )


if __name__ == "__main__":
    main()
