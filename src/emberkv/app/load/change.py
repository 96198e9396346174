"""What has changed between two readings of a server's metrics page."""

from __future__ import annotations

import math
from dataclasses import dataclass

from emberkv.app.metrics_page import Page
from emberkv.errors import WorldError
from emberkv.observe.baseline import Quantiles


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts by upper bound, each bound without what lies below the one before."""

    bounds: tuple[float, ...]
    counts: tuple[float, ...]

    @property
    def count(self) -> int:
        return round(math.fsum(self.counts))

    def quantile(self, share: float) -> float:
        """A quantile, evenly spread within its bucket; of the last, endless one its lower end."""
        rank = share * math.fsum(self.counts)
        below, begin = 0.0, 0.0
        for bound, count in zip(self.bounds, self.counts, strict=True):
            if count and below + count >= rank - 1e-9:
                if math.isinf(bound):
                    return begin
                return begin + (bound - begin) * (rank - below) / count
            below += count
            begin = bound
        return begin

    def quantiles(self) -> Quantiles | None:
        """The quantiles that a baseline holds; None of nothing."""
        if not self.count:
            return None
        p50_s, p95_s, p99_s = (round(self.quantile(share), 6) for share in (0.5, 0.95, 0.99))
        return Quantiles(count=self.count, p50_s=p50_s, p95_s=p95_s, p99_s=p99_s)


@dataclass(frozen=True, slots=True)
class Change:
    """What has happened between two readings."""

    before: Page
    after: Page

    def counted(self, name: str) -> float:
        """How far a counter has moved. Raises `WorldError` if it went back: a new server."""
        moved = self.after.total(name) - self.before.total(name)
        if moved < 0:
            raise WorldError(f"the server was restarted meanwhile: {name} went back")
        return moved

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """How far a counter has moved, by the value of a label."""
        before = self.before.by_label(name, label)
        after = self.after.by_label(name, label)
        return {at: value - before.get(at, 0.0) for at, value in after.items()}

    def histogram(self, name: str) -> Histogram:
        """What a histogram has taken in."""
        at_most = {
            float(bound): value
            for bound, value in self.by_label(f"{name}_bucket", "le").items()
            if bound
        }
        bounds = tuple(sorted(at_most))
        counts, below = [], 0.0
        for bound in bounds:
            counts.append(max(0.0, at_most[bound] - below))
            below = max(below, at_most[bound])
        return Histogram(bounds, tuple(counts))

    def tokens_by_source(self) -> dict[str, int]:
        """Prompt tokens by where they came from, as the engine counted them."""
        cached = self.by_label("vllm:prompt_tokens_cached_by_source_total", "source")
        found = {source: round(tokens) for source, tokens in cached.items() if tokens}
        computed = round(self.counted("vllm:prompt_tokens_total")) - sum(found.values())
        return {"computed": max(0, computed), **dict(sorted(found.items()))}

    def reused_share(self) -> float | None:
        """The share of prompt tokens that the engine's own prefix cache had; None of nothing."""
        asked = self.counted("vllm:prefix_cache_queries_total")
        return round(self.counted("vllm:prefix_cache_hits_total") / asked, 4) if asked else None
