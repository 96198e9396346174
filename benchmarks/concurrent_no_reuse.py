"""What the tiers cost several requests at once where nothing ever returns.

Unique prompts, four at a time, each answered with 32 tokens, so that prefills, decodes, stores and
write-behinds share every step. Plain vLLM, emberkv and vLLM's own tiers get blocks of them in
turns whose order is random, with a pause before each block; all compute on the same number of
cores. Two processes of one engine differ by a tenth and more, so the servers are started anew for
every round, each round in another order. Throughput is requests over the time of all blocks of a
side; the other figures are p99 of the time to first token and of the time between tokens. Intervals
are bootstrapped.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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


@dataclass
class Found:
    """What each side took: seconds of each block, to first tokens and between tokens."""

    blocks: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    firsts: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    gaps: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))


def measure(engines: Sequence[Engine], name: str, blocks: int, found: Found) -> None:
    """Ask servers that are up, a block each in turn."""
    chance = random.Random(name)
    for block in range(-1, blocks):
        requests = block_of(f"{name}-{block}", chance)
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
                found.blocks[engine.name].append(block_s)
                found.firsts[engine.name] += [each.first_token_s for each in replies]
                found.gaps[engine.name] += [gap for each in replies for gap in each.gaps_s]


def throughput_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return sum(theirs) / sum(ours)


def p99_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return percentile(ours, 0.99) / percentile(theirs, 0.99)


def write_reports(found: Found) -> None:
    """The three figures."""
    write_report("throughput", found.blocks, throughput_ratio, GOAL_THROUGHPUT)
    write_report("p99-first-token", found.firsts, p99_ratio, GOAL_P99)
    write_report("p99-between-tokens", found.gaps, p99_ratio, GOAL_P99)


def write_report(
    name: str,
    seconds: dict[str, list[float]],
    ratio_of: Callable[[Sequence[float], Sequence[float]], float],
    goal: float,
) -> None:
    """One figure with its interval, and that of vLLM's own tiers beside it."""
    ratio = ratio_of(seconds["emberkv"], seconds["plain"])
    low, high = bootstrap_interval(ratio_of, seconds["emberkv"], seconds["plain"])
    native = ratio_of(seconds["native"], seconds["plain"])
    more_is_better = ratio_of is throughput_ratio
    report.write(
        f"no-reuse-4-at-once-{name}",
        ratio,
        f"x of plain vLLM (95 % interval {low:.3f} to {high:.3f}); vLLM's own tiers {native:.3f}",
        f"{'>=' if more_is_better else '<='} {goal}",
        met=ratio >= goal if more_is_better else ratio <= goal,
        samples=rounded({f"{side} s": each for side, each in seconds.items()}, 4),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="each with servers of its own")
    parser.add_argument("--blocks", type=int, default=6, help="of 20 requests, per side and round")
    parser.add_argument("--directory", type=Path, help="on the disk to use (default: a new one)")
    arguments = parser.parse_args()
    # Left to itself, vLLM takes a core more or less for the model where it has a connector.
    os.environ["VLLM_CPU_NUM_OF_RESERVED_CPU"] = "1"
    with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="concurrent-") as made:
        directory = Path(made)
        model = make_random_model(
            directory / "model", hidden_size=192, layers=6, heads=6, kv_heads=2, head_dim=32
        )
        sizes = EngineSizes(device_blocks=256, max_tokens=4352, disk_mib=1024)
        kinds = [EmberEngine, plain_engine, NativeEngine]
        found = Found()
        for number in range(arguments.rounds):
            place = directory / f"round-{number}"
            place.mkdir()
            engines: list[Engine] = [kind(model, place, sizes) for kind in kinds]
            with running(*engines):
                measure(engines, f"round {number}", arguments.blocks, found)
            kinds.append(kinds.pop(0))
        write_reports(found)


if __name__ == "__main__":
    main()
