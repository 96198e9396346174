"""Tier I/O: copies between the arena and one storage below it, by two pools of threads.

    submit ─► cut into batches ─► read queue  ─► read threads  ─► storage.read  into arena rows
                               └► write queue ─► write threads ─► storage.write from arena rows

A promotion never waits behind a write-behind. One copy's batches run on several threads at once,
and each is reported as soon as it ends, so chunks are usable as they arrive. A row whose
generation is no longer the one of the order is left alone.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from emberkv.domain.types import RAM, Copy, Outcome, Slot
from emberkv.live.arena import Arena
from emberkv.live.keeper.seals import Generations, Seals, Slots
from emberkv.tiers.base import Record, SlotStorage

BATCH_BYTES: Final = 2 << 20
"""A batch is as many chunks as fit, but one at least: large enough for the device."""

FIRST_READ_BYTES: Final = 256 << 10
"""The first batch of a promotion for each thread is this small: a request waits only while chunks
arrive, so the first ones must be there early even where the device is slow."""

Report = Callable[[Copy, int, Sequence[Outcome], float], None]
"""Called on the thread that did the work: copy, index of the first chunk, outcomes, busy_s."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Batch:
    """Consecutive chunks `first` … `last - 1` of a copy, and their arena rows when ordered."""

    copy: Copy
    first: int
    last: int
    slots: Slots
    generations: Generations
    epoch: int
    round: int
    report: Report


_Queue = queue.SimpleQueue[_Batch | None]


