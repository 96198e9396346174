"""How much our tiers delay the engine's own scheduler step while the disk is saturated.

This process plays the engine's: it holds the manager and the keeper's client, and its step is a
fixed piece of Python work, as scheduling is. With traffic, each step also makes the calls of a
connector for requests that wait for promotions of 64 chunks, load and return, and for a request
that stores a chunk per step, which is written behind. Without, it only works. All the time, other
processes read and write the same disk directly. Goal: at p99, a step with traffic is at most 1 ms
longer than one without. Segments with and without traffic take turns.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import report
from support.chains import NOTHING_STARTED, chain_of, look_up, request_for, store
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
from vllm.v1.kv_offload.base import OffloadKey, ReqContext, ScheduleEndContext

from emberkv.domain.types import DISK, RAM
from emberkv.engines.vllm.manager import EmberOffloadingManager

CHUNK_BYTES = 1 << 20
CHAIN_CHUNKS = 64
CHAINS = 8
RAM_CHUNKS = 320
DISK_CHUNKS = 1536
WAITERS = 2
GOAL_MS = 1.0


@contextmanager
def saturated(directory: Path) -> Iterator[None]:
    """Two processes that read and write a file directly for as long as this lasts."""
    words = [
        "fio", "--name=load", f"--filename={directory / 'load.data'}", "--direct=1", "--rw=randrw",
        "--bs=1M", "--ioengine=psync", "--numjobs=2", "--size=512M", "--time_based",
        "--runtime=3600", "--output=/dev/null",
    ]  # fmt: skip
    load = subprocess.Popen(words, start_new_session=True)
    try:
        time.sleep(3.0)  # it lays its file out first
        if load.poll() is not None:
            raise SystemExit("fio did not start")
        yield
    finally:
        load.terminate()
        load.wait()


def work(rounds: int) -> int:
    """A piece of what a scheduler does: attribute-free Python that allocates a little."""
    table: dict[int, list[int]] = {}
    for at in range(rounds):
        table.setdefault(at & 63, []).append(at)
    return len(table)


def rounds_of_a_millisecond() -> int:
    """How many rounds of `work` take a millisecond here."""
    times = []
    for _ in range(200):
        began_s = time.perf_counter()
        work(5000)
        times.append(time.perf_counter() - began_s)
    return max(1, round(5000 * 1e-3 / statistics.median(times)))


class Traffic:
    """Requests that keep promotions and write-behinds under way, one step at a time."""

    def __init__(self, manager: EmberOffloadingManager, chains: list[list[OffloadKey]]) -> None:
        self._manager = manager
        self._chains = itertools.cycle(chains)
        self._names = itertools.count()
        self._arriving: list[tuple[ReqContext, list[OffloadKey]]] = []
        self._waiting: list[tuple[ReqContext, list[OffloadKey]]] = []
        self._writer: tuple[ReqContext, list[OffloadKey]] | None = None
        self._written = 0
        self.promoted = 0
        self.stored = 0

    def prepare(self) -> None:
        """What vLLM itself does before a step: hash prompts, name their chunks."""
        while len(self._waiting) + len(self._arriving) < WAITERS:
            self._arriving.append(self._request("reader", next(self._chains)))
        if self._writer is None or self._written == CHAIN_CHUNKS:
            name = f"chain of writer {next(self._names)}"
            self._writer = self._request("writer", chain_of(name, CHAIN_CHUNKS))
            self._written = 0

    def _request(self, kind: str, keys: list[OffloadKey]) -> tuple[ReqContext, list[OffloadKey]]:
        return request_for(f"{kind} {next(self._names)}", keys), keys

    def step(self) -> None:
        """The calls of one engine step."""
        manager = self._manager
        for context, _ in self._arriving:
            manager.on_new_request(context)
        self._waiting += self._arriving
        self._arriving.clear()
        started = []
        for each in list(self._waiting):
            context, keys = each
            hits = look_up(manager, keys, context)
            if hits is not None:
                self._waiting.remove(each)
                started.append(context)
                self.promoted += hits
                if hits:
                    manager.prepare_load(keys[:hits], context)
        manager.on_schedule_end(ScheduleEndContext([c.req_id for c in started], ()))
        self._store_one()
        for context in started:
            manager.complete_load((), context)
            manager.on_request_finished(context)
        manager.get_stats()

    def _store_one(self) -> None:
        assert self._writer is not None
        manager = self._manager
        context, keys = self._writer
        if not self._written:
            manager.on_new_request(context)
        chunk = keys[self._written : self._written + 1]
        output = manager.prepare_store(chunk, context)
        if output is not None and output.keys_to_store:
            manager.complete_store(output.keys_to_store, context)
            self.stored += 1
        self._written += 1
        if self._written == CHAIN_CHUNKS:
            manager.on_request_finished(context)

    def drain(self) -> None:
        """Step, without new requests, until nothing is under way."""
        transfers = self._manager.tiers.stack.transfers
        step_until(self._manager, lambda: not transfers.under_way(RAM) + transfers.under_way(DISK))


def segment(traffic: Traffic | None, steps: int, rounds: int) -> tuple[list[float], list[float]]:
    """Milliseconds of each whole step, and of our calls in it."""
    whole: list[float] = []
    ours: list[float] = []
    for _ in range(steps):
        if traffic is not None:
            traffic.prepare()
        began_s = time.perf_counter()
        if traffic is not None:
            traffic.step()
        called_s = time.perf_counter()
        work(rounds)
        ended_s = time.perf_counter()
        whole.append((ended_s - began_s) * 1e3)
        ours.append((called_s - began_s) * 1e3)
    return whole, ours


def fill(manager: EmberOffloadingManager, chains: list[list[OffloadKey]]) -> None:
    """Have every chain on disk."""
    step_until(manager, lambda: is_usable(manager))
    for at, keys in enumerate(chains):
        store(manager, f"first {at}", keys)
        step_until(manager, lambda: not manager.tiers.stack.transfers.under_way(DISK))
    if resident_counts(manager)[DISK] < CHAINS * CHAIN_CHUNKS:
        raise SystemExit("the slab did not take the chains in")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--segments", type=int, default=15, help="of each kind")
    parser.add_argument("--steps", type=int, default=600, help="per segment")
    parser.add_argument("--directory", type=Path, help="on the disk to saturate (default: new)")
    arguments = parser.parse_args()
    freeze_heap()
    samples: dict[str, list[float]] = {"with p99": [], "without p99": [], "our calls p99": []}
    medians: dict[str, list[float]] = {"with": [], "without": []}
    chains = [chain_of(f"chain {at}", CHAIN_CHUNKS) for at in range(CHAINS)]
    with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="delay-") as made:
        plan = DiskTierPlan(Path(made), DISK_CHUNKS)
        with keeper(RAM_CHUNKS, CHUNK_BYTES, plan) as client:
            manager = manager_over(client, CHUNK_BYTES)
            fill(manager, chains)
            traffic = Traffic(manager, chains)
            rounds = rounds_of_a_millisecond()
            with saturated(Path(made)):
                for _ in range(arguments.segments):
                    whole, ours = segment(traffic, arguments.steps, rounds)
                    traffic.drain()
                    alone, _ = segment(None, arguments.steps, rounds)
                    manager.on_schedule_end(NOTHING_STARTED)
                    samples["with p99"].append(percentile(whole, 0.99))
                    samples["without p99"].append(percentile(alone, 0.99))
                    samples["our calls p99"].append(percentile(ours, 0.99))
                    medians["with"].append(statistics.median(whole))
                    medians["without"].append(statistics.median(alone))
    print(f"  {traffic.promoted} chunks promoted, {traffic.stored} stored meanwhile")
    for name, each in {**medians, **samples}.items():
        print(f"  {name}: {statistics.median(each):.3f} ms")
    added_ms = statistics.median(samples["with p99"]) - statistics.median(samples["without p99"])
    report.write(
        "scheduler-step-delay",
        added_ms,
        "ms added to a scheduler step at p99, disk saturated",
        f"<= {GOAL_MS:g}",
        met=added_ms <= GOAL_MS,
        samples=rounded(samples, 4),
    )


if __name__ == "__main__":
    main()
