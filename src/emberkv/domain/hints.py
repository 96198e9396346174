"""Hints: what a request may say of itself, and what is made of it.

They come from outside and are never trusted with more than their own request's good: an unknown
or ill-typed one is left out and reported by kind, the request is served.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Final

from emberkv.domain.types import TIER_NAMES

DEFAULT_PRIORITY: Final = 35
"""As in TensorRT-LLM: where nothing else was said, and again when a duration is over."""

MAX_PRIORITY: Final = 100
MAX_RANGES: Final = 64
MAX_NAME_CHARACTERS: Final = 128
MAX_PIN_S: Final = 24 * 3600.0
MAX_MS: Final = 1e12
"""Longer is the same as this: no number that JSON can hold may be too large to count with."""


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Tokens `first` … `end - 1` (to the prompt's end and beyond without one) matter this much.

    Without `duration_s` for good, else until so long after they were last used.
    """

    first: int
    end: int | None
    priority: int
    duration_s: float | None = None


@dataclass(frozen=True, slots=True)
class Hints:
    """All that a request has said; every field may be left out."""

    priority: tuple[TokenRange, ...] = ()
    pin_s: float | None = None
    session: str | None = None
    end_of_session: bool = False
    tool_call_pending: bool = False
    no_store: bool = False
    max_load_tokens: int | None = None
    max_wait_s: float | None = None
    tiers: frozenset[str] | None = None
    tenant: str | None = None


NO_HINTS: Final = Hints()


class _WrongError(ValueError):
    """A hint's value can't be used."""


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise _WrongError
    return value


def _whole(value: object, low: int = 0, high: int = 2**53) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _WrongError
    return value


def _seconds_from_ms(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _WrongError
    if not 0 <= value < math.inf:
        raise _WrongError
    return min(value, MAX_MS) / 1000


def _name(value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME_CHARACTERS:
        raise _WrongError
    return value


def _range(value: object) -> TokenRange:
    if not isinstance(value, Mapping) or not set(value) <= {
        "token_start",
        "token_end",
        "priority",
        "duration_ms",
    }:
        raise _WrongError
    first = _whole(value.get("token_start", 0))
    end = value.get("token_end")
    end = None if end is None else _whole(end, low=first)
    duration = value.get("duration_ms")
    return TokenRange(
        first,
        end,
        _whole(value.get("priority"), high=MAX_PRIORITY),
        None if duration is None else _seconds_from_ms(duration),
    )


def _ranges(value: object) -> tuple[TokenRange, ...]:
    if isinstance(value, int):
        return (TokenRange(0, None, _whole(value, high=MAX_PRIORITY)),)
    if isinstance(value, Mapping):
        return (_range(value),)
    if not isinstance(value, list | tuple) or len(value) > MAX_RANGES:
        raise _WrongError
    return tuple(_range(each) for each in value)


def _pin(value: object) -> float | None:
    if value is False:
        return None
    if not isinstance(value, Mapping) or set(value) != {"duration_ms"}:
        raise _WrongError
    return min(_seconds_from_ms(value["duration_ms"]), MAX_PIN_S)


def _shown(name: str) -> str:
    """A name that a client chose, as a log may hold it: on one line."""
    return name if name.isprintable() else name.encode("unicode_escape").decode("ascii")


def _tiers(value: object) -> frozenset[str]:
    if not isinstance(value, list | tuple) or not all(
        isinstance(name, str) and name in TIER_NAMES for name in value
    ):
        raise _WrongError
    return frozenset(value)


_READERS: Final[Mapping[str, tuple[str, Callable[[object], object]]]] = {
    "priority": ("priority", _ranges),
    "pin": ("pin_s", _pin),
    "session": ("session", _name),
    "end_of_session": ("end_of_session", _flag),
    "tool_call_pending": ("tool_call_pending", _flag),
    "no_store": ("no_store", _flag),
    "max_load_tokens": ("max_load_tokens", _whole),
    "max_wait_ms": ("max_wait_s", _seconds_from_ms),
    "tiers": ("tiers", _tiers),
    "tenant": ("tenant", _name),
}
HINT_NAMES: Final = tuple(_READERS)


@dataclass(frozen=True, slots=True)
class ReadHints:
    """Hints, and what could not be used of them: (kind, name) with kind `unknown` or `invalid`."""

    hints: Hints
    unusable: tuple[tuple[str, str], ...] = field(default=())


def read_hints(said: object) -> ReadHints:
    """Hints from a request's JSON object. Raises nothing; costs O(what was said)."""
    if said is None:
        return ReadHints(NO_HINTS)
    if not isinstance(said, Mapping):
        return ReadHints(NO_HINTS, (("invalid", "emberkv"),))
    values: dict[str, object] = {}
    unusable: list[tuple[str, str]] = []
    for name, value in said.items():
        reader = _READERS.get(name) if isinstance(name, str) else None
        if reader is None:
            unusable.append(("unknown", _shown(str(name)[:MAX_NAME_CHARACTERS])))
            continue
        target, read = reader
        try:
            values[target] = read(value)
        except _WrongError:
            unusable.append(("invalid", name))
    return ReadHints(Hints(**values), tuple(unusable))  # type: ignore[arg-type]


assert {target for target, _ in _READERS.values()} == {each.name for each in fields(Hints)}
