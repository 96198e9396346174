"""Values of a configuration, checked one at a time; errors are one line that names the key."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeGuard

from emberkv.errors import ConfigError


def nearest(word: str, known: Sequence[str]) -> str:
    """A hint naming the known word that looks most like a wrong one."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}'?" if close else f"; known: {', '.join(known)}"


def is_finite(value: object) -> TypeGuard[int | float]:
    """Whether a value is a number, and neither endless nor undefined."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def seconds(config: Mapping[str, object], key: str, default: float, *, minimum: float) -> float:
    """A time of at least `minimum`."""
    value = config.get(key, default)
    if not is_finite(value) or not value >= minimum:
        raise ConfigError(f"{key} must be a number of seconds, {minimum:g} or more, got {value!r}")
    return float(value)


def number(
    config: Mapping[str, object], key: str, default: float, *, low: float, high: float
) -> float:
    """A number between two, both included."""
    value = config.get(key, default)
    if not is_finite(value) or not low <= value <= high:
        raise ConfigError(f"{key} must be a number from {low:g} to {high:g}, got {value!r}")
    return float(value)


def text(config: Mapping[str, object], key: str) -> str | None:
    """A text that is not empty; None if the key is not there."""
    value = config.get(key)
    if value is not None and (not isinstance(value, str) or not value):
        raise ConfigError(f"{key} must be a non-empty text, got {value!r}")
    return value


def path(config: Mapping[str, object], key: str) -> Path | None:
    """A path; None if the key is not there."""
    value = text(config, key)
    return None if value is None else Path(value)


def choice(config: Mapping[str, object], key: str, known: Sequence[str], default: str) -> str:
    """One of the known words."""
    value = config.get(key, default)
    if value not in known:
        raise ConfigError(f"{key} can't be {value!r}{nearest(str(value), known)}")
    return str(value)


def flag(config: Mapping[str, object], key: str, default: bool) -> bool:
    """True or false."""
    value = config.get(key, default)
    if not isinstance(value, bool):
        raise ConfigError(f"{key} must be true or false, got {value!r}")
    return value
