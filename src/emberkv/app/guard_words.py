"""What the guard says of itself in `emberkv status`, in lines for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from emberkv.domain.types import TIER_NAMES


def guard_line(facts: Mapping[str, Any]) -> str:
    """How far each tier is open, in one line."""
    return ", ".join(f"{TIER_NAMES[tier['level']]} {tier['stage']}" for tier in facts["tiers"])


def guard_lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """The tiers, each signal against its budget, and the last change with its reason."""
    yield f"guard: {guard_line(facts)}"
    for signal in facts["signals"]:
        yield f"  {signal['signal']}: {_held(signal)}"
    if facts["slow_without_tiers"]:
        yield "  slow without tiers too: " + "; ".join(facts["slow_without_tiers"])
    if facts["changes"]:
        last = facts["changes"][-1]
        yield f"  last change: {TIER_NAMES[last['level']]}, {last['reason']}"


def _held(signal: Mapping[str, Any]) -> str:
    said = f"{signal['over_budget']} of {signal['samples']} samples are over budget"
    if signal["samples"]:
        said += f", p99 at {signal['p99_ratio']:.2f} x of it"
    if signal["not_judged"]:
        said += f"; {signal['not_judged']} not judged, no budget for their length"
    return said if signal["window_full"] else f"{said}; the window is not full yet"
