"""A tier manager between two scripts: an engine's scheduler above it, a driver below."""

from __future__ import annotations

import os
from collections.abc import Sequence

from emberkv.core.audit import AuditedStack
from emberkv.core.limits import Limits
from emberkv.core.residents import Residents
from emberkv.domain.types import DISK, RAM, ChunkKey, Copy, Entry, Outcome, RequestId, Slot
from emberkv.live.arena import Arena, ArenaGeometry, create_memory
from emberkv.live.driver import CopyProgress, Found, Populated, Report
from emberkv.live.lookup import Lookup
from emberkv.live.manager import GAUGES_EVERY_S, TierManager
from emberkv.observe import metrics
from emberkv.observe.requests import RequestFacts
from emberkv.policy.eviction.lru import Lru

CHUNK_BYTES = 4096
RAM_SLOTS = 8
DISK_SLOTS = 32
STEP_S = 0.01
A, B, C = RequestId("a"), RequestId("b"), RequestId("c")


def chain(name: str, count: int) -> list[ChunkKey]:
    return [ChunkKey(f"{name}-{at}".encode()) for at in range(count)]


def entries_of(keys: Sequence[ChunkKey]) -> tuple[Entry, ...]:
    """A whole chain as a tier finds it, in slots 0, 1, …."""
    parents = [None, *keys]
    return tuple(Entry(key, parents[at], Slot(at)) for at, key in enumerate(keys))


class ScriptedDriver:
    """Implements `Driver`: reports what a test says, in that order; carries nothing out itself."""

    def __init__(self) -> None:
        geometry = ArenaGeometry(RAM_SLOTS, CHUNK_BYTES)
        fd = create_memory(geometry)
        self.arena = Arena(fd, geometry)
        os.close(fd)
        self.slot_counts: tuple[int, ...] = (RAM_SLOTS, DISK_SLOTS)
        self.reports: list[Report] = []
        self.copies: list[Copy] = []
        self.sealed: list[Slot] = []
        self.resets = 0
        self.reset_works = True
        self.reset_is_owed = False
        self.fails: Exception | None = None
        self.closed: bool | None = None

    def submit(self, copies: Sequence[Copy]) -> None:
        self.copies += copies

    def seal(self, slots: Sequence[Slot]) -> None:
        self.sealed += slots

    def poll(self) -> list[Report]:
        if self.fails is not None:
            raise self.fails
        reports, self.reports = self.reports, []
        return reports

    def reset(self) -> bool:
        self.resets += 1
        return self.reset_works

    def begin_reset(self) -> None:
        self.resets += 1
        self.reset_is_owed = True

    def close(self, *, clean: bool) -> None:
        self.closed = clean

    def end(self, outcome: Outcome = Outcome.OK, *, chunks: int | None = None) -> None:
        """Report every copy handed over, or the first `chunks` of each, as ended."""
        for copy in self.copies:
            ended = range(len(copy.keys))[:chunks]
            self.reports.append(
                CopyProgress(copy.transfer, tuple((at, outcome) for at in ended), 0.001)
            )
        if chunks is None:
            self.copies = []


class Engine:
    """An engine's scheduler as the manager sees it; asks, stores and loads as vLLM's does."""

    def __init__(self, *, ready: bool = True, strict: bool = True, **limits: float) -> None:
        self.driver = ScriptedDriver()
        tiers = [Residents(n, CHUNK_BYTES, Lru(n)) for n in self.driver.slot_counts]
        self.now_s = 100.0
        self.ended: list[RequestFacts] = []
        self.manager = TierManager(
            AuditedStack(tiers, Limits(**limits)),
            self.driver,
            lambda: self.now_s,
            self.ended.append,
            strict=strict,
        )
        if ready:
            self.say(Populated(0, RAM_SLOTS), Found(RAM, (), last=True), Found(DISK, (), last=True))
            self.step()

    def say(self, *reports: Report) -> None:
        self.driver.reports += reports

    def step(self, started: Sequence[RequestId] = (), preempted: Sequence[RequestId] = ()) -> None:
        self.manager.step_end(started, preempted)
        self.now_s += STEP_S

    def ask(self, request: RequestId, keys: Sequence[ChunkKey]) -> list[Lookup]:
        """One pass: every key up to the first miss."""
        answers = []
        for key in keys:
            answers.append(self.manager.lookup(request, key))
            if answers[-1] is Lookup.MISS:
                break
        return answers

    def store(self, request: RequestId, keys: Sequence[ChunkKey]) -> list[Slot]:
        """Compute and store a whole chain; returns the slots."""
        admitted = self.manager.prepare_store(request, keys, None) or []
        self.manager.complete_store(request, [key for key, _ in admitted])
        return [slot for _, slot in admitted]

    def on_disk(self, request: RequestId, keys: Sequence[ChunkKey]) -> None:
        """See to it that a chain is on disk alone, `request` having ended."""
        self.manager.begin(request)
        self.store(request, keys)
        self.driver.end()
        self.manager.finish(request)
        self.step()
        filler = RequestId(f"filler-{request}")
        self.manager.begin(filler)
        self.store(filler, chain(f"filler-{request}", RAM_SLOTS))
        self.driver.end()
        self.manager.finish(filler)
        self.step()
        assert not any(self.manager.stack.tiers[RAM].ready(key) for key in keys)


def sample(engine: Engine, metric: metrics.Metric, *labels: str) -> float:
    """A metric's value in the next export."""
    engine.now_s += GAUGES_EVERY_S
    found = {(m, at): value for m, at, value in engine.manager.samples()}
    return found[metric, labels]
