"""The guard: takes a tier out when requests get slower than their budget, and tries it again."""

from __future__ import annotations

from emberkv.core.guard.guard import Guard
from emberkv.core.guard.reasons import Cause, Evidence, GateChange
from emberkv.core.guard.rules import Budget, GuardConfig, Limit, Return, Signal

__all__ = [
    "Budget",
    "Cause",
    "Evidence",
    "GateChange",
    "Guard",
    "GuardConfig",
    "Limit",
    "Return",
    "Signal",
]
