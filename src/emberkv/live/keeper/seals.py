"""Seals: a checksum in a slot's header that says which bytes its generation holds.

A second one covers the header itself: the key, its parent, the generation and the row's checksum.
Only a sealed row that still matches both may be taken over by a restarted engine. Every change of a
header made by the keeper is made here, under one lock, and only if the slot's generation is still
the one the checksum was computed for.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from emberkv.domain.types import Entry, Slot
from emberkv.live.arena import HEADER, READY, Arena

Slots = npt.NDArray[np.int64]
Generations = npt.NDArray[np.uint64]

_FIELDS: Final = dict(HEADER.fields or {})
_NAMED: Final = slice(_FIELDS["key_bytes"][1], _FIELDS["tick"][1])
_ROW_CHECKSUM: Final = slice(_FIELDS["checksum"][1], _FIELDS["sealed"][1])

VERIFY_BATCH_BYTES: Final = 64 << 20
VERIFY_BATCH_SLOTS: Final = 1024


def checksum(row: memoryview) -> int:
    """The checksum of a payload: xxh3-64, the same in headers and on disk."""
    return xxhash.xxh3_64_intdigest(row)


def identity(header: np.void) -> int:
    """The checksum of what a header says of its row: xxh3-64, without state, tick and `sealed`."""
    raw = header.tobytes()
    return xxhash.xxh3_64_intdigest(raw[_NAMED] + raw[_ROW_CHECKSUM])


class Seals:
    """Computes, keeps and verifies the checksums of one arena's rows, on a thread of its own."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._lock = threading.Lock()
        self._epoch = 0
        self._stopped = False
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._start()

    def _start(self) -> None:
        threading.Thread(target=self._run, name="seal", daemon=True).start()

    def generations(self, slots: Slots) -> Generations:
        """The present generation of each slot."""
        found: Generations = self._arena.headers["generation"][slots]
        return found

    @property
    def epoch(self) -> int:
        """Goes up with every `invalidate`; a checksum computed before one is not recorded."""
        return self._epoch

    def request(self, slots: Slots) -> None:
        """Have READY rows sealed soon, each unless its generation changes before."""
        generations = self.generations(slots)
        # Looked at after the generation: READY now means that this generation is complete.
        ready = self._arena.headers["state"][slots] == READY
        self.request_complete(slots[ready], generations[ready])

    def request_complete(self, slots: Slots, generations: Generations) -> None:
        """Have rows sealed soon whose generation, as given, is known to be complete."""
        epoch = self._epoch
        self._jobs.put(lambda: self._seal(slots, generations, epoch))

    def request_all(self) -> None:
        """Have every READY row sealed that is not."""
        headers = self._arena.headers
        unsealed = (headers["state"] == READY) & (headers["sealed"] != headers["generation"])
        self.request(np.flatnonzero(unsealed))

    def checksums(self, slots: Slots, generations: Generations, epoch: int) -> list[int]:
        """The checksum of each row: the recorded one if it is of this generation, else computed.

        What is computed is recorded as well.
        """
        headers = self._arena.headers
        with self._lock:
            known = headers["sealed"][slots] == generations
            sums: list[int] = headers["checksum"][slots].tolist()
        missing = np.flatnonzero(~known)
        if missing.size:
            for at in missing.tolist():
                sums[at] = checksum(self._arena.row(Slot(int(slots[at]))))
            computed = [sums[at] for at in missing.tolist()]
            self._record(slots[missing], generations[missing], computed, epoch)
        return sums

    def invalidate(self) -> None:
        """Take every seal back, those being computed included."""
        with self._lock:
            self._epoch += 1
            self._arena.headers["sealed"] = 0
            self._arena.headers["identity"] = 0  # one damaged bit of `sealed` must not undo this

    def verify(self, on_batch: Callable[[list[Entry], bool], None]) -> None:
        """After what was requested before, compare every sealed READY row with its checksum.

        `on_batch(entries, last)` gets those that match, least recently used first, on the
        thread that computes.
        """
        self._jobs.put(lambda: self._verify(on_batch))

    def stop(self) -> None:
        """End the thread soon, whatever is left to do; does not wait."""
        self._stopped = True
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _seal(self, slots: Slots, generations: Generations, epoch: int) -> None:
        headers = self._arena.headers
        for at, slot in enumerate(slots.tolist()):
            generation = generations[at]
            if self._stopped or epoch != self._epoch:
                return
            if headers["sealed"][slot] == generation:
                continue
            row_checksum = checksum(self._arena.row(Slot(slot)))
            self._record(slots[at : at + 1], generations[at : at + 1], [row_checksum], epoch)

    def _record(
        self, slots: Slots, generations: Generations, checksums: Sequence[int], epoch: int
    ) -> None:
        headers = self._arena.headers
        with self._lock:
            if epoch != self._epoch:
                return
            same = headers["generation"][slots] == generations
            at = slots[same]
            headers["checksum"][at] = np.asarray(checksums, dtype=np.uint64)[same]
            # Of a slot that is renamed just now this may be anything; its generation has changed.
            headers["identity"][at] = [identity(headers[slot]) for slot in at.tolist()]
            headers["sealed"][at] = generations[same]

    def _verify(self, on_batch: Callable[[list[Entry], bool], None]) -> None:
        headers = self._arena.headers
        sealed = (headers["state"] == READY) & (headers["sealed"] == headers["generation"])
        slots = np.flatnonzero(sealed & (headers["generation"] > 0))
        slots = slots[np.argsort(headers["tick"][slots], kind="stable")]
        row_bytes = self._arena.geometry.row_bytes
        step = max(1, min(VERIFY_BATCH_SLOTS, VERIFY_BATCH_BYTES // row_bytes))
        for start in range(0, len(slots), step):
            if self._stopped:
                return
            batch = [
                self._arena.entry(Slot(slot))
                for slot in slots[start : start + step].tolist()
                if identity(headers[slot]) == int(headers["identity"][slot])
                and checksum(self._arena.row(Slot(slot))) == int(headers["checksum"][slot])
            ]
            on_batch(batch, False)
        on_batch([], True)
