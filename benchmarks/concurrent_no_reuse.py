"""What the tiers cost several requests at once where nothing ever returns.

Unique prompts, four at a time, each answered with 32 tokens, so that prefills, decodes, stores and
write-behinds share every step. Plain vLLM, emberkv and vLLM's own tiers get blocks of them in
turns whose order is random, with a pause before each block; all compute on the same number of
cores. Throughput is requests over the time of all blocks of a side; the other figures are p99 of
the time to first token and of the time between tokens. Intervals are bootstrapped.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import report
from support.engines import (
    SPIN_S,
    EmberEngine,
    Engine,
    EngineSizes,
    NativeEngine,
    plain_engine,
    running,
)
from support.prompts import tokens
from support.timing import bootstrap_interval, percentile, rounded
from support.traffic import Timed, send

from emberkv.testing.models import make_random_model

CONCURRENCY = 4
BLOCK_REQUESTS = 20
PROMPT_TOKENS = (300, 1500)
OUTPUT_TOKENS = 32
GOAL_THROUGHPUT = 0.98
GOAL_P99 = 1.05
Samples = dict[str, list[float]]


def block_of(name: str, chance: random.Random) -> list[Timed]:
    """Requests that nobody has sent before."""
    return [
        Timed(
            f"{name}-{at}",
            0.0,
            tokens(f"{name} {at}", chance.randint(*PROMPT_TOKENS)),
            OUTPUT_TOKENS,
        )
        for at in range(BLOCK_REQUESTS)
    ]


def measure(engines: Sequence[Engine], blocks: int) -> tuple[Samples, Samples, Samples]:
    """Seconds of each block, to first tokens and between tokens, for each side."""
    took: Samples = {engine.name: [] for engine in engines}
    firsts: Samples = {engine.name: [] for engine in engines}
    gaps: Samples = {engine.name: [] for engine in engines}
    chance = random.Random(7)
    for block in range(-1, blocks):
        requests = block_of(str(block), chance)
        order = list(engines)
        chance.shuffle(order)
        for engine in order:
            time.sleep(SPIN_S)
            began_s = time.perf_counter()
            replies = send(engine.server.url, requests, concurrency=CONCURRENCY)
            block_s = time.perf_counter() - began_s
            wrong = [each for each in replies if each.error]
            if wrong:
                raise SystemExit(f"{engine.name}: {wrong[0].error}")
            if block >= 0:  # the first block warms up
                took[engine.name].append(block_s)
                firsts[engine.name] += [each.first_token_s for each in replies]
                gaps[engine.name] += [gap for each in replies for gap in each.gaps_s]
    return took, firsts, gaps


def throughput_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return sum(theirs) / sum(ours)


def p99_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return percentile(ours, 0.99) / percentile(theirs, 0.99)


def write_reports(took: Samples, firsts: Samples, gaps: Samples) -> None:
    """The three figures, each with its interval and that of vLLM's own tiers beside it."""
    ratio = throughput_ratio(took["emberkv"], took["plain"])
    low, high = bootstrap_interval(throughput_ratio, took["emberkv"], took["plain"])
    native = throughput_ratio(took["native"], took["plain"])
    report.write(
        "no-reuse-4-at-once-throughput",
        ratio,
        f"x of plain vLLM (95 % interval {low:.3f} to {high:.3f}); vLLM's own tiers {native:.3f}",
        f">= {GOAL_THROUGHPUT}",
        met=ratio >= GOAL_THROUGHPUT,
        samples=rounded({f"{side} s": each for side, each in took.items()}, 5),
    )
    for name, found in (("first-token", firsts), ("between-tokens", gaps)):
        ratio = p99_ratio(found["emberkv"], found["plain"])
        low, high = bootstrap_interval(p99_ratio, found["emberkv"], found["plain"])
        native = p99_ratio(found["native"], found["plain"])
        report.write(
            f"no-reuse-4-at-once-p99-{name}",
            ratio,
            f"x of plain vLLM (95 % interval {low:.3f} to {high:.3f}); "
            f"vLLM's own tiers {native:.3f}",
            f"<= {GOAL_P99}",
            met=ratio <= GOAL_P99,
            samples=rounded({f"{side} s": each for side, each in found.items()}, 5),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=16, help="of 20 requests, per side")
    parser.add_argument("--ram-mib", type=int, default=256)
    parser.add_argument("--directory", type=Path, help="on the disk to use (default: a new one)")
    arguments = parser.parse_args()
    # Left to itself, vLLM takes a core more or less for the model where it has a connector.
    os.environ["VLLM_CPU_NUM_OF_RESERVED_CPU"] = "1"
    with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="concurrent-") as made:
        directory = Path(made)
        model = make_random_model(
            directory / "model", hidden_size=192, layers=6, heads=6, kv_heads=2, head_dim=32
        )
        sizes = EngineSizes(
            device_blocks=256, max_tokens=4352, ram_mib=arguments.ram_mib, disk_mib=1024
        )
        engines: list[Engine] = [
            EmberEngine(model, directory, sizes),
            plain_engine(model, directory, sizes),
            NativeEngine(model, directory, sizes),
        ]
        with running(*engines):
            write_reports(*measure(engines, arguments.blocks))


if __name__ == "__main__":
    main()
