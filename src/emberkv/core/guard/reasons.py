"""Why a guard changed a gate: the cause, and the figures it was decided on."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from emberkv.core.gates import Gate
from emberkv.core.guard.rules import Signal
from emberkv.domain.types import Level


class Cause(enum.Enum):
    """What led to a change."""

    BREACH = "breach"  # a budget was broken for a whole window: loads are taken out
    BREACH_GOES_ON = "breach_goes_on"  # … and still is without its loads: stores as well
    COOLED_DOWN = "cooled_down"  # the time out is over, and budgets are met: trial
    NOT_THE_TIER = "not_the_tier"  # the time out is over, and it did not help: trial
    TRIAL_PASSED = "trial_passed"  # requests on trial were no slower: wider, or open
    TRIAL_QUIET = "trial_quiet"  # too few requests to judge by, none at fault: wider, or open
    TRIAL_FAILED = "trial_failed"  # requests on trial were slower than the others: out
    BY_HAND = "by_hand"  # an operator's


@dataclass(frozen=True, slots=True)
class Evidence:
    """Figures of one signal: its 99th percentile against the threshold, both times the budget."""

    signal: Signal
    p99_ratio: float
    threshold_ratio: float
    over: int
    samples: int
    budget_s: float | None  # None: it differs by context length

    def __str__(self) -> str:
        if self.budget_s is None:
            figure = f"{self.p99_ratio:.2f} x its budget by context length"
        else:
            figure = f"{self.p99_ratio * self.budget_s:.3g} s, budget {self.budget_s:.3g} s"
        if self.threshold_ratio > 1:
            figure += f" (held against {self.threshold_ratio:.2f} x its budget)"
        return f"{self.signal.value} {figure}, {self.over} of {self.samples} samples over"


@dataclass(frozen=True, slots=True)
class GateChange:
    """One change of one tier's gate. `evidence` is empty where no figure led to it."""

    level: Level
    gate: Gate
    cause: Cause
    at_s: float
    window_s: float
    evidence: tuple[Evidence, ...] = ()

    @property
    def reason(self) -> str:
        """The reason in one line."""
        text = f"{self.cause.value} in {self.window_s:g} s"
        if self.cause in {Cause.BY_HAND, Cause.COOLED_DOWN}:
            text = self.cause.value
        return ": ".join([text, "; ".join(str(each) for each in self.evidence)]).rstrip(": ")

    def as_facts(self) -> dict[str, object]:
        """The change for status and logs."""
        return {
            "at_s": self.at_s,
            "level": int(self.level),
            "load_share": self.gate.load_share,
            "stores": self.gate.stores,
            "cause": self.cause.value,
            "reason": self.reason,
        }
