"""Whether two answers to one prompt come from the same KV, as far as their numbers can tell.

An engine does not compute the same twice: batches differ, and the order of sums with them. So the
log-probabilities of two answers differ a little, and where two tokens are almost equally likely,
the greedy choice may flip. What counts is how much they differ against what the engine differs
from itself; and the engine's word on a flipped answer is its log-probabilities for exactly those
tokens, computed from scratch (*forced*).

A check that can't fail is no check: `contrast` is what one wrong chunk would do to these numbers.
Where that is no more than the engine's own spread, the answer can't tell.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

MARGIN: Final = 4.0
"""A distance of so many times the largest that the engine has from itself is not the engine's."""

LEAST_LIMIT: Final = 1e-5
"""Log-probabilities are float32 of size 10 or so: differences below this are their rounding."""

Position = Mapping[int, float]


class Verdict(enum.StrEnum):
    """What the numbers say of an answer."""

    EQUAL = "equal"
    TIE = "tie"  # a choice between equally likely tokens went the other way
    DIFFERENT = "different"
    CANNOT_TELL = "can't tell"  # it agrees, but one wrong chunk would not be seen either


def distance(one: Sequence[Position], other: Sequence[Position]) -> float:
    """Root mean square difference of the log-probabilities that both name.

    Infinite where a position has no token in common.
    """
    squares: list[float] = []
    for mine, theirs in zip(one, other, strict=True):
        shared = mine.keys() & theirs.keys()
        if not shared:
            return math.inf
        squares += [(mine[token] - theirs[token]) ** 2 for token in shared]
    return math.sqrt(sum(squares) / len(squares))


@dataclass(frozen=True, slots=True)
class Limits:
    """How far answers may be apart: directly where tokens are equal, else from the forced ones."""

    direct: float
    forced: float


def limit_of(own_distances: Sequence[float]) -> float:
    """The limit that follows from the engine's distances from itself."""
    return max(LEAST_LIMIT, MARGIN * max(own_distances, default=0.0))


@dataclass(frozen=True, slots=True)
class Said:
    """An answer's tokens and its log-probabilities, position by position."""

    tokens: tuple[int, ...]
    candidates: tuple[Position, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """What a comparison found: how far the answer is from the computed one, and how far it may."""

    verdict: Verdict
    distance: float
    limit: float


def compare_tokens(
    answer: Said, computed: Sequence[Said], limits: Limits, contrast: float
) -> Comparison | None:
    """Compare with a computed answer of the same tokens; None if there is none."""
    distances = [
        distance(answer.candidates, other.candidates)
        for other in computed
        if other.tokens == answer.tokens
    ]
    if not distances:
        return None
    return _judged(min(distances), limits.direct, contrast, Verdict.EQUAL)


def compare_forced(
    answer: Said, forced: Sequence[Position], limits: Limits, contrast: float
) -> Comparison:
    """Compare an answer of other tokens with the engine's own word on exactly these."""
    return _judged(distance(answer.candidates, forced), limits.forced, contrast, Verdict.TIE)


def _judged(apart: float, limit: float, contrast: float, agrees: Verdict) -> Comparison:
    if apart > limit:
        return Comparison(Verdict.DIFFERENT, apart, limit)
    # The negation, so that a contrast that is no number tells nothing.
    if not contrast > limit:
        return Comparison(Verdict.CANNOT_TELL, apart, limit)
    return Comparison(agrees, apart, limit)
