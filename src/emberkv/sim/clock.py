"""Virtual time: what ends when, and a driver whose copies take as long as a simple model says."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Generic, TypeVar

from emberkv.domain.types import Copy, Level, Outcome, TransferId

T = TypeVar("T")


class FinishHeap(Generic[T]):
    """Things that end at known times; equal times end in the order they were added."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, T]] = []
        self._order = count()

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, at_s: float, item: T) -> None:
        heapq.heappush(self._heap, (at_s, next(self._order), item))

    def next_s(self) -> float | None:
        """When the next thing ends, if there is one."""
        return self._heap[0][0] if self._heap else None

    def due(self, now_s: float) -> list[T]:
        """Take out all that has ended by now, in order."""
        ended: list[T] = []
        while self._heap and self._heap[0][0] <= now_s:
            ended.append(heapq.heappop(self._heap)[2])
        return ended


@dataclass(frozen=True, slots=True)
class TierSpeed:
    """How fast a tier below RAM reads and writes; both at once, one copy after another each."""

    latency_s: float = 100e-6
    read_bytes_per_s: float = 2e9
    write_bytes_per_s: float = 1e9


@dataclass(frozen=True, slots=True)
class Ended:
    """Chunks of a copy that have ended, by their index in it."""

    transfer: TransferId
    results: tuple[tuple[int, Outcome], ...]


class SimulatedDriver:
    """Ends every copy well, `latency + bytes / bandwidth` after its tier has come to it.

    `speeds[level]` is that of the tier at `level`; RAM's is not used. Chunks are reported as they
    arrive, `report_chunks` at a time.
    """

    def __init__(
        self, speeds: Sequence[TierSpeed], chunk_bytes: int, report_chunks: int = 16
    ) -> None:
        self._speeds = tuple(speeds)
        self._chunk_bytes = chunk_bytes
        self._report_chunks = report_chunks
        self._busy_until_s: dict[tuple[Level, bool], float] = {}
        self._ends: FinishHeap[Ended] = FinishHeap()

    def submit(self, copies: Sequence[Copy], now_s: float) -> None:
        for copy in copies:
            upward = copy.target < copy.source
            lower = copy.source if upward else copy.target
            speed = self._speeds[lower]
            bytes_per_s = speed.read_bytes_per_s if upward else speed.write_bytes_per_s
            at_s = max(now_s, self._busy_until_s.get((lower, upward), 0.0)) + speed.latency_s
            for first in range(0, len(copy.keys), self._report_chunks):
                last = min(first + self._report_chunks, len(copy.keys))
                at_s += (last - first) * self._chunk_bytes / bytes_per_s
                results = tuple((index, Outcome.OK) for index in range(first, last))
                self._ends.add(at_s, Ended(copy.transfer, results))
            self._busy_until_s[lower, upward] = at_s

    def next_s(self) -> float | None:
        """When the next chunks arrive, if any are under way."""
        return self._ends.next_s()

    def poll(self, now_s: float) -> list[Ended]:
        """What has ended by now."""
        return self._ends.due(now_s)
