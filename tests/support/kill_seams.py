"""Puts a victim's file and memory writes under watch: where it is, and where it is to die.

The seams are functions and arrays that production code looks up when it runs; they are replaced
in the victim's process only. A planned death falls in the middle of one write: its first bytes
get to the file or the memory, the others never do.
"""

from __future__ import annotations

import functools
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from kill_words import HEADER_UPDATES, SLAB_WRITES, Place, Words

from emberkv.live.arena import Arena
from emberkv.live.keeper.seals import Seals
from emberkv.tiers import block_io, payload_file, slab, slab_files
from emberkv.tiers.format import RECORD_BYTES
from emberkv.tiers.slab import Slab

SECTOR_BYTES = 512

GROUPS = {
    "slab write": SLAB_WRITES,
    "arena header": frozenset({Place.ARENA_HEADER, Place.ARENA_SEAL}),
    "slab header": HEADER_UPDATES - {Place.ARENA_HEADER, Place.ARENA_SEAL},
    "opening": frozenset({Place.OPENING_SLAB}),
}


@dataclass(frozen=True)
class Death:
    """When a victim kills itself: in the `nth` write of a group, after a `share` of its bytes."""

    group: str
    nth: int
    share: float


class Seams:
    """The watched writes of one process."""

    def __init__(self, words: Words, death: Death | None) -> None:
        self._words = words
        self._death = death
        self._left = death.nth if death is not None else 0
        self._lock = threading.Lock()
        self._local = threading.local()
        self._threads = 0

    @contextmanager
    def at(self, place: Place) -> Iterator[None]:
        """This thread is at a place for a while."""
        before = self._now()
        self._go(place)
        try:
            yield
        finally:
            self._go(before)

    def _index(self) -> int:
        index: int | None = getattr(self._local, "index", None)
        if index is None:
            with self._lock:
                index = self._local.index = self._threads
                self._threads += 1
        return index

    def _now(self) -> Place:
        return Place(int(self._words.places[self._index()]))

    def _go(self, place: Place) -> None:
        self._words.places[self._index()] = place

    def _dies_now(self, place: Place) -> bool:
        """Whether the planned death falls into the write that begins now."""
        if self._death is None or place not in GROUPS[self._death.group]:
            return False
        with self._lock:
            self._left -= 1
            return self._left == 0

    def die(self, place: Place) -> None:
        self._words.die_at(place)
        os.kill(os.getpid(), signal.SIGKILL)

    # ── files ────────────────────────────────────────────────────────────────────────────────

    def write_at(self, fd: int, buffers: Sequence[memoryview], offset: int, place: Place) -> None:
        """Write; or write the beginning and die."""
        self._go(place)
        if self._dies_now(place):
            unit = 8 if place in {Place.CLEARING_RECORD, Place.WRITING_RECORD} else SECTOR_BYTES
            with suppress(OSError):  # a device may take whole blocks only
                block_io.write_at(fd, self._beginning(buffers, unit), offset)
            self.die(place)
        block_io.write_at(fd, buffers, offset)

    def _beginning(self, buffers: Sequence[memoryview], unit: int) -> list[memoryview]:
        assert self._death is not None
        total = sum(buffer.nbytes for buffer in buffers)
        left = int(total * self._death.share) // unit * unit
        found = []
        for buffer in buffers:
            if left > 0:
                found.append(buffer.cast("B")[: min(left, buffer.nbytes)])
                left -= buffer.nbytes
        return found

    def watch_files(self) -> None:
        """Watch what the slab writes, by step."""

        def index_write(fd: int, buffers: Sequence[memoryview], offset: int) -> None:
            clears = not any(buffers[0][:RECORD_BYTES])
            place = Place.CLEARING_RECORD if clears else Place.WRITING_RECORD
            self.write_at(fd, buffers, offset, place)

        def data_write(fd: int, buffers: Sequence[memoryview], offset: int) -> None:
            self.write_at(fd, buffers, offset, Place.WRITING_PAYLOAD)

        def other_write(fd: int, buffers: Sequence[memoryview], offset: int) -> None:
            self.write_at(fd, buffers, offset, self._now())

        slab.write_at = index_write  # type: ignore[assignment]
        payload_file.write_at = data_write  # type: ignore[assignment]
        slab_files.write_at = other_write  # type: ignore[assignment]
        for name in ("preallocate", "supports_direct_io", "check_sizes"):
            setattr(slab_files, name, self._dying_before(getattr(slab_files, name)))
        self._bracket(Slab, "_write_run", Place.CLEARING_RECORD)
        self._bracket(Slab, "_read_run", Place.READING_SLAB)
        self._bracket(Slab, "reset", Place.RESETTING_SLAB)

    def _dying_before(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def watched(*arguments: Any) -> Any:
            if self._dies_now(self._now()):
                self.die(self._now())
            return call(*arguments)

        return watched

    def _bracket(self, owner: type, name: str, place: Place) -> None:
        inner = getattr(owner, name)

        @functools.wraps(inner)
        def watched(*arguments: Any, **named: Any) -> Any:
            with self.at(place):
                return inner(*arguments, **named)

        setattr(owner, name, watched)

    # ── memory ───────────────────────────────────────────────────────────────────────────────

    def watch_headers(self, arena: Arena) -> None:
        """Watch every store into the arena's headers, one by one."""
        stepped = arena.headers.view(SteppedHeaders)
        stepped.seams = self
        arena.headers = stepped
        for name in ("mark_writing", "mark_ready", "mark_used", "mark_free"):
            self._bracket(Arena, name, Place.ARENA_HEADER)
        self._bracket(Seals, "_record", Place.ARENA_SEAL)
        self._bracket(Seals, "invalidate", Place.ARENA_SEAL)

    def store(self, target: np.ndarray, position: int, value: np.ndarray) -> None:
        """Store one field of one header; or the beginning of it and die."""
        if self._dies_now(self._now()):
            assert self._death is not None
            if target.ndim > 1:  # a key: several machine words
                part = int(target.shape[1] * self._death.share)
                target[position, :part] = value[:part]
            elif random.Random(self._death.share).random() < 0.5:
                target[position] = value
            self.die(self._now())
        target[position] = value


class SteppedHeaders(np.ndarray):
    """Headers whose every store of one field in one slot goes through the seams."""

    seams: Seams | None = None

    def __array_finalize__(self, source: object) -> None:
        self.seams = getattr(source, "seams", None)

    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(index, str):
            self[index][...] = value
            return
        target = self.view(np.ndarray)
        if self.seams is None or self.base is None:  # a copy
            target[index] = value
            return
        positions = np.atleast_1d(np.arange(len(target))[index])
        values = np.broadcast_to(
            np.asarray(value, dtype=target.dtype), (len(positions), *target.shape[1:])
        )
        for position, each in zip(positions.tolist(), values, strict=True):
            self.seams.store(target, position, each)
