"""A server's latencies on a virtual clock, with a guard that sets the gates of its tiers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from emberkv.core.gates import Gates
from emberkv.core.guard import Budget, GateChange, Guard, GuardConfig, Limit, Signal
from emberkv.domain.types import DISK, Level, RequestId

BUDGET_S = 1.0
CONFIG = GuardConfig(budgets=(Budget(Signal.FIRST_TOKEN, (Limit(None, BUDGET_S),)),))

FirstToken = Callable[[float, frozenset[Level]], float]
"""When, and which tiers a request may load from → its time to first token."""


@dataclass
class GuardedServer:
    """Some requests a second; each may load from the tiers that the gates let it."""

    first_token: FirstToken
    config: GuardConfig = CONFIG
    levels: int = 2
    per_second: int = 10
    now_s: float = 1000.0
    changes: list[GateChange] = field(default_factory=list)
    numbers: Random = field(default_factory=lambda: Random(7))

    def __post_init__(self) -> None:
        self.guard = Guard(self.config, self.levels)
        self.gates = Gates(self.levels)
        self.asked = 0

    def run(self, seconds: float) -> list[GateChange]:
        """Let time pass; returns what the guard changed meanwhile."""
        before = len(self.changes)
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            for _ in range(self.per_second):
                self.request()
            self.now_s += 1.0
            for change in self.guard.decide(self.now_s):
                self.changes.append(change)
                self.gates.set(change.level, change.gate)
        return self.changes[before:]

    def request(self) -> None:
        self.asked += 1
        request = RequestId(str(self.asked))
        levels = [Level(at) for at in range(self.levels)]
        loads = frozenset(level for level in levels if self.gates.loads(level, request))
        on_trial = bool(self.gates.on_trial(request))
        value_s = self.first_token(self.now_s, loads) * self.numbers.uniform(0.8, 1.0)
        self.guard.observe(
            Signal.FIRST_TOKEN, value_s, self.now_s, context_tokens=500, on_trial=on_trial
        )
        self.gates.forget(request)

    def run_until(self, done: Callable[[], bool], limit_s: float = 50_000) -> None:
        end_s = self.now_s + limit_s
        while not done():
            assert self.now_s < end_s, [str(change.reason) for change in self.changes]
            self.run(1)


def slow_disk(_now_s: float, loads: frozenset[Level]) -> float:
    """Whoever may load from disk is three times over the budget."""
    return 3.0 if DISK in loads else 0.5
