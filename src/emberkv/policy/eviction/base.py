"""What an eviction policy is: an order of keys, nothing else.

A *visit* is one request's pass over its chain. A visit names its keys head first; the tail of a
visit leaves before its head, so an order of visits is an order of keys in which a chunk never
stands before its children. The core skips what is pinned and what still has children.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from emberkv.domain.types import ChunkKey, VisitId


class EvictionPolicy(Protocol):
    """Orders the resident keys of one tier; it holds exactly those keys."""

    def insert(self, keys: Iterable[ChunkKey], visit: VisitId, /) -> None:
        """Take in keys that have just become resident, head first."""
        ...

    def hit(self, keys: Iterable[ChunkKey], visit: VisitId, /) -> None:
        """Note that a visit used resident keys, head first; twice in one visit counts once."""
        ...

    def renew(self, visit: VisitId, /) -> None:
        """Note that a visit is still going on."""
        ...

    def evict(self, key: ChunkKey, /) -> None:
        """Let a key go that left to make room; a policy may remember that it was there."""
        ...

    def discard(self, key: ChunkKey, /) -> None:
        """Let a key go that was lost, as if it had never been there."""
        ...

    def victims(self) -> Iterator[ChunkKey]:
        """All keys, first to leave first; lazy; the policy must not change while it is read."""
        ...

    def __len__(self) -> int: ...

    def __contains__(self, key: object, /) -> bool: ...
