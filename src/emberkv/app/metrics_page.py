"""A server's metrics page, read from outside."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from emberkv.errors import UsageError, WorldError

NO_LABELS: Final[Mapping[str, str]] = MappingProxyType({})
_CHUNKS: Final = "emberkv:tier_chunks"
_EVENTS: Final = "emberkv:chunks_total"
_UNDER_WAY: Final = "emberkv:copies_under_way_chunks"


class Page:
    """One reading of a page in Prometheus's text format. Raises `WorldError` if it is none."""

    def __init__(self, text: str) -> None:
        try:
            from prometheus_client.parser import text_string_to_metric_families
        except ImportError as error:
            raise UsageError("this needs prometheus-client: pip install 'emberkv[load]'") from error
        self._samples: dict[str, list[tuple[Mapping[str, str], float]]] = defaultdict(list)
        self.families: set[str] = set()
        try:
            for family in text_string_to_metric_families(text):
                self.families.add(family.name)
                for sample in family.samples:
                    self._samples[sample.name].append((sample.labels, sample.value))
        except ValueError as error:
            raise WorldError(f"the server's /metrics can't be read: {error}") from error

    def has(self, name: str) -> bool:
        """Whether there is a sample of this name."""
        return bool(self._samples.get(name))

    def total(self, name: str, labels: Mapping[str, str] = NO_LABELS) -> float:
        """The sum of a metric's samples that carry these labels; 0 if there are none."""
        wanted = labels.items()
        return math.fsum(
            value for own, value in self._samples.get(name, ()) if wanted <= own.items()
        )

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """A metric's sums by the value of one label."""
        found: dict[str, float] = defaultdict(float)
        for labels, value in self._samples.get(name, ()):
            found[labels.get(label, "")] += value
        return dict(found)

    def label(self, name: str, label: str) -> str | None:
        """The value of a label of a metric's first sample."""
        samples = self._samples.get(name)
        return samples[0][0].get(label) if samples else None

    @property
    def shows_tiers(self) -> bool:
        """Whether the server runs with emberkv."""
        return any(name.startswith("emberkv:") for name in self.families)

    @property
    def finished_requests(self) -> float:
        return self.total("vllm:request_success_total")

    def chunks(self, tier: str) -> int:
        """Chunks resident in a tier."""
        return round(self.total(_CHUNKS, {"tier": tier}))

    def promoted_chunks(self) -> int:
        """Chunks that have been brought up to RAM so far."""
        return round(self.total(_EVENTS, {"tier": "ram", "event": "promoted"}))

    def chunks_under_way(self, tier: str) -> int:
        """Chunks on their way into a tier."""
        return round(self.total(_UNDER_WAY, {"tier": tier}))
