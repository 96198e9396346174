"""The limits of a tier stack; each is an argument, none is infinite."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from emberkv.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on what the stack lets be under way at once, and on how long anyone waits."""

    write_behind_chunks: int = 4096
    """Chunks under way to one tier below; more are shed, and offered again at their next use."""

    promotion_chunks: int = 65536
    """Chunks under way up to RAM; a promotion beyond it waits its turn."""

    max_wait_s: float = 30.0
    """A request waits no longer than this for its promotion, turn included."""

    max_stall_s: float = 1.0
    """A tier that finishes nothing for so long, with work to do, is not waited for."""

    look_ahead_share: float = 0.25
    """Part of RAM that may be taken for requests which have not had their turn in the engine."""

    def __post_init__(self) -> None:
        for name in ("write_behind_chunks", "promotion_chunks", "max_wait_s", "max_stall_s"):
            if not 0 < getattr(self, name) < inf:  # which holds for no NaN
                raise ConfigError(
                    f"{name} must be greater than 0 and finite, got {getattr(self, name)}"
                )
        if not 0.0 <= self.look_ahead_share <= 0.5:
            raise ConfigError(f"look_ahead_share is from 0 to 0.5, got {self.look_ahead_share}")
