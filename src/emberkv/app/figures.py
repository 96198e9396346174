"""Figures as people read them on a terminal: ages, counts, shares, rates."""

from __future__ import annotations

from collections.abc import Mapping

from emberkv.domain.units import format_size

SOURCES = ("device", "ram", "disk", "computed")


def age(seconds: float) -> str:
    """A span of time in the largest unit that says something."""
    seconds = max(0.0, seconds)
    if seconds >= 48 * 3600:
        return f"{seconds / 86400:.0f} days"
    if seconds >= 2 * 3600:
        return f"{seconds / 3600:.0f} h"
    if seconds >= 120:
        return f"{seconds / 60:.0f} min"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def span(seconds: float | None) -> str:
    """A wait, with as many digits as it deserves."""
    if seconds is None:
        return "-"
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def count(number: float) -> str:
    """A count in four or five characters."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e4)):
        if number >= size:
            scaled = number / (1e3 if unit == "k" else size)
            return f"{scaled:.1f} {unit}" if scaled < 100 else f"{scaled:.0f} {unit}"
    return f"{number:.0f}" if number >= 10 or number == int(number) else f"{number:.1f}"


def share(part: float, whole: float) -> str:
    """A share in percent; nothing of nothing is a dash."""
    return f"{100 * part / whole:.0f} %" if whole else "-"


def tokens_by_source(tokens: Mapping[str, float]) -> str:
    """Where prompt tokens came from, in shares."""
    whole = sum(tokens.get(source, 0) for source in SOURCES)
    if not whole:
        return "none yet"
    parts = [f"{source} {share(tokens.get(source, 0), whole)}" for source in SOURCES]
    return f"{', '.join(parts)} of {count(whole)}"


def fact(value: object) -> str:
    """What a part of the server says of itself: figures in four digits, names as `key: value`."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        inside = ", ".join(f"{key}: {fact(each)}" for key, each in value.items())
        return f"({inside})" if inside else "none"
    if isinstance(value, list | tuple):
        return "; ".join(map(fact, value)) or "none"
    return "none" if value is None else str(value)


def size_or_dash(size_bytes: float) -> str:
    """A size; a dash for none."""
    return format_size(int(size_bytes)) if size_bytes else "-"
