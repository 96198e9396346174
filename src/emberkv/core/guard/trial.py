"""A trial: a share of requests may load from a tier, and is compared with the others."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final

from emberkv.core.guard.figures import Ratios, more_than_chance
from emberkv.core.guard.reasons import Evidence
from emberkv.core.guard.rules import GuardConfig, Signal
from emberkv.domain.types import Level

CHANCE_OF_A_STEP: Final = 0.005
"""How often a sound tier may fail a step by bad luck; it only costs another time out.

Less than one in a hundred, so that a single request fails no trial.
"""


class Verdict(enum.Enum):
    """What a step of a trial has shown so far."""

    OPEN = "open"
    PASSED = "passed"
    QUIET = "quiet"
    FAILED = "failed"


class Trial:
    """One tier on trial. Each step has a share of requests and figures of its own."""

    def __init__(self, config: GuardConfig, level: Level, now_s: float) -> None:
        self._config = config
        self.level = level
        self.step = 0
        self.restart(now_s)

    @property
    def share(self) -> float:
        return self._config.trial_shares[self.step]

    @property
    def is_last_step(self) -> bool:
        return self.step + 1 == len(self._config.trial_shares)

    def restart(self, now_s: float) -> None:
        """Begin the step anew: forget its figures."""
        self.began_s = now_s
        signals = [budget.signal for budget in self._config.budgets]
        self._canary = {signal: Ratios() for signal in signals}
        self._others = {signal: Ratios() for signal in signals}

    def widen(self, now_s: float) -> None:
        """Go on to the next share."""
        self.step += 1
        self.restart(now_s)

    def add(self, signal: Signal, ratio: float, count: int, *, on_trial: bool) -> None:
        (self._canary if on_trial else self._others)[signal].add(ratio, count)

    def samples(self) -> dict[Signal, tuple[int, int]]:
        """How many samples there are, of requests on trial and of the others."""
        return {at: (self._canary[at].count, self._others[at].count) for at in self._canary}

    def judge(
        self, allowances: Mapping[Signal, float], now_s: float
    ) -> tuple[Verdict, list[Evidence]]:
        """What the step has shown, and on which figures.

        Requests on trial may be as slow as the budget allows, or as the others are if those are
        slower still: a server that is slow for reasons of its own fails no tier.
        """
        evidence = [self._evidence(signal, allowances.get(signal, 1.0)) for signal in self._canary]
        seen = [each for each in evidence if each.samples]
        bad = [each for each in seen if more_than_chance(each.over, each.samples, CHANCE_OF_A_STEP)]
        if bad:
            return Verdict.FAILED, bad
        if seen and all(each.samples >= self._config.trial_samples for each in seen):
            return Verdict.PASSED, seen
        if now_s - self.began_s >= self._config.patience_s:
            return Verdict.QUIET, seen
        return Verdict.OPEN, []

    def _evidence(self, signal: Signal, allowance: float) -> Evidence:
        canary, others = self._canary[signal], self._others[signal]
        threshold = max(1.0, allowance)
        if others.count >= self._config.min_samples:
            threshold = max(threshold, others.p99())
        budget = next(each for each in self._config.budgets if each.signal is signal)
        return Evidence(
            signal, canary.p99(), threshold, canary.over(threshold), canary.count, budget.single_s
        )
