"""Makes the guard that a configuration asks for, with budgets in seconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from emberkv.config import Config
from emberkv.core.guard import Budget, Guard, GuardConfig, Limit, Signal
from emberkv.errors import ConfigError
from emberkv.observe.baseline import (
    P99_SAMPLES,
    Baseline,
    Latencies,
    Quantiles,
    read_baseline,
)

_FIGURES: Final[dict[Signal, Callable[[Latencies], Quantiles | None]]] = {
    Signal.FIRST_TOKEN: lambda latencies: latencies.first_token,
    Signal.INTER_TOKEN: lambda latencies: latencies.inter_token,
}


def guard_rules(config: Config) -> GuardConfig | None:
    """The rules with every budget in seconds; None if no guard is asked for.

    Reads the baseline where a budget is relative to it. Raises `UsageError` if it can't be read,
    or says too little.
    """
    if config.guard is None:
        return None
    rules = config.guard.rules
    if not config.guard.factors:
        return rules
    assert config.baseline is not None  # the parser has seen to it
    baseline = read_baseline(config.baseline)
    relative = [budget_from(baseline, *factor) for factor in config.guard.factors]
    return replace(rules, budgets=(*rules.budgets, *relative))


def make_guard(config: Config, levels: int) -> Guard | None:
    """The guard of so many tiers; None if no guard is asked for. Raises `UsageError`."""
    rules = guard_rules(config)
    return None if rules is None else Guard(rules, levels)


def budget_from(baseline: Baseline, signal: Signal, factor: float) -> Budget:
    """A budget as a multiple of the baseline's 99th percentile, by context-length class.

    Classes with too few samples have no budget. A baseline without classes, as one that was
    recorded by watching, gives one budget for all lengths. Raises `ConfigError` if nothing is left.
    """
    figure = _FIGURES[signal]
    if not baseline.classes:
        overall = figure(baseline.overall)
        if overall is not None and _is_enough(overall):
            return Budget(signal, (Limit(None, factor * overall.p99_s),))
    limits = []
    for each in baseline.classes:
        found = figure(each.latencies)
        if found is not None and _is_enough(found):
            limits.append(Limit(each.up_to_tokens, factor * found.p99_s))
    if not limits:
        raise ConfigError(
            f"the baseline says too little for {signal.value}: a 99th percentile needs "
            f"{P99_SAMPLES} samples in a class of context lengths; record it with more --requests"
        )
    return Budget(signal, tuple(limits))


def _is_enough(found: Quantiles) -> bool:
    return found.count >= P99_SAMPLES and found.p99_s > 0
