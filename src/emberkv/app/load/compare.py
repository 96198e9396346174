"""Holds a run against a baseline, step by step and class by class.

A figure over its budget is told apart from bad luck by the exceedance test: how likely is it that
so many samples of one run lie above a given rank of another, if both are from one distribution?
It is exact for any distribution and knows how rough the baseline itself is (Epstein, Tables for
the distribution of the number of exceedances, Annals of Mathematical Statistics 25, 1954).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from emberkv.app.load.client import Answer
from emberkv.app.load.runner import StepRun
from emberkv.errors import UsageError
from emberkv.observe.baseline import (
    Baseline,
    Latencies,
    Quantiles,
    Step,
    class_bound,
    class_name,
    quantile,
)

SHARES: Final = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
CHANCE: Final = 0.001
"""How often a figure that holds its budget may be called over it."""

_SAMPLES: Final[dict[str, Callable[[Answer], Sequence[float]]]] = {
    "first_token": lambda answer: [answer.first_token_s],
    "inter_token": lambda answer: answer.gaps_s,
    "end_to_end": lambda answer: [answer.total_s],
}


class Held(enum.Enum):
    """Whether a budget was held."""

    WITHIN = "within"
    OVER = "over"
    UNCLEAR = "unclear"  # over, and bad luck would explain it
    TOO_FEW = "too few"  # the quantile is only the largest sample


@dataclass(frozen=True, slots=True)
class Verdict:
    """One figure beside the baseline's."""

    concurrency: int
    length_class: str
    signal: str
    quantile: str
    seconds: float
    baseline_s: float
    held: Held

    @property
    def ratio(self) -> float:
        return self.seconds / self.baseline_s if self.baseline_s else float("inf")


def compare(baseline: Baseline, runs: Sequence[StepRun], budget: float) -> list[Verdict]:
    """Every figure that has its counterpart: the same concurrency and class of context length.

    Raises `UsageError` if nothing has.
    """
    before = {step.concurrency: step for step in baseline.steps}
    found = [
        verdict
        for run in runs
        if run.concurrency in before
        for verdict in _of_step(before[run.concurrency], run, budget)
    ]
    if not found:
        had = ", ".join(str(concurrency) for concurrency in before) or "none (it was watched)"
        raise UsageError(
            "no step has a counterpart in the baseline: run with its lengths, and with its "
            f"--concurrency: {had}"
        )
    return found


def is_broken(verdicts: Sequence[Verdict]) -> bool:
    """Whether the comparison fails: a budget is broken, or nothing could be judged."""
    judged = [verdict for verdict in verdicts if verdict.held is not Held.TOO_FEW]
    return not judged or any(verdict.held is Held.OVER for verdict in judged)


def exceedance(above: int, samples: int, base_above: int, base_samples: int) -> float:
    """The chance that `above` or more samples exceed a value that `base_above` of the base exceed.

    That value is one of the base's. The chance is that of the `above + base_above` highest of all
    together no more than `base_above` being the base's own.
    """
    highest = above + base_above
    whole = _log_ways(base_samples + samples, highest)
    return math.fsum(
        math.exp(_log_ways(base_samples, own) + _log_ways(samples, highest - own) - whole)
        for own in range(max(0, highest - samples), min(base_above, base_samples) + 1)
    )


def _log_ways(of: int, chosen: int) -> float:
    """The logarithm of the number of ways to choose."""
    return math.lgamma(of + 1) - math.lgamma(chosen + 1) - math.lgamma(of - chosen + 1)


def _of_step(before: Step, run: StepRun, budget: float) -> Iterator[Verdict]:
    known = {each.up_to_tokens: each.latencies for each in before.classes}
    answers: dict[int | None, list[Answer]] = {}
    for answer in run.good:
        answers.setdefault(class_bound(answer.prompt_tokens), []).append(answer)
    for bound, latencies in known.items():
        if bound in answers:
            yield from _of_class(latencies, answers[bound], budget, run.concurrency, bound)


def _of_class(
    before: Latencies,
    answers: Sequence[Answer],
    budget: float,
    concurrency: int,
    bound: int | None,
) -> Iterator[Verdict]:
    for signal, samples_of in _SAMPLES.items():
        then: Quantiles | None = getattr(before, signal)
        samples = sorted(value for answer in answers for value in samples_of(answer))
        if then is None or not samples:
            continue
        for name, share in SHARES.items():
            baseline_s = getattr(then, f"{name}_s")
            held = _held(samples, baseline_s * budget, then.count, share)
            seconds = quantile(samples, share)
            yield Verdict(concurrency, class_name(bound), signal, name, seconds, baseline_s, held)


def _held(samples: Sequence[float], limit_s: float, base_samples: int, share: float) -> Held:
    needed = 1 / (1 - share)
    if min(len(samples), base_samples) < needed - 1e-9:
        return Held.TOO_FEW
    if quantile(samples, share) <= limit_s:
        return Held.WITHIN
    above = sum(value > limit_s for value in samples)
    base_above = base_samples - math.ceil(share * base_samples - 1e-9)
    if exceedance(above, len(samples), base_above, base_samples) < CHANCE:
        return Held.OVER
    return Held.UNCLEAR
