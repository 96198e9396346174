"""A recency list whose unit is the visit: the one place that knows "tail leaves first"."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from emberkv.domain.types import ChunkKey, VisitId


class VisitList:
    """Keys grouped by the visit that used them last; oldest visit first, tail of a visit first.

    Every operation costs O(1) per key. A key stands in one visit only.
    """

    __slots__ = ("_keys_of", "_visit_of")

    def __init__(self) -> None:
        self._keys_of: OrderedDict[VisitId, dict[ChunkKey, None]] = OrderedDict()
        self._visit_of: dict[ChunkKey, VisitId] = {}

    def __len__(self) -> int:
        return len(self._visit_of)

    def __contains__(self, key: object) -> bool:
        return key in self._visit_of

    def visited(self, key: ChunkKey, visit: VisitId) -> bool:
        """Whether this visit is the last that used the key."""
        return self._visit_of.get(key) == visit

    def use(self, keys: Iterable[ChunkKey], visit: VisitId) -> None:
        """Put keys at the tail of a visit, which becomes the newest; keys already in it stay."""
        visit_of, keys_of = self._visit_of, self._keys_of
        bucket = keys_of.setdefault(visit, {})
        left: VisitId | None = None  # most keys of a run come from one visit
        left_bucket = bucket
        for key in keys:
            old = visit_of.get(key)
            if old == visit:
                continue
            if old is not None:
                if old != left:
                    left, left_bucket = old, keys_of[old]
                del left_bucket[key]
                if not left_bucket:
                    del keys_of[old]
                    left = None
            bucket[key] = None
            visit_of[key] = visit
        if bucket:
            keys_of.move_to_end(visit)
        else:
            del keys_of[visit]

    def renew(self, visit: VisitId) -> None:
        """Make a visit the newest."""
        if visit in self._keys_of:
            self._keys_of.move_to_end(visit)

    def discard(self, key: ChunkKey) -> bool:
        """Take a key out; False if it was not there."""
        visit = self._visit_of.pop(key, None)
        if visit is None:
            return False
        self._take_out(key, visit)
        return True

    def victims(self) -> Iterator[ChunkKey]:
        """Keys, first to leave first."""
        for bucket in self._keys_of.values():
            yield from reversed(bucket)

    def _take_out(self, key: ChunkKey, visit: VisitId) -> None:
        bucket = self._keys_of[visit]
        del bucket[key]
        if not bucket:
            del self._keys_of[visit]
