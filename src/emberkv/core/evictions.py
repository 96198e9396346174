"""Evictions: what follows when chunks leave a tier to make room."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from emberkv.core.counts import Event, Journal
from emberkv.core.residents import Resident
from emberkv.core.retention import Retention
from emberkv.domain.types import RAM, ChunkKey, Drop, Level


class Evictions:
    """Notes who has left, and holds the drops until they are taken."""

    def __init__(self, journal: Journal, retention: Retention) -> None:
        self._journal = journal
        self._retention = retention
        self._drops: list[Drop] = []

    def left(self, level: Level, residents: Sequence[Resident]) -> None:
        """These have just been evicted."""
        if not residents:
            return
        keys = [resident.key for resident in residents]
        self._journal.note(Event.EVICTED, level, keys)
        if level == RAM:
            self._journal.note(Event.WASTED, RAM, [r.key for r in residents if r.unused])
        self._retention.forget(keys)
        self.drop(level, residents)

    def drop(self, level: Level, residents: Sequence[Resident]) -> None:
        """The slots of these hold nothing any more."""
        if residents:
            keys, slots = (r.key for r in residents), (r.slot for r in residents)
            self._drops.append(Drop(level, tuple(keys), tuple(slots)))

    def add(self, drop: Drop) -> None:
        self._drops.append(drop)

    def forget(self, keys: Iterable[ChunkKey]) -> None:
        """Chunks have left otherwise."""
        self._retention.forget(keys)

    def take(self) -> list[Drop]:
        """The drops since the last time."""
        drops, self._drops = self._drops, []
        return drops
