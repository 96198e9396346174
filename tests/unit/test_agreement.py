"""Answers are compared by what the engine says of them; noise agrees, wrong KV does not."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberkv.app.agreement import (
    LEAST_LIMIT,
    Limits,
    Said,
    Verdict,
    compare_forced,
    compare_tokens,
    distance,
    limit_of,
)

LIMITS = Limits(direct=0.01, forced=0.05)
POSITIONS = ({1: -0.5, 2: -1.0}, {3: -0.7, 4: -0.8})
COMPUTED = Said((1, 3), POSITIONS)


def moved(by: float, tokens: tuple[int, ...] = (1, 3)) -> Said:
    """The same with every log-probability moved."""
    return Said(tokens, tuple({t: p + by for t, p in each.items()} for each in POSITIONS))


def test_a_distance_is_the_root_mean_square_over_shared_tokens() -> None:
    other = ({1: -0.5, 9: -3.0}, {3: -0.4, 4: -1.2})
    assert distance(POSITIONS, other) == pytest.approx(math.sqrt((0.09 + 0.16) / 3))


def test_a_position_without_a_shared_token_is_infinitely_far() -> None:
    assert distance(POSITIONS, ({7: -1.0}, {3: -0.7})) == math.inf


@given(st.floats(-1, 1, allow_nan=False))
def test_moving_everything_by_a_size_is_a_distance_of_that_size(by: float) -> None:
    assert distance(POSITIONS, moved(by).candidates) == pytest.approx(abs(by), abs=1e-9)


@pytest.mark.parametrize(
    ("by", "contrast", "verdict"),
    [
        (0.0, 1.0, Verdict.EQUAL),
        (0.009, 1.0, Verdict.EQUAL),
        (0.011, 1.0, Verdict.DIFFERENT),
        (0.009, 0.01, Verdict.CANNOT_TELL),
        (0.011, 0.0, Verdict.DIFFERENT),
        (0.0, math.nan, Verdict.CANNOT_TELL),
    ],
)
def test_equal_tokens_are_judged_by_their_distance(
    by: float, contrast: float, verdict: Verdict
) -> None:
    found = compare_tokens(moved(by), [COMPUTED], LIMITS, contrast)
    assert found is not None
    assert found.verdict is verdict


def test_the_nearest_computed_answer_counts() -> None:
    found = compare_tokens(moved(0.1), [COMPUTED, moved(0.095)], LIMITS, 1.0)
    assert found is not None
    assert found.verdict is Verdict.EQUAL


def test_other_tokens_are_not_judged_by_a_computed_answer() -> None:
    assert compare_tokens(moved(0.0, (1, 4)), [COMPUTED], LIMITS, 1.0) is None


@pytest.mark.parametrize(("by", "verdict"), [(0.04, Verdict.TIE), (0.06, Verdict.DIFFERENT)])
def test_other_tokens_are_judged_by_the_engines_word_on_them(by: float, verdict: Verdict) -> None:
    assert compare_forced(moved(by, (1, 4)), POSITIONS, LIMITS, 1.0).verdict is verdict


def test_a_limit_follows_from_the_engines_own_spread_and_is_never_nothing() -> None:
    assert limit_of([]) == limit_of([0.0]) == LEAST_LIMIT
    assert limit_of([0.001, 0.002]) == pytest.approx(0.008)
