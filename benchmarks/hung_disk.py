"""A disk that hangs for a minute under load: who waits for it, for how long, and when it is back.

One timetable for each side, one side after the other: requests that return from disk alone, and a
stream that decodes all the time. After a while every read and write below the tiers' directories
hangs (see `support/slow_disk.c`), a minute later it goes on. Plain vLLM has nothing to wait for and
is what the others are compared with; vLLM's own tiers get the same timetable.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import report
from support.engines import (
    EmberEngine,
    Engine,
    EngineSizes,
    NativeEngine,
    plain_engine,
    running,
)
from support.prompts import tokens
from support.slow_disk import SlowDisk
from support.timing import percentile, rounded
from support.traffic import Reply, Timed, send

from emberkv.testing.models import make_random_model

PROMPT_TOKENS = 1500
TEXTS = 48
HEALTHY_S = 15.0
HANG_S = 60.0
AFTER_S = 20.0
EVERY_S = 0.8
STREAM_TOKENS = 48
GOAL_P99 = 1.05
GOAL_STEP = 1.05
GOAL_OUT_S = 2.0
GOAL_BACK_S = 10.0


@dataclass
class Played:
    """The replies of one side, by when they were sent."""

    returning: list[Reply]
    streams: list[Reply]

    def first_tokens(self, begin_s: float, end_s: float) -> list[float]:
        return [
            each.first_token_s or each.total_s
            for each in self.returning
            if begin_s <= each.sent_s < end_s
        ]

    def gaps(self, begin_s: float, end_s: float) -> list[float]:
        return [
            gap for each in self.streams if begin_s <= each.sent_s < end_s for gap in each.gaps_s
        ]


def timetable(side: str) -> list[Timed]:
    length_s = HEALTHY_S + HANG_S + AFTER_S
    returning = [
        Timed(
            f"{side}-returning-{at}",
            at * EVERY_S,
            tokens(f"text {at % TEXTS}", PROMPT_TOKENS),
        )
        for at in range(int(length_s / EVERY_S))
    ]
    streams = [
        Timed(f"{side}-stream-{at}", at * 2.0, tokens(f"s {side} {at}", 20), STREAM_TOKENS)
        for at in range(int(length_s / 2.0))
    ]
    return returning + streams


def play(engine: Engine, disk: SlowDisk) -> Played:
    """One side's whole timetable, with the hang in it."""
    for at in range(TEXTS):
        engine.ask(tokens(f"text {at}", PROMPT_TOKENS))
    time.sleep(5.0)  # write-behinds
    timers = [
        threading.Timer(HEALTHY_S, disk.hang),
        threading.Timer(HEALTHY_S + HANG_S, disk.release),
    ]
    for timer in timers:
        timer.start()
    replies = send(engine.server.url, timetable(engine.name), timeout_s=HANG_S + 60.0)
    for timer in timers:
        timer.join()
    return Played(
        [each for each in replies if "-returning-" in each.name],
        [each for each in replies if "-stream-" in each.name],
    )


def logged(log: Path) -> dict[str, dict[str, float]]:
    """The request log's facts by the name that a request was sent with."""
    found = {}
    for line in log.read_text().splitlines():
        facts = json.loads(line)
        for name in (facts["external_id"] or "").split("cmpl-"):
            found[name.removesuffix("-0")] = facts
    return found


HANG = HEALTHY_S, HEALTHY_S + HANG_S


def write_latencies(sides: dict[str, Played]) -> None:
    hang = HANG
    first = {side: played.first_tokens(*hang) for side, played in sides.items()}
    late = {side: sum(each > 10.0 for each in times) for side, times in first.items()}
    p99 = percentile(first["emberkv"], 0.99) / percentile(first["plain"], 0.99)
    native = percentile(first["native"], 0.99) / percentile(first["plain"], 0.99)
    report.write(
        "hung-disk-p99-first-token",
        p99,
        f"x of plain's p99 while the disk hangs; vLLM's own tiers {native:.3g} x, "
        f"{late['native']} of {len(first['native'])} requests later than 10 s "
        f"(emberkv {late['emberkv']})",
        f"<= {GOAL_P99}",
        met=p99 <= GOAL_P99,
        samples=rounded({f"{side} s": each for side, each in first.items()}, 5),
    )
    gaps = {side: played.gaps(*hang) for side, played in sides.items()}
    step = percentile(gaps["emberkv"], 0.99) / percentile(gaps["plain"], 0.99)
    report.write(
        "hung-disk-p99-between-tokens",
        step,
        "x of plain's p99 of the time between tokens while the disk hangs",
        f"<= {GOAL_STEP}",
        met=step <= GOAL_STEP,
        samples={
            side: [percentile(each, 0.5), percentile(each, 0.99)] for side, each in gaps.items()
        },
    )


def write_way_out_and_back(sides: dict[str, Played], facts: dict[str, dict[str, float]]) -> None:
    hang = HANG
    mine = [(each, facts.get(each.name)) for each in sides["emberkv"].returning]
    waits = [
        (each.sent_s, found["wait_s"])
        for each, found in mine
        if found is not None and hang[0] <= each.sent_s < hang[1]
    ]
    waited = [sent_s + wait_s - hang[0] for sent_s, wait_s in waits if wait_s > 0.001]
    out_s = max(waited, default=0.0)
    budget_s = 0.05 * percentile(sides["plain"].first_tokens(*hang), 0.5)
    longest_s = max((wait_s for _, wait_s in waits), default=0.0)
    report.write(
        "hung-disk-out",
        out_s,
        f"s after the hang nobody waits any more; the longest wait was {longest_s:.3f} s, "
        f"5 % of a median prompt is {budget_s:.3f} s",
        f"<= {GOAL_OUT_S:g}",
        met=out_s <= GOAL_OUT_S,
        samples={"waits s": [wait_s for _, wait_s in waits]},
    )
    back = [
        each.sent_s - hang[1]
        for each, found in mine
        if found is not None and each.sent_s >= hang[1] and found["disk_tokens"] > 0
    ]
    back_s = min(back, default=AFTER_S)
    report.write(
        "hung-disk-back",
        back_s,
        "s after the hang the first request is served from disk again",
        f"<= {GOAL_BACK_S:g}",
        met=back_s <= GOAL_BACK_S,
        samples={"served from disk at s": back},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, help="on the disk to use (default: a new one)")
    arguments = parser.parse_args()
    os.environ["VLLM_CPU_NUM_OF_RESERVED_CPU"] = "1"
    with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="hung-disk-") as made:
        directory = Path(made)
        model = make_random_model(
            directory / "model", hidden_size=192, layers=6, heads=6, kv_heads=2, head_dim=32
        )
        sizes = EngineSizes(device_blocks=192, max_tokens=2048, ram_mib=96, disk_mib=1024)
        disk = SlowDisk(directory, directory)
        sides: dict[str, Played] = {}
        facts: dict[str, dict[str, float]] = {}
        with disk.in_environment():
            for make in (plain_engine, EmberEngine, NativeEngine):
                engine = make(model, directory, sizes)
                with running(engine):
                    sides[engine.name] = play(engine, disk)
                    if isinstance(engine, EmberEngine):
                        facts = logged(directory / "requests.jsonl")
        write_latencies(sides)
        write_way_out_and_back(sides, facts)


if __name__ == "__main__":
    main()
