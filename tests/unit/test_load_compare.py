"""Comparing with a baseline: what is over, what chance explains, what can't be judged."""

from __future__ import annotations

import math
from random import Random

import pytest

from emberkv.app.load.change import Change
from emberkv.app.load.client import Answer
from emberkv.app.load.compare import Held, compare, exceedance, is_broken
from emberkv.app.load.figures import by_class, latencies, step_of
from emberkv.app.load.runner import StepRun
from emberkv.app.load.tables import verdict_summary
from emberkv.app.metrics_page import Page
from emberkv.errors import UsageError
from emberkv.observe.baseline import Baseline, ServerFacts


def run(seed: int, factor: float = 1.0, *, count: int = 300, concurrency: int = 4) -> StepRun:
    numbers = Random(seed)
    answers = []
    for number in range(count):
        first_s = factor * numbers.lognormvariate(-2, 0.4)
        gaps_s = tuple(factor * numbers.lognormvariate(-4, 0.2) for _ in range(3))
        tokens = 200 if number % 2 else 900
        answers.append(Answer(tokens, first_s, gaps_s, first_s + sum(gaps_s), 4))
    return StepRun(concurrency, tuple(answers), 1.0, Change(Page(""), Page("")))


def recorded(*runs: StepRun) -> Baseline:
    answers = [answer for each in runs for answer in each.good]
    return Baseline(
        recorded_at="2026-01-01T00:00:00Z",
        command="",
        how="workload",
        server=ServerFacts(url="http://127.0.0.1:1", model="m"),
        overall=latencies(answers),
        classes=by_class(answers),
        steps=tuple(step_of(each) for each in runs),
    )


def test_the_same_server_is_over_nothing_but_by_chance() -> None:
    baseline = recorded(run(0))
    for seed in range(1, 40):
        verdicts = compare(baseline, [run(seed)], 1.05)
        assert len(verdicts) == 2 * 3 * 3
        assert not is_broken(verdicts)


def test_a_server_that_is_twice_as_slow_is_over_in_every_figure() -> None:
    verdicts = compare(recorded(run(0)), [run(1, 2.0)], 1.05)
    assert {verdict.held for verdict in verdicts} == {Held.OVER}
    assert all(1.3 < verdict.ratio < 4.0 for verdict in verdicts)
    assert is_broken(verdicts)
    assert "18 of 18 figures are over 1.05x the baseline (!)" in verdict_summary(verdicts, 1.05)


def test_too_few_requests_are_not_judged_by_their_largest() -> None:
    baseline = recorded(run(0))
    verdicts = compare(baseline, [run(1, 3.0, count=30)], 1.05)
    held = {(each.signal, each.quantile): each.held for each in verdicts}
    assert held["first_token", "p99"] is Held.TOO_FEW
    assert held["first_token", "p95"] is Held.TOO_FEW
    assert held["first_token", "p50"] is Held.OVER
    only = [each for each in verdicts if each.held is Held.TOO_FEW]
    assert is_broken(only)
    assert verdict_summary(only, 1.05).startswith("nothing could be judged")


def test_only_the_same_concurrency_is_compared() -> None:
    baseline = recorded(run(0))
    verdicts = compare(baseline, [run(1), run(2, 5.0, concurrency=8)], 1.05)
    assert {verdict.concurrency for verdict in verdicts} == {4}
    with pytest.raises(UsageError, match="--concurrency: 4"):
        compare(baseline, [run(2, concurrency=8)], 1.05)
    with pytest.raises(UsageError, match="it was watched"):
        compare(recorded(), [run(2)], 1.05)


def test_the_chance_of_exceedances_is_that_of_drawing() -> None:
    """Against exact counting, and against drawing at random."""
    for above, samples, base_above, base_samples in [(1, 5, 0, 5), (4, 9, 2, 7), (9, 9, 1, 30)]:
        highest = above + base_above
        exact = sum(
            math.comb(base_samples, own) * math.comb(samples, highest - own)
            for own in range(base_above + 1)
            if highest >= own
        ) / math.comb(base_samples + samples, highest)
        assert exceedance(above, samples, base_above, base_samples) == pytest.approx(exact)
    numbers = Random(5)
    hits = 0
    for _ in range(4000):
        base = sorted(numbers.random() for _ in range(20))
        hits += sum(numbers.random() > base[-3] for _ in range(10)) >= 3
    assert exceedance(3, 10, 2, 20) == pytest.approx(hits / 4000, abs=0.03)


def test_many_samples_are_judged_quickly_and_without_overflow() -> None:
    chance = exceedance(51_000, 100_000, 50_000, 100_000)
    assert 0.0 <= chance < 1e-3
    assert exceedance(50_000, 100_000, 50_000, 100_000) == pytest.approx(0.5, abs=0.01)
