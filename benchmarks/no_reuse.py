"""What the tiers cost where nothing ever returns: unique prompts, with emberkv and without.

Three servers at once, one of them asked at a time, in blocks of requests whose order is random:
plain vLLM, emberkv, and vLLM's own tiers, which show what any offloading connector costs. A pause
before each block lets the side before come to rest, write-behinds included. All compute on the same
number of cores. A model with random weights that prefills fast enough for storing to show, and
SmolLM2-135M with fewer requests to confirm it. Throughput is prompt tokens over the time of all
requests of a side; intervals are bootstrapped.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
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

from emberkv.testing.models import make_random_model, prepare_smollm2

BLOCK_REQUESTS = 10
OUTPUT_TOKENS = 4
GOAL_THROUGHPUT = 0.98
GOAL_P99 = 1.03
LEAST_PREFILL_PER_S = 5000


@dataclass(frozen=True)
class Work:
    """A model, and how many unique requests of how many tokens each side gets."""

    name: str
    model: Path
    requests: int
    prompt_tokens: int


def ask_block(
    engine: Engine, name: str, count: int, prompt_tokens: int
) -> list[tuple[float, float]]:
    """Seconds to first token, and of the whole request, of unique requests in a row."""
    found = []
    for at in range(count):
        asked = engine.ask(tokens(f"{name} {at}", prompt_tokens), output_tokens=OUTPUT_TOKENS)
        if asked.sources.computed != prompt_tokens:
            raise SystemExit(f"{engine.name}: a unique prompt was not computed: {asked.sources}")
        found.append((asked.first_token_s, asked.total_s))
    return found


def measure(work: Work, directory: Path) -> dict[str, list[tuple[float, float]]]:
    """What each side took, request by request."""
    sizes = EngineSizes(device_blocks=256, max_tokens=4352, disk_mib=1024)
    engines = (
        EmberEngine(work.model, directory, sizes),
        plain_engine(work.model, directory, sizes),
        NativeEngine(work.model, directory, sizes),
    )
    found: dict[str, list[tuple[float, float]]] = {engine.name: [] for engine in engines}
    chance = random.Random(work.name)
    with running(*engines):
        for block in range(-1, -(-work.requests // BLOCK_REQUESTS)):
            order = list(engines)
            chance.shuffle(order)
            for engine in order:
                time.sleep(SPIN_S)
                name = f"{engine.name} {block}"
                each = ask_block(engine, name, BLOCK_REQUESTS, work.prompt_tokens)
                if block >= 0:  # the first block warms up
                    found[engine.name] += each
    return found


def per_second(totals: Sequence[float]) -> float:
    """Requests per second of their own time."""
    return len(totals) / sum(totals)


def throughput_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return per_second(ours) / per_second(theirs)


def p99_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return percentile(ours, 0.99) / percentile(theirs, 0.99)


def write_reports(work: Work, found: dict[str, list[tuple[float, float]]]) -> None:
    """Both figures, with the interval of each."""
    firsts = {side: [first for first, _ in each] for side, each in found.items()}
    totals = {side: [total for _, total in each] for side, each in found.items()}
    prefill_per_s = work.prompt_tokens / statistics.median(firsts["plain"])
    print(f"  {work.name}: {prefill_per_s:.0f} prompt tokens/s without emberkv")
    native = throughput_ratio(totals["native"], totals["plain"])
    native_p99 = p99_ratio(firsts["native"], firsts["plain"])
    print(f"  {work.name}: vLLM's own tiers: throughput {native:.3f}, p99 {native_p99:.3f}")
    ratio = throughput_ratio(totals["emberkv"], totals["plain"])
    low, high = bootstrap_interval(throughput_ratio, totals["emberkv"], totals["plain"])
    report.write(
        f"no-reuse-throughput-{work.name}",
        ratio,
        f"x of plain vLLM (95 % interval {low:.3f} to {high:.3f}), {prefill_per_s:.0f} tokens/s; "
        f"vLLM's own tiers {native:.3f}",
        f">= {GOAL_THROUGHPUT}",
        met=ratio >= GOAL_THROUGHPUT,
        samples=rounded({f"{side} s": each for side, each in totals.items()}, 5),
    )
    ratio = p99_ratio(firsts["emberkv"], firsts["plain"])
    low, high = bootstrap_interval(p99_ratio, firsts["emberkv"], firsts["plain"])
    report.write(
        f"no-reuse-p99-first-token-{work.name}",
        ratio,
        f"x of plain vLLM (95 % interval {low:.3f} to {high:.3f}); "
        f"vLLM's own tiers {native_p99:.3f}",
        f"<= {GOAL_P99}",
        met=ratio <= GOAL_P99,
        samples=rounded({f"{side} s": each for side, each in firsts.items()}, 5),
    )
    if work.name == "random-model" and prefill_per_s < LEAST_PREFILL_PER_S:
        print(f"  the model is too slow here for the claim: under {LEAST_PREFILL_PER_S} tokens/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=320, help="per side, random model")
    parser.add_argument("--confirm", type=int, default=30, help="per side, SmolLM2")
    parser.add_argument("--directory", type=Path, help="on the disk to use (default: a new one)")
    arguments = parser.parse_args()
    # Left to itself, vLLM takes a core more or less for the model where it has a connector.
    os.environ["VLLM_CPU_NUM_OF_RESERVED_CPU"] = "1"
    with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="no-reuse-") as made:
        directory = Path(made)
        model = make_random_model(
            directory / "model", hidden_size=192, layers=6, heads=6, kv_heads=2, head_dim=32
        )
        works = [
            Work("random-model", model, arguments.requests, 1500),
            Work("smollm2", prepare_smollm2(), arguments.confirm, 500),
        ]
        for work in works:
            place = directory / work.name
            place.mkdir()
            write_reports(work, measure(work, place))


if __name__ == "__main__":
    main()
