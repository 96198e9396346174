"""What every eviction policy must do, as tests that anyone's policy can be put through.

class TestMyPolicy(EvictionPolicyTests):
    def build(self, capacity_chunks):
        return MyPolicy(capacity_chunks)
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from emberkv.domain.types import ChunkKey, VisitId
from emberkv.policy.eviction import EvictionPolicy

CAPACITY = 8

acts = st.lists(
    st.tuples(
        st.sampled_from(["insert", "hit", "renew", "evict", "discard"]),
        st.lists(st.integers(0, 11), min_size=1, max_size=5, unique=True),
        st.integers(1, 4),
    ),
    max_size=60,
)
paths = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=4), min_size=1, max_size=12)


def key_of(*path: int) -> ChunkKey:
    """A key by the path that leads to it."""
    return ChunkKey(bytes(path))


def chain_of(path: Sequence[int]) -> list[ChunkKey]:
    """The keys on a path in a tree of prefixes, head first."""
    return [key_of(*path[: end + 1]) for end in range(len(path))]


class EvictionPolicyTests:
    """Subclass, and say how to build an empty policy."""

    def build(self, capacity_chunks: int) -> EvictionPolicy:
        raise NotImplementedError

    def test_a_new_policy_orders_nothing(self) -> None:
        policy = self.build(CAPACITY)
        assert len(policy) == 0
        assert list(policy.victims()) == []
        assert key_of(1) not in policy

    def test_it_orders_exactly_the_keys_it_holds(self) -> None:
        given(acts)(self._holds_exactly)()

    def _holds_exactly(self, played: list[tuple[str, list[int], int]]) -> None:
        policy = self.build(CAPACITY)
        held: set[ChunkKey] = set()
        for act, numbers, visit in played:
            keys = [key_of(number) for number in numbers]
            inside = [key for key in keys if key in held]
            if act == "insert":
                fresh = [key for key in keys if key not in held][: CAPACITY - len(held)]
                policy.insert(fresh, VisitId(visit))
                held.update(fresh)
            elif act == "hit":
                policy.hit(inside, VisitId(visit))
            elif act == "renew":
                policy.renew(VisitId(visit))
            else:
                for key in inside:
                    (policy.evict if act == "evict" else policy.discard)(key)
                    held.remove(key)
            order = list(policy.victims())
            assert sorted(order) == sorted(held)
            assert len(policy) == len(held)
            assert all(key in policy for key in held)
            assert not any(key_of(n) in policy for n in range(12) if key_of(n) not in held)

    def test_the_tail_of_a_visit_leaves_first(self) -> None:
        policy = self.build(CAPACITY)
        chain = [key_of(1), key_of(2), key_of(3)]
        policy.insert(chain, VisitId(1))
        assert list(policy.victims()) == chain[::-1]

    def test_an_older_visit_leaves_first(self) -> None:
        policy = self.build(CAPACITY)
        policy.insert([key_of(1)], VisitId(1))
        policy.insert([key_of(2)], VisitId(2))
        assert list(policy.victims()) == [key_of(1), key_of(2)]

    def test_using_a_key_twice_in_one_visit_counts_once(self) -> None:
        policy = self.build(CAPACITY)
        policy.insert([key_of(1), key_of(2)], VisitId(1))
        policy.insert([key_of(3)], VisitId(2))
        policy.insert([key_of(4)], VisitId(2))
        before = list(policy.victims())
        policy.hit([key_of(3)], VisitId(2))
        assert list(policy.victims()) == before

    def test_a_key_that_a_later_visit_used_stays_longer(self) -> None:
        policy = self.build(CAPACITY)
        policy.insert([key_of(1)], VisitId(1))
        policy.insert([key_of(2)], VisitId(2))
        policy.hit([key_of(1)], VisitId(3))
        assert list(policy.victims()) == [key_of(2), key_of(1)]

    def test_no_key_stands_before_its_children(self) -> None:
        """While nothing has left: later, it is the core that keeps parents."""
        given(paths)(self._children_first)()

    def _children_first(self, paths: list[list[int]]) -> None:
        policy = self.build(1000)
        held: set[ChunkKey] = set()
        visits = count(1)
        for path in paths:
            visit = VisitId(next(visits))
            chain = chain_of(path)
            known = [key for key in chain if key in held]
            fresh = chain[len(known) :]
            if known:
                policy.hit(known, visit)
            if fresh:
                policy.insert(fresh, visit)
            held.update(chain)
        order = {key: place for place, key in enumerate(policy.victims())}
        for key, place in order.items():
            if len(key) > 1:
                assert place < order[ChunkKey(key[:-1])]

    def test_the_same_calls_make_the_same_order(self) -> None:
        def play() -> list[ChunkKey]:
            policy = self.build(CAPACITY)
            for number in range(40):
                key = key_of(number * 7 % 11)
                if key in policy:
                    policy.hit([key], VisitId(number))
                    continue
                if len(policy) == CAPACITY:
                    policy.evict(next(policy.victims()))
                policy.insert([key], VisitId(number))
            return list(policy.victims())

        assert play() == play()
