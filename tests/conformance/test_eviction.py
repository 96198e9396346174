"""Our own eviction policies pass the suite that anyone's must."""

from __future__ import annotations

from emberkv.policy.eviction import Arc, EvictionPolicy, Lru
from emberkv.testing.eviction import EvictionPolicyTests


class TestLru(EvictionPolicyTests):
    def build(self, capacity_chunks: int) -> EvictionPolicy:
        return Lru(capacity_chunks)


class TestArc(EvictionPolicyTests):
    def build(self, capacity_chunks: int) -> EvictionPolicy:
        return Arc(capacity_chunks)