class TierIo:
    """The queues and threads of one storage. `submit` never blocks."""

    def __init__(
        self,
        arena: Arena,
        seals: Seals,
        storage: SlotStorage,
        *,
        read_threads: int = 8,
        write_threads: int = 4,
        batch_bytes: int = BATCH_BYTES,
    ) -> None:
        """Start the threads. The storage is this object's from now on, to be closed by `close`."""
        self._arena = arena
        self._seals = seals
        self.storage = storage
        self._batch_chunks = max(1, batch_bytes // arena.geometry.row_bytes)
        self._first_chunks = max(1, min(batch_bytes, FIRST_READ_BYTES) // arena.geometry.row_bytes)
        self._read_threads = read_threads
        self._reads: _Queue = queue.SimpleQueue()
        self._writes: _Queue = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._unfinished = 0
        self._round = 0
        self._write_round = 0
        self._writing = 0
        self._when_written: list[Callable[[], None]] = []
        self._reading: dict[_Batch, Callable[[list[Slot]], None] | None] = {}
        self._when_idle: list[Callable[[], None]] = []
        self._pools = (
            (self._reads, self._read, read_threads),
            (self._writes, self._write, write_threads),
        )
        self._start()

    def _start(self) -> None:
        for waiting, work, count in self._pools:
            for _ in range(count):
                threading.Thread(target=self._run, args=(waiting, work), daemon=True).start()

    @property
    def chunks_under_way(self) -> int:
        """Chunks queued or running."""
        return self._unfinished

    def submit(self, copy: Copy, report: Report) -> None:
        """Queue a copy; each of its chunks is reported once.

        Target rows of a promotion must be marked WRITING before, source rows of a write-behind
        READY.
        """
        upward = copy.target == RAM
        slots = np.asarray(copy.target_slots if upward else copy.source_slots, dtype=np.int64)
        generations, epoch = self._seals.generations(slots), self._seals.epoch
        waiting = self._reads if upward else self._writes
        with self._lock:
            self._unfinished += len(slots)
            this_round = self._round if upward else self._write_round
        for first, last in self._cuts(len(slots), upward=upward):
            part = slice(first, last)
            waiting.put(
                _Batch(copy, first, last, slots[part], generations[part], epoch, this_round, report)
            )

    def _cuts(self, count: int, *, upward: bool) -> Iterator[tuple[int, int]]:
        """Batches of a copy of `count` chunks: small ones first if someone may wait for it.

        What is left after those is shared out among the threads.
        """
        first = 0
        for _ in range(self._read_threads if upward else 0):
            if first < count:
                last = min(first + self._first_chunks, count)
                yield first, last
                first = last
        size = self._batch_chunks
        if upward:
            threads = max(1, self._read_threads)
            size = max(1, min(size, -(-(count - first) // threads)))
        while first < count:
            last = min(first + size, count)
            yield first, last
            first = last

    def cancel(self, *, writes_too: bool) -> None:
        """Report queued promotions, or everything queued, as SHED; what runs goes on."""
        with self._lock:
            self._round += 1
            self._write_round += writes_too
        for waiting, work, count in self._pools:
            if work == self._write and not writes_too:
                continue
            stops = 0
            while True:
                try:
                    batch = waiting.get_nowait()
                except queue.Empty:
                    break
                if batch is None:
                    stops += 1
                else:
                    self._end(batch, [Outcome.SHED] * (batch.last - batch.first), 0.0)
            for _ in range(min(stops, count)):
                waiting.put(None)

    def quarantine(self, on_read: Callable[[list[Slot]], None]) -> list[Slot]:
        """The arena slots of reads that run now.

        `on_read` is called with those of each read when it has ended, on its thread.
        """
        with self._lock:
            for batch in self._reading:
                self._reading[batch] = on_read
            return [slot for batch in self._reading for slot in _slots_of(batch)]

    def when_idle(self, call: Callable[[], None]) -> None:
        """Make a call, on whatever thread, as soon as nothing is queued or running."""
        with self._lock:
            if self._unfinished:
                self._when_idle.append(call)
                return
        call()

    def when_written(self, call: Callable[[], None]) -> None:
        """Make a call, on whatever thread, as soon as no write runs; cancel the queued ones first.

        What begins to be written after a reset is of what follows it; so nothing from before may.
        """
        with self._lock:
            if self._writing:
                self._when_written.append(call)
                return
        call()

    def close(self) -> None:
        """Shed what is queued, end idle threads and close the storage. Waits for nothing."""
        self.cancel(writes_too=True)
        for waiting, _, count in self._pools:
            for _ in range(count):
                waiting.put(None)
        self.storage.close()

    # ── on the threads ───────────────────────────────────────────────────────────────────────

    def _run(self, waiting: _Queue, work: Callable[[_Batch], Sequence[Outcome]]) -> None:
        while (batch := waiting.get()) is not None:
            started_s = time.perf_counter()
            try:
                outcomes = work(batch)
            except Exception:
                # A storage may not raise. If one does, its chunks must still end.
                _log.exception("a storage failed in an unexpected way")
                outcomes = [Outcome.FAILED] * (batch.last - batch.first)
            self._end(batch, outcomes, time.perf_counter() - started_s)

    def _end(self, batch: _Batch, outcomes: Sequence[Outcome], busy_s: float) -> None:
        batch.report(batch.copy, batch.first, outcomes, busy_s)
        idle: list[Callable[[], None]] = []
        with self._lock:
            on_read = self._reading.pop(batch, None)
            self._unfinished -= batch.last - batch.first
            if not self._unfinished:
                idle, self._when_idle = self._when_idle, []
        if on_read is not None:
            on_read(_slots_of(batch))
        for call in idle:
            call()

    def _read(self, batch: _Batch) -> Sequence[Outcome]:
        copy = batch.copy
        with self._lock:
            cancelled = batch.round != self._round
            if not cancelled:
                self._reading[batch] = None
        if cancelled or self._is_stale(batch):
            return [Outcome.SHED] * (batch.last - batch.first)
        records = [
            Record(copy.keys[at], copy.parents[at], copy.source_slots[at])
            for at in range(batch.first, batch.last)
        ]
        outcomes = self.storage.read(records, [self._arena.row(s) for s in _slots_of(batch)])
        if batch.epoch == self._seals.epoch:
            arrived = np.array([outcome is Outcome.OK for outcome in outcomes], dtype=bool)
            self._seals.request_complete(batch.slots[arrived], batch.generations[arrived])
        return outcomes

    def _write(self, batch: _Batch) -> Sequence[Outcome]:
        if not self._begin_write(batch):
            return [Outcome.SHED] * (batch.last - batch.first)
        try:
            return self._write_begun(batch)
        finally:
            self._end_write()

    def _begin_write(self, batch: _Batch) -> bool:
        """Whether a batch may still be written; if so it counts as running."""
        with self._lock:
            if batch.round != self._write_round:
                return False
            self._writing += 1
        return True

    def _end_write(self) -> None:
        calls: list[Callable[[], None]] = []
        with self._lock:
            self._writing -= 1
            if not self._writing:
                calls, self._when_written = self._when_written, []
        for call in calls:
            call()

    def _write_begun(self, batch: _Batch) -> Sequence[Outcome]:
        copy = batch.copy
        if self._is_stale(batch):
            return [Outcome.SHED] * (batch.last - batch.first)
        checksums = self._seals.checksums(batch.slots, batch.generations, batch.epoch)
        records = [
            Record(copy.keys[at], copy.parents[at], copy.target_slots[at], row_checksum)
            for at, row_checksum in zip(range(batch.first, batch.last), checksums, strict=True)
        ]
        outcomes = self.storage.write(records, [self._arena.row(s) for s in _slots_of(batch)])
        if self._is_stale(batch):
            return [Outcome.FAILED] * (batch.last - batch.first)
        return outcomes

    def _is_stale(self, batch: _Batch) -> bool:
        """Whether a row has been given to another chunk since the order."""
        return not np.array_equal(self._seals.generations(batch.slots), batch.generations)


def _slots_of(batch: _Batch) -> list[Slot]:
    return [Slot(slot) for slot in batch.slots.tolist()]
