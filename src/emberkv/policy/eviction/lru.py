"""LRU, tail first: the chunk used longest ago leaves first, and within one use the tail does.

A chain is used as a whole, so its head is never older than its tail; leaving tail first keeps what
remains a usable prefix.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from emberkv.domain.types import ChunkKey, VisitId
from emberkv.policy.eviction.visits import VisitList


class Lru:
    """Least recently used, by visits. O(1) per key."""

    def __init__(self, capacity_chunks: int) -> None:
        del capacity_chunks  # an order by recency needs no size
        self._recency = VisitList()

    def insert(self, keys: Iterable[ChunkKey], visit: VisitId, /) -> None:
        self._recency.use(keys, visit)

    def hit(self, keys: Iterable[ChunkKey], visit: VisitId, /) -> None:
        self._recency.use(keys, visit)

    def renew(self, visit: VisitId, /) -> None:
        self._recency.renew(visit)

    def evict(self, key: ChunkKey, /) -> None:
        self._recency.discard(key)

    def discard(self, key: ChunkKey, /) -> None:
        self._recency.discard(key)

    def victims(self) -> Iterator[ChunkKey]:
        return self._recency.victims()

    def __len__(self) -> int:
        return len(self._recency)

    def __contains__(self, key: object, /) -> bool:
        return key in self._recency
