"""What a victim of the kill tests leaves behind: a page of words in memory that outlives it.

The victim writes, as it goes, where each of its threads is and what it has begun and finished;
whoever killed it reads them afterwards. Nothing here is part of what is tested.
"""

from __future__ import annotations

import enum
import itertools
import mmap
import os
from collections.abc import Sequence

import numpy as np

MAX_THREADS = 16
MAX_SLOTS = 64
WEIGHTS_STEP = 1000
"""A chunk's id is its number, which makes its key, plus this for each change of weights."""

_CHUNK_BITS = 24
_PERHAPS = 1 << 63
_WORD_BYTES = 8
_FIRST_ARRAY = 16
_WORD_COUNT = _FIRST_ARRAY + MAX_THREADS + 4 * MAX_SLOTS


def chunk_of(word: int) -> int:
    """The chunk's id in a word of `begun` or `done`; 0 for none."""
    return int(word) & ((1 << _CHUNK_BITS) - 1)


def perhaps(word: int) -> int:
    """A word that names the same chunk and acknowledges nothing."""
    return word | _PERHAPS


class Place(enum.IntEnum):
    """Where a thread is. A kill is counted at one place: the first of these that a thread is at."""

    ELSEWHERE = 0
    CLEARING_RECORD = 1  # of the slab: the first of the three steps of writing a slot
    WRITING_PAYLOAD = 2
    WRITING_RECORD = 3
    RESETTING_SLAB = 4  # the slab's file header is being rewritten
    ARENA_HEADER = 5  # the manager updates headers of the arena
    ARENA_SEAL = 6  # the keeper records checksums in headers of the arena
    OPENING_SLAB = 7  # the slab is made, opened or resized
    READING_SLAB = 8
    WRITING_ROW = 9  # a row of the arena


SLAB_WRITES = frozenset({Place.CLEARING_RECORD, Place.WRITING_PAYLOAD, Place.WRITING_RECORD})
HEADER_UPDATES = frozenset({Place.RESETTING_SLAB, Place.ARENA_HEADER, Place.ARENA_SEAL})


class Words:
    """A mapping of the words. In each pair of `begun` and `done`, equal words mean: acknowledged.

    Such a word is a chunk's id below a serial number, so that writing the same chunk into a slot
    once more is told from having written it.
    """

    SIZE_BYTES = _WORD_COUNT * _WORD_BYTES

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, self.SIZE_BYTES)
        words = np.frombuffer(self._map, dtype=np.uint64)
        self._first = words[:_FIRST_ARRAY]
        ends = np.cumsum([_FIRST_ARRAY, MAX_THREADS, *[MAX_SLOTS] * 4])
        arrays = [words[a:b] for a, b in itertools.pairwise(ends)]
        self.places, self.disk_begun, self.disk_done, self.ram_begun, self.ram_done = arrays

    @classmethod
    def create(cls) -> tuple[int, Words]:
        """New words, all zero, and the descriptor of their memory."""
        fd = os.memfd_create("kill-words", os.MFD_CLOEXEC)
        os.ftruncate(fd, cls.SIZE_BYTES)
        return fd, cls(fd)

    def clear(self) -> None:
        """Forget everything: a new history begins."""
        self._first[:] = 0
        for array in (self.disk_begun, self.disk_done, self.ram_begun, self.ram_done):
            array[:] = 0
        self.forget_places()

    @property
    def weights(self) -> int:
        """How often everything was reset, which is acknowledged by this number."""
        return int(self._first[0])

    @weights.setter
    def weights(self, value: int) -> None:
        self._first[0] = value

    @property
    def steps(self) -> int:
        """How many operations the victim has begun."""
        return int(self._first[1])

    @steps.setter
    def steps(self, value: int) -> None:
        self._first[1] = value

    def begin(self, begun: np.ndarray, slots: Sequence[int], chunks: Sequence[int]) -> list[int]:
        """Say that chunks are about to be written to slots; what to put into `done` then."""
        serial = int(self._first[2]) + 1
        self._first[2] = serial
        words = [serial << _CHUNK_BITS | chunk for chunk in chunks]
        begun[list(slots)] = words
        return words

    def forget_places(self) -> None:
        """A new life begins."""
        self.places[:] = 0
        self._first[3] = Place.ELSEWHERE
        self.steps = 0

    def die_at(self, place: Place) -> None:
        """The victim is about to kill itself there."""
        self._first[3] = place

    def place(self) -> Place:
        """Where the kill has fallen."""
        if self._first[3]:
            return Place(int(self._first[3]))
        found = {Place(int(value)) for value in self.places} - {Place.ELSEWHERE}
        return min(found, default=Place.ELSEWHERE)
