"""Sizes as people write and read them."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final

from emberkv.errors import UsageError

UNITS: Final = {
    "": 1,
    "B": 1,
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGTP", 1)},
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGTP", 1)},
}
_LOWER_UNITS: Final = {unit.lower(): size for unit, size in UNITS.items()}
_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")
_SHOWN: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def parse_size(text: str) -> int:
    """Bytes from `16GiB`, `512MiB`, `1.5GB` or a plain number; greater than 0.

    Raises `UsageError`, also for `16G`, which means different things to different people.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise UsageError(f"'{text}' is no size; write it like 16GiB, 512MiB or 1.5GB")
    number, unit = match.groups()
    if unit.lower() not in _LOWER_UNITS:
        hint = ""
        if len(unit) == 1 and f"{unit.upper()}iB" in UNITS:
            hint = f": {number}{unit.upper()}iB (1024) or {number}{unit.upper()}B (1000)?"
        raise UsageError(f"'{text}' has no unit known here{hint or '; write it like 16GiB'}")
    size_bytes = int(Fraction(number) * _LOWER_UNITS[unit.lower()])
    if size_bytes <= 0:
        raise UsageError(f"'{text}' is no size: it must be greater than 0")
    return size_bytes


def format_size(size_bytes: int) -> str:
    """A size for people, in binary units, one digit after the point: `1.5 GiB`."""
    value, unit = float(size_bytes), 0
    while abs(value) >= 1024 and unit < len(_SHOWN) - 1:
        value, unit = value / 1024, unit + 1
    return f"{size_bytes} B" if unit == 0 else f"{value:.1f} {_SHOWN[unit]}"


def size_argument(size_bytes: int) -> str:
    """A size as an argument that `parse_size` takes, rounded down to a tenth of its unit."""
    value, unit = Fraction(size_bytes), 0
    while value >= 1024 and unit < len(_SHOWN) - 1:
        value, unit = value / 1024, unit + 1
    tenths = int(value * 10)
    whole = tenths % 10 == 0
    return f"{tenths // 10 if whole else tenths / 10}{_SHOWN[unit]}"
