"""An engine and a disk in virtual time, with the real manager between them.

The engine computes prompts first come first served, `BUDGET` tokens a step, at a planted price per
token; it asks, loads and stores as vLLM's scheduler does. The disk brings chunks after a planted
delay and at a planted pace, or stops for a while.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from emberkv.core.check import check
from emberkv.core.economy import Terms
from emberkv.core.limits import Limits
from emberkv.core.residents import Residents
from emberkv.core.retention import Quotas
from emberkv.core.stack import TierStack
from emberkv.domain.hints import NO_HINTS, Hints
from emberkv.domain.types import DISK, RAM, ChunkKey, Copy, Outcome, RequestId, Slot
from emberkv.live.arena import Arena, ArenaGeometry, create_memory
from emberkv.live.driver import CopyProgress, Found, Populated, Report
from emberkv.live.lookup import Lookup
from emberkv.live.manager import TierManager
from emberkv.live.steps import StepWork
from emberkv.observe.requests import RequestFacts
from emberkv.policy.eviction.lru import Lru

TOKENS = 128
CHUNK_BYTES = 64
BUDGET = 2048
IDLE_STEP_S = 0.002

Curve = Callable[[int, int], float]
"""Seconds that tokens `first` … `end - 1` of a prompt cost."""


def flat(first: int, end: int) -> float:
    return (end - first) * 2e-4


def rising(first: int, end: int) -> float:
    return (end - first) * (1e-4 + 1e-8 * (first + end))


@dataclass
class ModelledDisk:
    """Reads come `first_s` after an idle start and then every `chunk_s`; writes at once."""

    first_s: float = 0.002
    chunk_s: float = 0.0002
    batch: int = 8
    hangs: list[tuple[float, float]] = field(default_factory=list)
    busy_until_s: float = 0.0
    reads: int = 0

    def ends(self, chunks: int, now_s: float) -> list[tuple[float, int, int]]:
        """When batches (first, count) of a read that starts now are there."""
        self.reads += chunks
        at_s = max(now_s, self.busy_until_s - self.first_s) + self.first_s
        ends: list[tuple[float, int, int]] = []
        for first in range(0, chunks, self.batch):
            n = min(self.batch, chunks - first)
            at_s += n * self.chunk_s
            for begin_s, end_s in self.hangs:
                if begin_s <= at_s < end_s:
                    at_s = end_s
            ends.append((at_s, first, n))
        self.busy_until_s = at_s
        return ends


class ModelledDriver:
    """Implements `Driver` over a modelled disk."""

    def __init__(self, ram_slots: int, disk_slots: int, disk: ModelledDisk) -> None:
        geometry = ArenaGeometry(ram_slots, CHUNK_BYTES)
        fd = create_memory(geometry)
        self.arena = Arena(fd, geometry)
        os.close(fd)
        self.slot_counts: tuple[int, ...] = (ram_slots, disk_slots)
        self.disk = disk
        self.now_s = 0.0
        self._order = count()
        self._due: list[tuple[float, int, CopyProgress]] = []
        self._reports: list[Report] = [
            Populated(0, ram_slots),
            Found(RAM, (), last=True),
            Found(DISK, (), last=True),
        ]

    def submit(self, copies: Sequence[Copy]) -> None:
        for copy in copies:
            length = len(copy.keys)
            if copy.target == RAM:
                ends = self.disk.ends(length, self.now_s)
            else:
                ends = [(self.now_s, 0, length)]
            for at_s, first, n in ends:
                results = tuple((index, Outcome.OK) for index in range(first, first + n))
                progress = CopyProgress(copy.transfer, results, 0.0)
                heapq.heappush(self._due, (at_s, next(self._order), progress))

    def seal(self, slots: Sequence[Slot]) -> None:
        pass

    def poll(self) -> list[Report]:
        reports, self._reports = self._reports, []
        while self._due and self._due[0][0] <= self.now_s:
            at_s, _, each = heapq.heappop(self._due)
            reports.append(
                CopyProgress(each.transfer, each.results, each.busy_s, self.now_s - at_s)
            )
        return reports

    def reset(self) -> bool:
        return True

    def close(self, *, clean: bool) -> None:
        pass


@dataclass
class Prompt:
    """One request: when it comes, how long its prompt is, whose tokens, what the device has."""

    name: str
    arrival_s: float
    tokens: int
    hints: Hints = NO_HINTS
    text: str = ""
    device_tokens: int = 0

    @property
    def request(self) -> RequestId:
        return RequestId(self.name)

    @property
    def keys(self) -> list[ChunkKey]:
        text = self.text or self.name
        return [ChunkKey(f"{text}/{at}".encode()) for at in range(self.tokens // TOKENS)]


class ModelledEngine:
    """Plays prompts; with `tiers=None` it has nobody to ask."""

    def __init__(
        self,
        curve: Curve,
        *,
        ram_slots: int = 0,
        disk_slots: int = 16384,
        disk: ModelledDisk | None = None,
        stack_class: type[TierStack] = TierStack,
        max_slowdown: float = 1.05,
        quotas: Quotas | None = None,
    ) -> None:
        self.curve = curve
        self.now_s = 0.0
        self.first_token_s: dict[str, float] = {}
        self.longest_step_s = 0.0
        self.facts: dict[str, RequestFacts] = {}
        self._arrived: set[str] = set()
        self.manager: TierManager | None = None
        if ram_slots:
            self.driver = ModelledDriver(ram_slots, disk_slots, disk or ModelledDisk())
            tiers = [Residents(n, CHUNK_BYTES, Lru(n)) for n in self.driver.slot_counts]
            terms = Terms(tokens_per_chunk=TOKENS, max_slowdown=max_slowdown)
            self.manager = TierManager(
                stack_class(tiers, Limits(max_stall_s=1.0), terms, quotas),
                self.driver,
                lambda: self.now_s,
                lambda facts: self.facts.__setitem__(facts.request, facts),
                strict=True,
            )
            self.manager.step_end((), ())

    def play(self, prompts: Sequence[Prompt]) -> None:
        """Serve prompts to the end, one token each."""
        coming = sorted(prompts, key=lambda each: each.arrival_s)
        waiting: list[Prompt] = []
        running: list[tuple[Prompt, int]] = []  # prompt, tokens done
        loading: list[tuple[Prompt, int]] = []
        while coming or waiting or running or loading:
            if not (waiting or running or loading) and coming:
                self._go_to(max(self.now_s, coming[0].arrival_s))
            while coming and coming[0].arrival_s <= self.now_s:
                waiting.append(self._arrive(coming.pop(0)))
            running = self._step(waiting, running, loading)
        if self.manager is not None:
            check(self.manager.stack, self.now_s)

    def _go_to(self, now_s: float) -> None:
        self.now_s = now_s
        if self.manager is not None:
            self.driver.now_s = now_s

    def _arrive(self, prompt: Prompt) -> Prompt:
        if self.manager is not None:
            self.manager.begin(prompt.request, prompt.hints)
            self.manager.describe(prompt.request, prompt.tokens, lambda: prompt.keys)
        return prompt

    def _step(
        self,
        waiting: list[Prompt],
        running: list[tuple[Prompt, int]],
        loading: list[tuple[Prompt, int]],
    ) -> list[tuple[Prompt, int]]:
        budget = BUDGET
        pieces: list[tuple[Prompt, int, int]] = []
        for prompt, done in running:
            n = min(budget, prompt.tokens - done)
            if n:
                pieces.append((prompt, done, done + n))
                budget -= n
        loads: list[tuple[Prompt, int]] = []
        started: list[RequestId] = []
        for prompt in list(waiting):
            if budget <= 0:
                break
            hits = self._ask(prompt)
            if hits is None:
                continue
            waiting.remove(prompt)
            if hits and self.manager is not None:
                first = prompt.device_tokens // TOKENS
                self.manager.prepare_load(prompt.request, prompt.keys[first : first + hits])
                loads.append((prompt, (first + hits) * TOKENS))
                continue
            started.append(prompt.request)
            n = min(budget, prompt.tokens - prompt.device_tokens)
            pieces.append((prompt, prompt.device_tokens, prompt.device_tokens + n))
            budget -= n
        self._run(pieces, started)
        after = self._after(running, pieces)
        for prompt, done in loads:
            assert self.manager is not None
            self.manager.complete_load(prompt.request)
            loading.append((prompt, done))
        after += loading
        loading.clear()
        return after

    def _ask(self, prompt: Prompt) -> int | None:
        """How many chunks hit; None to be asked again."""
        if self.manager is None:
            return 0
        self.manager.asks(prompt.request, prompt.device_tokens)
        hits, deferred = 0, False
        first = prompt.device_tokens // TOKENS
        for key in prompt.keys[first : (prompt.tokens - 1) // TOKENS]:
            answer = self.manager.lookup(prompt.request, key)
            if answer is Lookup.MISS:
                break
            deferred = deferred or answer is Lookup.RETRY
            hits += 1
        return None if deferred else hits

    def _run(self, pieces: list[tuple[Prompt, int, int]], started: list[RequestId]) -> None:
        seconds = sum(self.curve(first, end) for _, first, end in pieces) or IDLE_STEP_S
        self.longest_step_s = max(self.longest_step_s, seconds)
        manager = self.manager
        stored: list[tuple[Prompt, list[ChunkKey]]] = []
        if manager is not None:
            manager.step_end(started, ())
            for prompt, first, end in pieces:
                low, high = first // TOKENS, end // TOKENS
                keys = prompt.keys
                if high > low:
                    parent = keys[low - 1] if low else None
                    admitted = manager.prepare_store(
                        prompt.request, keys[low:high], parent, low * TOKENS
                    )
                    stored.append((prompt, [key for key, _ in admitted or []]))
            manager.step_begins(
                StepWork({each.request: (first, end) for each, first, end in pieces})
            )
        self._go_to(self.now_s + seconds)
        if manager is not None:
            manager.step_done()
            for prompt, keys in stored:
                manager.complete_store(prompt.request, keys)

    def _after(
        self, running: list[tuple[Prompt, int]], pieces: list[tuple[Prompt, int, int]]
    ) -> list[tuple[Prompt, int]]:
        done = {prompt.name: done for prompt, done in running}
        prompts = {prompt.name: prompt for prompt, _ in running}
        for prompt, _, end in pieces:
            done[prompt.name], prompts[prompt.name] = end, prompt
        left: list[tuple[Prompt, int]] = []
        for name, end in done.items():
            prompt = prompts[name]
            if end < prompt.tokens:
                left.append((prompt, end))
                continue
            self.first_token_s[name] = self.now_s - prompt.arrival_s
            if self.manager is not None:
                self.manager.finish(prompt.request)
        return left
