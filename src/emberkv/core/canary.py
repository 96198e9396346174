"""The canary's decisions: which requests are compared, and when a tier is not to be believed.

A chosen request that would be served from a tier is computed instead. What it computes is put
beside what the tier keeps, and the two are compared as numbers, part by part (a part is one layer
of one rank). So a tier that went wrong is found without one wrong token, for the price of the
chosen requests' time.

Two runs of an engine differ a little. How much is learnt from the first comparisons, within bounds
that come from the numbers' precision and from what wrong bytes look like: unrelated values of one
size are a relative distance of the square root of two apart, so half of that is never an engine's
own. A tier that is wrong from the first comparison on can't teach the canary that it is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from emberkv.domain.types import ChunkKey, Level
from emberkv.errors import ConfigError

WRONG_DISTANCE: Final = 0.5
"""A relative distance that is wrong whatever was learnt."""

MARGIN: Final = 4.0
PRECISION_STEPS: Final = 16.0
LEAST_LIMIT: Final = 1e-4
"""So many precision steps, and this much, are always allowed: rounding adds up over layers."""


@dataclass(frozen=True, slots=True)
class CanaryRule:
    """`share` of the requests that a tier would serve are compared; 0 turns the canary off.

    `precision` is the relative step of the KV values' type. `lessons` chunks teach the limit.
    """

    share: float
    precision: float
    lessons: int = 64

    def __post_init__(self) -> None:
        if not 0.0 <= self.share <= 1.0:
            raise ConfigError(f"canary must be a share from 0 to 1, got {self.share}")
        if not 0.0 < self.precision < 1.0:
            raise ConfigError(f"a precision lies between 0 and 1, got {self.precision}")


@dataclass(frozen=True, slots=True)
class Compared:
    """What a comparison of one chunk found: the relative distance of each part."""

    key: ChunkKey
    origin: Level
    distances: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Disagreement:
    """A chunk that is not what the engine computes, and where it came from."""

    key: ChunkKey
    origin: Level
    part: int
    distance: float
    limit: float

    @property
    def reason(self) -> str:
        """The reason for log, metrics and status."""
        return (
            f"canary: part {self.part} of chunk {self.key.hex()[:16]} is {self.distance:.2g} from "
            f"what the engine computes, more than {self.limit:.2g}"
        )


class Canary:
    """Chooses requests evenly, learns the engine's spread, and judges comparisons."""

    def __init__(self, rule: CanaryRule) -> None:
        self.rule = rule
        self.compared_chunks = 0
        self._due = 0.0
        self._largest = 0.0

    @property
    def limit(self) -> float:
        """The relative distance above which a part is wrong, as far as is known now."""
        least = max(LEAST_LIMIT, PRECISION_STEPS * self.rule.precision)
        if self.compared_chunks < self.rule.lessons:
            return WRONG_DISTANCE
        return min(WRONG_DISTANCE, max(least, MARGIN * self._largest))

    def chooses(self) -> bool:
        """Whether the next request that a tier would serve is computed and compared."""
        self._due += self.rule.share
        if self._due < 1.0:
            return False
        self._due -= 1.0
        return True

    def judge(self, chunks: Sequence[Compared]) -> Disagreement | None:
        """The first disagreement among compared chunks; the others teach the limit."""
        for chunk in chunks:
            limit = self.limit
            # Also true of a distance that is no number.
            wrong = [at for at, each in enumerate(chunk.distances) if not each <= limit]
            if wrong:
                part = max(wrong, key=lambda at: chunk.distances[at])
                return Disagreement(chunk.key, chunk.origin, part, chunk.distances[part], limit)
            if self.compared_chunks < self.rule.lessons:
                self._largest = max(self._largest, *chunk.distances)
            self.compared_chunks += 1
        return None
