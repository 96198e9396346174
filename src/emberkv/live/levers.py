"""What an operator changes of a tier stack while it runs."""

from __future__ import annotations

from itertools import groupby
from typing import Protocol, runtime_checkable

from emberkv.core.gates import OPEN, Gate
from emberkv.core.limits import Limits
from emberkv.core.stack import TierStack
from emberkv.domain.types import Level
from emberkv.errors import ControlError
from emberkv.policy.eviction import EVICTION_POLICIES


@runtime_checkable
class Levers(Protocol):
    """The calls that change a running stack; between passes only."""

    @property
    def limits(self) -> Limits: ...

    def gate(self, level: Level) -> Gate:
        """How far a tier is open."""
        ...

    def set_gate(self, level: Level, gate: Gate) -> None:
        """Open or shut a tier."""
        ...

    def empty(self, level: Level) -> None:
        """Evict all of a tier that may leave it."""
        ...

    def set_policy(self, level: Level, name: str) -> None:
        """Order what is in a tier by another eviction policy from now on."""
        ...

    def set_limits(self, limits: Limits) -> None:
        """Put other limits in force."""
        ...


def levers_of(stack: TierStack) -> Levers:
    """The levers of a stack: its own, or such as can be had from outside."""
    own: object = stack
    if isinstance(own, Levers):
        return own
    return _FromOutside(stack)


class _FromOutside:
    """Levers for a stack without its own; gates can't be had from outside."""

    def __init__(self, stack: TierStack) -> None:
        self._stack = stack

    @property
    def limits(self) -> Limits:
        return self._stack.limits

    def gate(self, level: Level) -> Gate:
        return OPEN

    def set_gate(self, level: Level, gate: Gate) -> None:
        raise ControlError("this version can't shut a tier")

    def empty(self, level: Level) -> None:
        stack = self._stack
        tier = stack.tiers[level]
        left = tier.make_room(tier.slot_count, None)
        stack._drop(stack._evicted(level, left))

    def set_policy(self, level: Level, name: str) -> None:
        tier = self._stack.tiers[level]
        policy = EVICTION_POLICIES[name](tier.slot_count)
        # Oldest visit first, and within a visit head first, as the keys came.
        by_visit = groupby(tier.policy.victims(), key=lambda key: tier.entries[key].visit)
        for visit, keys in by_visit:
            policy.insert(list(keys)[::-1], visit)
        tier.policy = policy

    def set_limits(self, limits: Limits) -> None:
        stack = self._stack
        stack.limits = stack.transfers.limits = stack.promotions._limits = limits
