"""Eviction policies by name."""

from __future__ import annotations

from collections.abc import Callable

from emberkv.policy.eviction.arc import Arc
from emberkv.policy.eviction.base import EvictionPolicy
from emberkv.policy.eviction.lru import Lru

EVICTION_POLICIES: dict[str, Callable[[int], EvictionPolicy]] = {"lru": Lru, "arc": Arc}
"""Name → constructor; the argument is the tier's capacity in chunks."""

__all__ = ["EVICTION_POLICIES", "Arc", "EvictionPolicy", "Lru"]
