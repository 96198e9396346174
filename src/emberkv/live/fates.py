"""Fates: what has happened to chunks of late, for who asks why a chunk is not there.

The core's journal names the chunks of every event. They are kept as they come, newest last, and
searched only when somebody asks: a step pays for handing a list over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Final

from emberkv.core.counts import Event, Journal, Note
from emberkv.domain.types import ChunkKey, Level

MAX_FATES_BYTES: Final = 32 << 20
"""About what the record takes at most; the oldest goes first."""

NOTE_BYTES: Final = 320
KEY_BYTES: Final = 96
MAX_PER_CHUNK: Final = 64
"""Happenings that are told of one chunk; the newest."""


@dataclass(frozen=True, slots=True)
class Cleared:
    """All of a tier was forgotten at once (of every tier, without a level): by `cause`."""

    level: Level | None
    cause: str


@dataclass(frozen=True, slots=True)
class Happening:
    """One thing that happened to one chunk. `policy` is the tier's eviction policy at that time.

    Without an event everything in the tier was forgotten, by `cause`.
    """

    mark: int
    at_s: float
    event: Event | None
    level: Level | None
    policy: str | None = None
    cause: str | None = None


@dataclass(frozen=True, slots=True)
class _Record:
    mark: int
    at_s: float
    what: Note | Cleared
    policy: str | None
    cost_bytes: int


class Fates:
    """A record of `max_bytes`. Written by the scheduler's thread, read by others under its lock.

    `policies` names each tier's eviction policy; whoever changes one says so here.
    """

    def __init__(self, journal: Journal, *, max_bytes: int = MAX_FATES_BYTES) -> None:
        journal.names_chunks = True
        self.policies: dict[Level, str] = {}
        self.began_s: float | None = None
        self._journal = journal
        self._max_bytes = max_bytes
        self._records: deque[_Record] = deque()
        self._bytes = 0
        self._mark = 0

    def take(self, now_s: float) -> None:
        """Take over what the core has noted since the last time."""
        if self.began_s is None:
            self.began_s = now_s
        for note in _merged(self._journal.take()):
            self._keep(now_s, note, len(note.keys))

    def mark(self, now_s: float) -> int:
        """A point in the record: what comes later has a greater mark."""
        self.take(now_s)
        return self._mark

    def cleared(self, level: Level | None, cause: str, now_s: float) -> None:
        """Everything in a tier, or in all of them, has been forgotten."""
        self.take(now_s)
        self._keep(now_s, Cleared(level, cause), 0)

    @property
    def size_bytes(self) -> int:
        """About what the record takes now."""
        return self._bytes

    def of(self, keys: Collection[ChunkKey]) -> dict[ChunkKey, list[Happening]]:
        """What happened to each of `keys`, oldest first; O(the record).

        What was cleared is told of every key.
        """
        asked = frozenset(keys)
        found: dict[ChunkKey, list[Happening]] = {key: [] for key in asked}
        # Asked on other threads too: one step of the interpreter takes the copy.
        for record in reversed(tuple(self._records)):
            what = record.what
            named = asked if isinstance(what, Cleared) else asked.intersection(what.keys)
            if not named:
                continue
            happening = _happening(record)
            for key in named:
                if len(found[key]) < MAX_PER_CHUNK:
                    found[key].append(happening)
        for happenings in found.values():
            happenings.reverse()
        return found

    def latest(self, count: int) -> list[tuple[float, str, Level | None, int]]:
        """The newest records: when, what, where, to how many chunks; the newest first."""
        newest = islice(reversed(self._records), count)
        return [
            (record.at_s, record.what.cause, record.what.level, 0)
            if isinstance(record.what, Cleared)
            else (record.at_s, record.what.event.value, record.what.level, len(record.what.keys))
            for record in newest
        ]

    def _keep(self, now_s: float, what: Note | Cleared, names: int) -> None:
        self._mark += 1
        cost_bytes = NOTE_BYTES + names * KEY_BYTES
        policy = None if what.level is None else self.policies.get(what.level)
        self._records.append(_Record(self._mark, now_s, what, policy, cost_bytes))
        self._bytes += cost_bytes
        while self._bytes > self._max_bytes:
            oldest = self._records.popleft()
            self._bytes -= oldest.cost_bytes
            self.began_s = oldest.at_s


def _merged(notes: list[Note]) -> Iterator[Note]:
    """Notes of one event in one tier that follow each other, as one."""
    at = 0
    while at < len(notes):
        first = notes[at]
        end = at + 1
        while (
            end < len(notes) and notes[end].event is first.event and notes[end].level == first.level
        ):
            end += 1
        if end == at + 1:
            yield first
        else:
            keys = tuple(key for note in notes[at:end] for key in note.keys)
            yield Note(first.event, first.level, keys)
        at = end


def _happening(record: _Record) -> Happening:
    what = record.what
    if isinstance(what, Cleared):
        return Happening(record.mark, record.at_s, None, what.level, cause=what.cause)
    policy = record.policy if what.event is Event.EVICTED else None
    return Happening(record.mark, record.at_s, what.event, what.level, policy)
