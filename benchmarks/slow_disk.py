"""Returning requests while the disk is slow: never later than without emberkv, whatever it does.

Three servers of one random model: plain vLLM, emberkv, and vLLM's own tiers. A set of prompts, too
large for RAM, returns again and again, so that each return finds its KV on disk alone. A library
put before libc makes every read and write below the tiers' directories slow, for all sides alike
(see `support/slow_disk.c`). The sides take turns in blocks whose order is random. emberkv's server
is asked with its tiers open and with its tiers shut, since two processes of one engine can differ
by more than a twentieth by themselves: at each slowness the figure is p99 of the time to first
token, open over shut, with a bootstrapped interval; plain's and vLLM's tiers' stand beside it.
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
from support.slow_disk import SlowDisk, Slowness
from support.timing import bootstrap_interval, percentile, rounded

from emberkv.testing.models import make_random_model

GOAL = 1.05
PROMPT_TOKENS = 1500
TEXTS = 48
BLOCK_REQUESTS = 12
NATIVE_REQUESTS = 6
"""Slow levels take vLLM's tiers so long that a few requests must do."""

LEVELS = (
    Slowness(),
    Slowness(0.002),
    Slowness(0.02),
    Slowness(0.2),
    Slowness(0.0, 200e6),
    Slowness(0.0, 40e6),
    Slowness(0.0, 10e6),
)
Found = dict[str, list[float]]


def ratio_of_p99(ours: list[float], theirs: list[float]) -> float:
    return percentile(ours, 0.99) / percentile(theirs, 0.99)


class Texts:
    """The prompts of one side, in the order in which they return: the longest unused first."""

    def __init__(self, engine: Engine, *, shut: bool = False) -> None:
        self.engine = engine
        self.name = "shut" if shut else engine.name
        self._shut = shut
        self._at = 0

    def block(self, count: int) -> tuple[list[float], int]:
        """A block of requests after a rest."""
        if count == 0:
            return [], 0
        if self._shut and isinstance(self.engine, EmberEngine):
            self.engine.shut(off=True)
        time.sleep(SPIN_S)
        found = self.ask(count)
        if self._shut and isinstance(self.engine, EmberEngine):
            self.engine.shut(off=False)
        return found

    def ask(self, count: int) -> tuple[list[float], int]:
        """Times to first token of the next ones, and how many tokens came from disk."""
        times: list[float] = []
        from_disk = 0
        for _ in range(count):
            prompt = tokens(f"text {self._at % TEXTS}", PROMPT_TOKENS)
            self._at += 1
            asked = self.engine.ask(prompt)
            times.append(asked.first_token_s)
            from_disk += asked.sources.disk
        return times, from_disk


def measure_level(
    sides: list[Texts], level: Slowness, requests: int, chance: random.Random
) -> tuple[Found, dict[str, int]]:
    """What each side took at one slowness, and its tokens from disk."""
    found: Found = {side.name: [] for side in sides}
    from_disk = dict.fromkeys(found, 0)
    for block in range(-1, -(-requests // BLOCK_REQUESTS)):
        order = list(sides)
        chance.shuffle(order)
        for side in order:
            name = side.name
            count = BLOCK_REQUESTS
            if name == "native" and (level.latency_s >= 0.02 or level.bytes_per_s):
                count = NATIVE_REQUESTS if block < 1 else 0
            times, disk = side.block(count)
            if block >= 0:  # the first block learns that the disk has changed
                found[name] += times
                from_disk[name] += disk
    return found, from_disk


def write_level(level: Slowness, found: Found, from_disk: dict[str, int]) -> tuple[float, bool]:
    ratio = ratio_of_p99(found["emberkv"], found["shut"])
    low, high = bootstrap_interval(ratio_of_p99, found["emberkv"], found["shut"])
    gain = statistics.median(found["shut"]) / statistics.median(found["emberkv"])
    plain = ratio_of_p99(found["emberkv"], found["plain"])
    native = ratio_of_p99(found["native"], found["plain"])
    share = from_disk["emberkv"] / (len(found["emberkv"]) * PROMPT_TOKENS)
    name = str(level).replace("+", "").replace(" ", "").replace("/", "")
    report.write(
        f"slow-disk-{name}",
        ratio,
        f"x of p99 with the tiers shut (95 % interval {low:.3f} to {high:.3f}), "
        f"median {gain:.2f} x sooner, {share:.0%} of tokens from disk; "
        f"over plain vLLM's p99: emberkv {plain:.2f}, "
        f"vLLM's own tiers {native:.2f}",
        f"<= {GOAL}",
        met=ratio <= GOAL,
        samples=rounded({f"{side} s": each for side, each in found.items()}, 5),
    )
    return ratio, ratio <= GOAL


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=48, help="per side and slowness")
    parser.add_argument("--directory", type=Path, help="on the disk to use (default: a new one)")
    arguments = parser.parse_args()
    os.environ["VLLM_CPU_NUM_OF_RESERVED_CPU"] = "1"
    chance = random.Random(5)
    with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="slow-disk-") as made:
        directory = Path(made)
        model = make_random_model(
            directory / "model", hidden_size=192, layers=6, heads=6, kv_heads=2, head_dim=32
        )
        sizes = EngineSizes(device_blocks=96, max_tokens=2048, ram_mib=96, disk_mib=1024)
        disk = SlowDisk(directory, directory)
        engines = (
            plain_engine(model, directory, sizes),
            EmberEngine(model, directory, sizes),
            NativeEngine(model, directory, sizes),
        )
        with disk.in_environment(), running(*engines):
            sides = [Texts(engine) for engine in engines]
            for side in sides:
                side.ask(TEXTS)
            sides.append(Texts(engines[1], shut=True))
            time.sleep(5.0)  # write-behinds
            for level in LEVELS:
                disk.set(level)
                write_level(level, *measure_level(sides, level, arguments.requests, chance))


if __name__ == "__main__":
    main()
