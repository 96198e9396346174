"""Counting what the metrics show: plain numbers, taken as differences by whoever exports them."""

from __future__ import annotations

from collections import Counter, deque
from typing import Final

from emberkv.core.guard import GateChange
from emberkv.core.stack import TierStack
from emberkv.domain.types import TIER_NAMES, Copy, Level, Outcome
from emberkv.observe import metrics
from emberkv.observe.metrics import Metric
from emberkv.observe.requests import RequestFacts

Sample = tuple[Metric, tuple[str, ...], float]


RECENT_WAITS: Final = 1024


class Tally:
    """Counts between two exports. Cheap to add to; nothing here blocks or formats.

    `waits_s` are the last waits that ended; `down` says why a tier can't be used.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[Metric, tuple[str, ...]], float] = {}
        self._observed: list[Sample] = []
        self._up: dict[Level, bool] = {}
        self._totals: Counter[tuple[Metric, tuple[str, ...]]] = Counter()
        self.waits_s: deque[float] = deque(maxlen=RECENT_WAITS)
        self.down: dict[Level, str] = {}

    @property
    def fresh(self) -> bool:
        """Whether anything was counted since the last export."""
        return bool(self._counts or self._observed)

    def add(self, metric: Metric, labels: tuple[str, ...], amount: float) -> None:
        """Add to a counter."""
        if amount:
            at = (metric, labels)
            self._counts[at] = self._counts.get(at, 0.0) + amount

    def waited(self, wait_s: float) -> None:
        """A request has stopped waiting for its promotion."""
        self._observed.append((metrics.WAIT_SECONDS, (), wait_s))
        self.waits_s.append(wait_s)

    def copied(
        self, copy: Copy, outcomes: tuple[Outcome, ...], chunk_bytes: int, busy_s: float
    ) -> None:
        """Chunks of a copy between tiers have ended."""
        way = (TIER_NAMES[copy.source], TIER_NAMES[copy.target])
        done = outcomes.count(Outcome.OK)
        self.add(metrics.COPY_BYTES, way, done * chunk_bytes)
        self.add(metrics.COPY_SECONDS, way, busy_s)
        if done < len(outcomes):
            for outcome in outcomes:
                if outcome is not Outcome.OK:
                    self.add(metrics.COPY_FAILURES, (*way, outcome.value), 1)

    def ended(self, facts: RequestFacts) -> None:
        """A request is over."""
        self.add(metrics.REQUESTS, (facts.miss_reason.value,), 1)
        self.add(metrics.TOKENS, ("device",), facts.device_tokens)
        self.add(metrics.TOKENS, ("ram",), facts.ram_tokens)
        self.add(metrics.TOKENS, ("disk",), facts.disk_tokens)
        self.add(metrics.TOKENS, ("computed",), facts.computed_tokens or 0)

    def guard_changed(self, change: GateChange) -> None:
        """A tier's gate has changed, with a cause."""
        self.add(metrics.GUARD_CHANGES, (TIER_NAMES[change.level], change.cause.value), 1)

    def tier_up(self, level: Level, *, up: bool, reason: str = "") -> None:
        """A tier can, or can't, be used; one that was asked for and never came is down."""
        self._up[level] = up
        if up:
            self.down.pop(level, None)
        else:
            self.down[level] = reason

    def totals(self, stack: TierStack) -> Counter[tuple[Metric, tuple[str, ...]]]:
        """All counters since the start."""
        self._take_counts(stack)
        return self._totals + Counter(self._counts)

    def _take_counts(self, stack: TierStack) -> None:
        for (event, level), count in stack.counts.items():
            self.add(metrics.CHUNKS, (TIER_NAMES[level], event.value), count)
        stack.counts.clear()

    def take(self, stack: TierStack, waiting: int) -> list[Sample]:
        """Counts and observations since the last time, and gauges as they stand."""
        self._take_counts(stack)
        samples: list[Sample] = [
            (metric, labels, amount) for (metric, labels), amount in self._counts.items()
        ]
        samples += self._observed
        self._totals.update(self._counts)
        self._counts.clear()
        self._observed = []
        for at, tier in enumerate(stack.tiers):
            level = Level(at)
            labels = (TIER_NAMES[level],)
            samples += [
                (metrics.TIER_CAPACITY_BYTES, labels, tier.capacity_bytes),
                (metrics.TIER_USED_BYTES, labels, len(tier.entries) * tier.chunk_bytes),
                (metrics.TIER_CHUNKS, labels, len(tier.entries)),
                (metrics.TIER_PINNED_CHUNKS, labels, tier.pinned_count),
                (metrics.TIER_LOAD_SHARE, labels, stack.gates[level].load_share),
                (metrics.TIER_STORES, labels, float(stack.gates[level].stores)),
                (metrics.COPIES_QUEUED, labels, stack.transfers.under_way(level)),
            ]
        up = {Level(at): True for at in range(len(stack.tiers))} | self._up
        samples += [(metrics.TIER_UP, (TIER_NAMES[at],), float(is_up)) for at, is_up in up.items()]
        samples.append((metrics.REQUESTS_WAITING, (), waiting))
        return samples
