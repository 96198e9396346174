"""The answer to a look-up of one chunk, in the words every engine's adapter translates."""

from __future__ import annotations

import enum


class Lookup(enum.Enum):
    """What the engine is told of one chunk."""

    HIT = "hit"  # in RAM, verified, loadable in this very step
    RETRY = "retry"  # ask again next step
    MISS = "miss"
