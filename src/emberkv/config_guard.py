"""The configuration's key `guard`: which budgets the guard holds, and how it goes about it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Final

from emberkv.config_values import choice, is_finite, nearest, seconds
from emberkv.core.guard.rules import MIN_WINDOW_S, Budget, GuardConfig, Limit, Return, Signal
from emberkv.errors import ConfigError

GUARD_KEYS: Final = (
    "budgets",
    "window_s",
    "min_samples",
    "return",
    "cooldown_s",
    "max_cooldown_s",
    "trial_shares",
    "trial_samples",
    "patience_s",
)
_FACTOR: Final = re.compile(r"\d+(\.\d+)?x")
_DEFAULTS: Final = {each.name: each.default for each in fields(GuardConfig)}


@dataclass(frozen=True, slots=True)
class GuardSettings:
    """The rules as they were given.

    `rules` holds the budgets given in seconds. Those given as multiples of the baseline's figures
    are in `factors`, until the baseline is read.
    """

    rules: GuardConfig
    factors: tuple[tuple[Signal, float], ...] = ()


def parse(extra_config: Mapping[str, object]) -> GuardSettings | None:
    """The guard's rules; None where none are given, so that no guard runs. Raises `ConfigError`."""
    given = extra_config.get("guard")
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise ConfigError("guard must be an object with at least 'budgets'")
    for key in given:
        if key not in GUARD_KEYS:
            hint = "; name it in the key beside guard" if key == "baseline" else ""
            raise ConfigError(
                f"unknown key '{key}' of the guard{hint or nearest(str(key), GUARD_KEYS)}"
            )
    budgets, factors = _budgets(given.get("budgets"))
    if factors and extra_config.get("baseline") is None:
        signal, factor = factors[0]
        raise ConfigError(
            f"{signal.value} of the guard is given as {factor:g}x of a baseline: name one in "
            "baseline, or give seconds"
        )
    returns = choice(given, "return", [each.value for each in Return], Return.BY_PROBATION.value)
    rules = GuardConfig(
        budgets=budgets,
        window_s=_seconds(given, "window_s"),
        min_samples=_count(given, "min_samples"),
        returns=Return(returns),
        cooldown_s=_seconds(given, "cooldown_s"),
        max_cooldown_s=_seconds(given, "max_cooldown_s"),
        trial_shares=_shares(given),
        trial_samples=_count(given, "trial_samples"),
        patience_s=_seconds(given, "patience_s"),
    )
    return GuardSettings(rules, factors)


def _budgets(given: object) -> tuple[tuple[Budget, ...], tuple[tuple[Signal, float], ...]]:
    known = [signal.value for signal in Signal]
    if not isinstance(given, Mapping) or not given:
        raise ConfigError(f"budgets of the guard must name at least one of {', '.join(known)}")
    budgets, factors = [], []
    for key, value in given.items():
        if key not in known:
            raise ConfigError(f"unknown signal '{key}' in budgets{nearest(str(key), known)}")
        signal = Signal(key)
        if is_finite(value) and value > 0:
            budgets.append(Budget(signal, (Limit(None, float(value)),)))
        elif isinstance(value, str) and _FACTOR.fullmatch(value) and float(value[:-1]) >= 1:
            if signal is Signal.PROMOTION_WAIT:
                raise ConfigError(
                    f"{key} must be a number of seconds: a baseline is recorded without tiers, "
                    "so nothing waits there"
                )
            factors.append((signal, float(value[:-1])))
        else:
            raise ConfigError(
                f"{key} must be a number of seconds, or a multiple of the baseline like '1.05x', "
                f"1x or more, got {value!r}"
            )
    return tuple(budgets), tuple(factors)


def _seconds(given: Mapping[str, object], key: str) -> float:
    default = _DEFAULTS[key]
    assert isinstance(default, float)
    return seconds(given, key, default, minimum=MIN_WINDOW_S)


def _count(given: Mapping[str, object], key: str) -> int:
    value = given.get(key, _DEFAULTS[key])
    if isinstance(value, bool) or not isinstance(value, int) or value < 10:
        raise ConfigError(f"{key} of the guard must be a whole number, 10 or more, got {value!r}")
    return value


def _shares(given: Mapping[str, object]) -> tuple[float, ...]:
    value = given.get("trial_shares", _DEFAULTS["trial_shares"])
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ConfigError(f"trial_shares must be a list of shares like [0.05, 0.25], got {value!r}")
    shares = []
    for share in value:
        if not is_finite(share):
            raise ConfigError(f"trial_shares must be a list of numbers, got {share!r}")
        shares.append(float(share))
    return tuple(shares)
