"""Short requests among long ones, with rising concurrency: the tiers cost the short ones nothing.

A third of the short and of the long prompts returns, the others are new. Plain vLLM, emberkv and
vLLM's own tiers get the same requests, in turns whose order is random; at each concurrency the
figure is p99 of the short requests' time to first token, over plain's.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
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

GOAL = 1.05
CONCURRENCY = (1, 2, 4, 8)
SHORT_TOKENS, LONG_TOKENS = 200, 3000
SHORTS_PER_LONG = 5
BLOCK_SHORTS = 25
RETURNING = 24
Found = dict[str, list[float]]


def p99_ratio(ours: list[float], theirs: list[float]) -> float:
    return percentile(ours, 0.99) / percentile(theirs, 0.99)


def block_of(name: str, chance: random.Random) -> list[Timed]:
    """Short requests with long ones among them; some of each have been there before."""
    requests: list[Timed] = []
    for at in range(BLOCK_SHORTS):
        kinds = [("short", SHORT_TOKENS)]
        if at % SHORTS_PER_LONG == 0:
            kinds.insert(0, ("long", LONG_TOKENS))
        for kind, length in kinds:
            known = chance.random() < 1 / 3
            text = f"{kind} {chance.randrange(RETURNING)}" if known else f"{kind} {name} {at}"
            requests.append(Timed(f"{kind}-{name}-{at}", 0.0, tokens(text, length), 4))
    return requests


def measure(engines: list[Engine], blocks: int, concurrency: int) -> Found:
    """Times to first token of the short requests of each side."""
    found: Found = {engine.name: [] for engine in engines}
    chance = random.Random(concurrency)
    for block in range(-1, blocks):
        requests = block_of(f"{concurrency}-{block}", chance)
        order = list(engines)
        chance.shuffle(order)
        for engine in order:
            time.sleep(SPIN_S)
            replies = send(engine.server.url, requests, concurrency=concurrency)
            wrong = [each for each in replies if each.error]
            if wrong:
                raise SystemExit(f"{engine.name}: {wrong[0].error}")
            if block >= 0:
                shorts = [each.first_token_s for each in replies if each.name.startswith("short")]
                found[engine.name] += shorts
    return found


def write_report(concurrency: int, found: Found) -> None:
    ratio = p99_ratio(found["emberkv"], found["plain"])
    low, high = bootstrap_interval(p99_ratio, found["emberkv"], found["plain"])
    native = p99_ratio(found["native"], found["plain"])
    median = statistics.median(found["emberkv"]) / statistics.median(found["plain"])
    report.write(
        f"mixed-lengths-{concurrency}",
        ratio,
        f"x of plain's p99 for short requests, {concurrency} at once (95 % interval {low:.3f} to "
        f"{high:.3f}), median {median:.3f}; vLLM's own tiers {native:.3f}",
        f"<= {GOAL}",
        met=ratio <= GOAL,
        samples=rounded({f"{side} s": each for side, each in found.items()}, 5),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=4, help="of 25 short requests, per level")
    parser.add_argument("--directory", type=Path, help="on the disk to use (default: a new one)")
    arguments = parser.parse_args()
    os.environ["VLLM_CPU_NUM_OF_RESERVED_CPU"] = "1"
    with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="mixed-") as made:
        directory = Path(made)
        model = make_random_model(
            directory / "model", hidden_size=192, layers=6, heads=6, kv_heads=2, head_dim=32
        )
        sizes = EngineSizes(device_blocks=256, max_tokens=4096, ram_mib=96, disk_mib=1024)
        engines: list[Engine] = [
            plain_engine(model, directory, sizes),
            EmberEngine(model, directory, sizes),
            NativeEngine(model, directory, sizes),
        ]
        with running(*engines):
            for concurrency in CONCURRENCY:
                found = measure(engines, arguments.blocks, concurrency)
                write_report(concurrency, found)


if __name__ == "__main__":
    main()
