"""What loading and computing cost, learned from planted curves."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberkv.core.costs import LOAD_FADE_S, ComputeCost, LoadCost, ReadCost

Curve = Callable[[float], float]
"""Seconds that the token at a position costs."""

FLAT: Curve = lambda at: 1e-4  # noqa: E731
LINEAR: Curve = lambda at: 5e-5 + 1e-8 * at  # noqa: E731
SQUARE: Curve = lambda at: 5e-5 + 1e-12 * at * at  # noqa: E731
JUMP: Curve = lambda at: 1e-4 if at < 4096 else 3e-4  # noqa: E731
FALLING: Curve = lambda at: 2e-4 if at < 2048 else 1e-4  # noqa: E731
CURVES = {"flat": FLAT, "linear": LINEAR, "square": SQUARE, "jump": JUMP, "falling": FALLING}


def true_seconds(curve: Curve, first: int, end: int) -> float:
    step = max(1, (end - first) // 512)
    return sum(curve(at + step / 2) * min(step, end - at) for at in range(first, end, step))


def taught(curve: Curve, *, step_tokens: int, noise: Random | None = None) -> ComputeCost:
    """A cost that has seen prompts of many lengths, computed alone in steps of one size."""
    cost = ComputeCost()
    for length in (16384, 8192, 16384, 4096, 16384, 12288) * 4:
        for first in range(0, length, step_tokens):
            end = min(first + step_tokens, length)
            slower = 1.0 if noise is None else 1.0 + abs(noise.gauss(0.0, 0.2))
            cost.observe([(first, end)], 0, true_seconds(curve, first, end) * slower)
    return cost


@pytest.mark.parametrize("name", CURVES)
@pytest.mark.parametrize("step_tokens", [512, 2048])
def test_a_planted_curve_is_found_whatever_its_shape(name: str, step_tokens: int) -> None:
    curve = CURVES[name]
    cost = taught(curve, step_tokens=step_tokens)
    for first, end in ((0, 16384), (4096, 16384), (8192, 12288), (0, 4096)):
        assert cost.seconds(first, end) == pytest.approx(true_seconds(curve, first, end), rel=0.15)


@pytest.mark.parametrize("name", CURVES)
def test_other_work_in_a_step_does_not_make_computing_look_dear(name: str) -> None:
    curve = CURVES[name]
    cost = taught(curve, step_tokens=1024, noise=Random(7))
    assert cost.seconds(0, 16384) < 1.15 * true_seconds(curve, 0, 16384)


def test_mixed_batches_tell_positions_apart() -> None:
    """Steps that hold parts of two prompts at once give one time for both."""
    cost, random = ComputeCost(), Random(3)
    for _ in range(400):
        pieces = [(first, first + 512) for first in random.sample(range(0, 16384, 512), 2)]
        cost.observe(pieces, 0, sum(true_seconds(LINEAR, *piece) for piece in pieces))
    for first, end in ((0, 2048), (4096, 8192), (8192, 16384)):
        assert cost.seconds(first, end) == pytest.approx(true_seconds(LINEAR, first, end), rel=0.2)


def test_a_change_of_speed_is_followed() -> None:
    cost = taught(FLAT, step_tokens=2048)
    for _ in range(16):
        for first in range(0, 16384, 2048):
            cost.observe([(first, first + 2048)], 0, 2048 * 4e-4)
    assert cost.seconds(0, 16384) == pytest.approx(16384 * 4e-4, rel=0.05)


def test_steps_that_mostly_decode_teach_nothing() -> None:
    cost = ComputeCost()
    cost.observe([(0, 8)], 0, 1.0)
    cost.observe([(0, 64)], 64, 1.0)
    cost.observe([], 5, 1.0)
    assert not cost.known
    assert cost.seconds(0, 1000) == 0.0


def test_a_calibration_is_known_from_the_start() -> None:
    cost = ComputeCost([(1024, 0.1), (4096, 0.5), (8192, 1.3)])
    assert cost.known
    assert cost.seconds(0, 8192) == pytest.approx(1.3, rel=0.1)
    assert cost.seconds(4096, 8192) == pytest.approx(0.8, rel=0.15)


@given(st.lists(st.tuples(st.integers(0, 10**6), st.floats(0, 1e6)), max_size=8))
def test_no_calibration_breaks_it(seeds: list[tuple[int, float]]) -> None:
    assert ComputeCost(seeds).seconds(0, 100_000) >= 0.0


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**6))
def test_costs_add_up(a: int, b: int, c: int) -> None:
    first, middle, end = sorted((a, b, c))
    cost = taught_once
    whole = cost.seconds(first, end)
    parts = cost.seconds(first, middle) + cost.seconds(middle, end)
    assert whole == pytest.approx(parts, rel=1e-9, abs=1e-12)


taught_once = taught(SQUARE, step_tokens=2048)


def play_reads(
    cost: ReadCost, *, first_s: float, chunk_s: float, chunks: int, now_s: float, batch: int = 8
) -> float:
    """A tier that brings `chunks`; returns when it is done."""
    cost.started(chunks, now_s)
    at_s = now_s + first_s
    for done in range(0, chunks, batch):
        count = min(batch, chunks - done)
        at_s += count * chunk_s if done else 0.0
        cost.ended(count, count, at_s)
    return at_s


def test_a_tiers_delay_and_pace_are_told_apart() -> None:
    cost = ReadCost()
    now_s = 10.0
    for _ in range(20):
        now_s = 1.0 + play_reads(cost, first_s=0.1, chunk_s=0.001, chunks=200, now_s=now_s)
    assert cost.first_arrival_s(now_s) == pytest.approx(0.1, rel=0.05)
    assert cost.seconds(400, now_s) == pytest.approx(0.1 + 0.4, rel=0.1)


def test_one_hiccup_is_not_the_tiers_delay_and_many_are() -> None:
    cost = ReadCost()
    now_s = 0.0
    for _ in range(10):
        now_s = 1.0 + play_reads(cost, first_s=0.002, chunk_s=0.0001, chunks=50, now_s=now_s)
    now_s = 1.0 + play_reads(cost, first_s=0.5, chunk_s=0.0001, chunks=50, now_s=now_s)
    assert cost.first_s < 0.005
    for _ in range(12):
        now_s = 1.0 + play_reads(cost, first_s=0.5, chunk_s=0.0001, chunks=50, now_s=now_s)
    assert cost.first_s > 0.3
    now_s = 1.0 + play_reads(cost, first_s=0.002, chunk_s=0.0001, chunks=50, now_s=now_s)
    assert cost.first_s == pytest.approx(0.002)


def test_what_is_queued_is_waited_for() -> None:
    cost = ReadCost()
    now_s = play_reads(cost, first_s=0.01, chunk_s=0.001, chunks=400, now_s=0.0)
    cost.started(500, now_s)
    assert cost.seconds(100, now_s) == pytest.approx(0.61, rel=0.1)


def test_a_tier_that_is_silent_gets_dearer_while_it_is() -> None:
    cost = ReadCost()
    now_s = play_reads(cost, first_s=0.01, chunk_s=0.001, chunks=400, now_s=0.0)
    cost.started(8, now_s)
    assert cost.first_arrival_s(now_s + 3.0) >= 3.0
    assert cost.silent_s(now_s + 3.0) == pytest.approx(3.0)
    cost.ended(8, 8, now_s + 3.0)
    assert cost.silent_s(now_s + 4.0) == 0.0


def test_failures_end_a_wait_and_teach_no_pace() -> None:
    cost = ReadCost()
    cost.started(10, 0.0)
    cost.ended(10, 0, 5.0)
    assert cost.first_s == 0.0
    assert cost.chunk_s == 0.0
    assert cost.under_way == 0


def test_a_slow_load_among_quick_ones_says_nothing() -> None:
    cost = LoadCost()
    for seconds in (0.1, 0.1, 5.0, 0.1, 0.1):
        cost.observe(100, seconds, 0.0)
    assert cost.chunk_s(0.0) == pytest.approx(0.001)


def test_a_slow_first_load_is_not_believed_and_no_slow_one_for_ever() -> None:
    """Else a tier that was slow once, just after a restart, would never be asked again."""
    cost = LoadCost()
    cost.observe(13, 0.5, 0.0)
    assert cost.chunk_s(0.0) == 0.0
    for _ in range(4):
        cost.observe(13, 0.5, 1.0)
    assert cost.chunk_s(1.0) == pytest.approx(0.5 / 13)
    assert cost.chunk_s(1.0 + 4 * LOAD_FADE_S) == pytest.approx(0.5 / 13 / 16)
