"""ARC, the adaptive replacement cache, over visits.

Two recency lists hold what is resident: *once* for chunks used by one visit, *again* for chunks
used by more. Two ghost lists remember what left each. A chunk that comes back soon after leaving
*once* says that recency deserves more room, one that comes back after leaving *again* says that
frequency does; the target size of *once* moves accordingly. The victim comes from *once* while it
is larger than its target, else from *again*.

Source: Megiddo and Modha, "ARC: a self-tuning, low overhead replacement cache", FAST 2003. Ours
differs in that uses within one visit count once, and that a victim may be skipped by the core.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from emberkv.domain.types import ChunkKey, VisitId
from emberkv.policy.eviction.visits import VisitList


class Arc:
    """Adaptive replacement for `capacity_chunks` chunks. O(1) per key."""

    def __init__(self, capacity_chunks: int) -> None:
        self._capacity = capacity_chunks
        self._once_target = 0.0
        self._once = VisitList()
        self._again = VisitList()
        self._once_ghosts: OrderedDict[ChunkKey, None] = OrderedDict()
        self._again_ghosts: OrderedDict[ChunkKey, None] = OrderedDict()

    def insert(self, keys: Iterable[ChunkKey], visit: VisitId, /) -> None:
        fresh: list[ChunkKey] = []
        returning: list[ChunkKey] = []
        for key in keys:
            (returning if self._recall(key) else fresh).append(key)
        self._once.use(fresh, visit)
        self._again.use(returning, visit)
        self._trim_ghosts()

    def hit(self, keys: Iterable[ChunkKey], visit: VisitId, /) -> None:
        used_again: list[ChunkKey] = []
        for key in keys:
            if self._once.visited(key, visit):
                continue
            self._once.discard(key)
            used_again.append(key)
        self._again.use(used_again, visit)
        self._once.renew(visit)

    def renew(self, visit: VisitId, /) -> None:
        self._once.renew(visit)
        self._again.renew(visit)

    def evict(self, key: ChunkKey, /) -> None:
        if self._once.discard(key):
            self._once_ghosts[key] = None
        elif self._again.discard(key):
            self._again_ghosts[key] = None

    def discard(self, key: ChunkKey, /) -> None:
        if not self._once.discard(key):
            self._again.discard(key)

    def victims(self) -> Iterator[ChunkKey]:
        once, again = self._once.victims(), self._again.victims()
        once_left, again_left = len(self._once), len(self._again)
        while once_left or again_left:
            if once_left and (once_left > self._once_target or not again_left):
                once_left -= 1
                yield next(once)
            else:
                again_left -= 1
                yield next(again)

    def __len__(self) -> int:
        return len(self._once) + len(self._again)

    def __contains__(self, key: object, /) -> bool:
        return key in self._once or key in self._again

    def _recall(self, key: ChunkKey) -> bool:
        """Whether a key left not long ago; moves the target by what that says."""
        once, again = self._once_ghosts, self._again_ghosts
        if key in once:
            step = max(1.0, len(again) / len(once))
            self._once_target = min(float(self._capacity), self._once_target + step)
            del once[key]
            return True
        if key in again:
            step = max(1.0, len(once) / len(again))
            self._once_target = max(0.0, self._once_target - step)
            del again[key]
            return True
        return False

    def _trim_ghosts(self) -> None:
        once, again = self._once_ghosts, self._again_ghosts
        while once and len(self._once) + len(once) > self._capacity:
            once.popitem(last=False)
        while again and len(self) + len(once) + len(again) > 2 * self._capacity:
            again.popitem(last=False)
