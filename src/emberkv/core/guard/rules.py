"""What a guard is told: which signals it watches, their budgets, and how a tier comes back."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Final

from emberkv.errors import ConfigError

MIN_WINDOW_S: Final = 5.0


class Signal(enum.Enum):
    """A time that requests feel. Each has a budget for the slowest of a hundred samples."""

    FIRST_TOKEN = "ttft_p99"  # time to first token: a sample per request
    INTER_TOKEN = "itl_p99"  # inter-token latency: a sample per token after the first
    PROMOTION_WAIT = "promotion_wait_p99"  # wait for a promotion: a sample per request that waits


class Return(enum.Enum):
    """How a tier that was taken out comes back."""

    BY_PROBATION = "by_probation"
    BY_HAND = "by_hand"


@dataclass(frozen=True, slots=True)
class Limit:
    """A budget in seconds for contexts of at most `up_to_tokens`; None: however long."""

    up_to_tokens: int | None
    seconds: float


@dataclass(frozen=True, slots=True)
class Budget:
    """The budget of one signal: its limits by context length, shortest first.

    A context longer than the last limit has no budget and is not judged, so that requests longer
    than any in the baseline are not taken for slow ones.
    """

    signal: Signal
    limits: tuple[Limit, ...]

    def __post_init__(self) -> None:
        name = self.signal.value
        if not self.limits:
            raise ConfigError(f"{name} has no limit")
        if not all(math.isfinite(each.seconds) and each.seconds > 0 for each in self.limits):
            raise ConfigError(f"a budget of {name} must be more than 0 seconds")
        bounds = [math.inf if x.up_to_tokens is None else x.up_to_tokens for x in self.limits]
        if bounds != sorted(set(bounds)):
            raise ConfigError(f"the limits of {name} must have rising context lengths")

    def seconds(self, context_tokens: int | None) -> float | None:
        """The budget for a context; None where there is none, or its length is not known."""
        for limit in self.limits:
            if limit.up_to_tokens is None:
                return limit.seconds
            if context_tokens is not None and context_tokens <= limit.up_to_tokens:
                return limit.seconds
        return None

    @property
    def single_s(self) -> float | None:
        """The budget where it is one for all contexts."""
        return self.limits[0].seconds if len(self.limits) == 1 else None


@dataclass(frozen=True, slots=True)
class GuardConfig:
    """The rules of a guard. Without a budget it watches nothing."""

    budgets: tuple[Budget, ...]
    window_s: float = 60.0
    """A budget must be broken for so long; and no change follows another more quickly."""
    min_samples: int = 100
    """Fewer samples in a window decide nothing."""
    returns: Return = Return.BY_PROBATION
    cooldown_s: float = 300.0
    """How long a tier stays out before it is tried again; doubles with every failure."""
    max_cooldown_s: float = 3600.0
    """The longest that it grows to; a tier that is open for so long has its failures forgiven."""
    trial_shares: tuple[float, ...] = (0.05, 0.25)
    """The shares of requests that may load from a tier on trial, step by step."""
    trial_samples: int = 50
    """Requests on trial that a step needs before it is judged."""
    patience_s: float = 1800.0
    """A step that found too few requests in so long, none of them at fault, is passed."""

    def __post_init__(self) -> None:
        signals = [budget.signal for budget in self.budgets]
        if len(signals) != len(set(signals)):
            raise ConfigError("the guard takes one budget per signal")
        for name in ("window_s", "cooldown_s", "max_cooldown_s", "patience_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= MIN_WINDOW_S):
                raise ConfigError(
                    f"{name} of the guard must be {MIN_WINDOW_S:g} seconds or more, got {value!r}"
                )
        for name in ("min_samples", "trial_samples"):
            if getattr(self, name) < 10:
                raise ConfigError(f"{name} of the guard must be 10 or more")
        if self.max_cooldown_s < self.cooldown_s:
            raise ConfigError("max_cooldown_s of the guard must not be less than its cooldown_s")
        shares = self.trial_shares
        if not shares or any(not 0 < share < 1 for share in shares) or _not_rising(shares):
            raise ConfigError("trial_shares of the guard must rise, each between 0 and 1")


def _not_rising(values: tuple[float, ...]) -> bool:
    return list(values) != sorted(set(values))
