"""Sides of a comparison, measured in turns, and the statistics made of their samples."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

Samples = dict[str, list[float]]


def seconds(call: Callable[[], object]) -> float:
    """How long a call takes."""
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s


def interleave(
    sides: Mapping[str, Callable[[], float]],
    rounds: int,
    *,
    warm_up_rounds: int = 1,
    rest_s: float = 0.0,
) -> Samples:
    """Run every side once per round, each round in another order; what each call returned.

    Rounds to warm up come first and are not kept. Before each call a device may rest.
    """
    chance = random.Random(rounds)
    samples: Samples = {name: [] for name in sides}
    for turn in range(warm_up_rounds + rounds):
        order = list(sides)
        chance.shuffle(order)
        for name in order:
            time.sleep(rest_s)
            sample = sides[name]()
            if turn >= warm_up_rounds:
                samples[name].append(sample)
    return samples


def ratio_of_medians(above: Sequence[float], below: Sequence[float]) -> float:
    """The median of one side over that of the other."""
    return statistics.median(above) / statistics.median(below)


def percentile(samples: Sequence[float], share: float) -> float:
    """The sample below which `share` of all lie (nearest rank)."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def bootstrap_interval(
    statistic: Callable[[Sequence[float], Sequence[float]], float],
    above: Sequence[float],
    below: Sequence[float],
    *,
    draws: int = 2000,
) -> tuple[float, float]:
    """The middle 95 % of a two-sample statistic when both samples are drawn again."""
    chance = random.Random(draws)
    found = sorted(
        statistic(chance.choices(above, k=len(above)), chance.choices(below, k=len(below)))
        for _ in range(draws)
    )
    return found[int(0.025 * draws)], found[int(0.975 * draws)]


def rounded(samples: Mapping[str, Sequence[float]], digits: int = 6) -> Samples:
    """Samples as they are written down."""
    return {name: [round(value, digits) for value in each] for name, each in samples.items()}
