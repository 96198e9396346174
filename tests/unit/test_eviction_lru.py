"""LRU by visits, against a list that is sorted anew each time."""

from __future__ import annotations

from hypothesis import given

from emberkv.domain.types import ChunkKey, VisitId
from emberkv.policy.eviction import Lru
from emberkv.testing.eviction import acts, key_of


class SortedLru:
    """Every key with its visit and its place in it; every visit with when it was last going on."""

    def __init__(self) -> None:
        self.now = 0
        self.going_on: dict[int, int] = {}
        self.place: dict[ChunkKey, tuple[int, int]] = {}

    def use(self, keys: list[ChunkKey], visit: int) -> None:
        self.now += 1
        for key in keys:
            if key not in self.place or self.place[key][0] != visit:
                self.now += 1
                self.place[key] = (visit, self.now)
        self.going_on[visit] = self.now

    def victims(self) -> list[ChunkKey]:
        def age(key: ChunkKey) -> tuple[int, int]:
            visit, joined = self.place[key]
            return (self.going_on[visit], -joined)

        return sorted(self.place, key=age)


@given(acts)
def test_lru_orders_as_a_sorted_list_does(played: list[tuple[str, list[int], int]]) -> None:
    lru, plain = Lru(8), SortedLru()
    for act, numbers, visit in played:
        keys = [key_of(number) for number in numbers]
        held = [key for key in keys if key in plain.place]
        if act == "insert":
            fresh = [key for key in keys if key not in plain.place]
            lru.insert(fresh, VisitId(visit))
            plain.use(fresh, visit)
        elif act == "hit":
            lru.hit(held, VisitId(visit))
            plain.use(held, visit)
        elif act == "renew":
            lru.renew(VisitId(visit))
            plain.use([], visit)
        else:
            for key in held:
                (lru.evict if act == "evict" else lru.discard)(key)
                del plain.place[key]
        assert list(lru.victims()) == plain.victims()
