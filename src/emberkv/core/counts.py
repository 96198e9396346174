"""What the core counts and, for whoever listens, names: events of chunks, each in a tier."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from emberkv.domain.types import ChunkKey, Level

MAX_NOTES: Final = 65536
"""Notes kept for a listener that does not come; older ones are forgotten."""


class Event(enum.Enum):
    """Something that happened to one chunk."""

    ADMITTED = "admitted"
    EVICTED = "evicted"
    LOST = "lost"  # its bytes were not what they should be
    PROMOTED = "promoted"
    WRITTEN_BEHIND = "written_behind"
    PROMOTION_FAILED = "promotion_failed"
    WRITE_BEHIND_FAILED = "write_behind_failed"
    SHED_QUEUE_FULL = "shed_queue_full"  # too many writes under way
    SHED_NO_ROOM = "shed_no_room"  # nothing evictable in the tier below
    SHED_SLOW_TIER = "shed_slow_tier"  # its reads were late, so that writes had to wait
    REFUSED_NO_ROOM = "refused_no_room"  # nothing evictable in RAM
    REFUSED_UNREACHABLE = "refused_unreachable"  # the chunk before it is nowhere
    REFUSED_BY_HINT = "refused_by_hint"  # the request asked not to keep it
    REFUSED_BY_GATE = "refused_by_gate"  # the tier takes nothing in at present
    REFUSED_BY_QUOTA = "refused_by_quota"  # it would have pushed out another tenant's share
    PROMOTION_CUT = "promotion_cut"  # known below, but it did not fit above
    NOT_WORTH_LOADING = "not_worth_loading"  # to compute it is quicker
    WAIT_SPENT = "wait_spent"  # a request stopped waiting for it
    WASTED = "wasted"  # promoted, and evicted before anyone loaded it


@dataclass(frozen=True, slots=True)
class Note:
    """One event and the chunks it happened to, in chain order where they form one."""

    event: Event
    level: Level
    keys: tuple[ChunkKey, ...]


class Journal:
    """Counts events; while `names_chunks`, also remembers which chunks, until they are taken."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[Event, Level]] = Counter()
        self.names_chunks = False
        self._notes: list[Note] = []

    def note(self, event: Event, level: Level, keys: Sequence[ChunkKey]) -> None:
        """Something has happened to chunks, perhaps to none."""
        if not keys:
            return
        self.counts[event, level] += len(keys)
        if self.names_chunks:
            self._notes.append(Note(event, level, tuple(keys)))
            if len(self._notes) > MAX_NOTES:
                del self._notes[: MAX_NOTES // 2]

    def take(self) -> list[Note]:
        """The notes since the last time."""
        notes, self._notes = self._notes, []
        return notes
