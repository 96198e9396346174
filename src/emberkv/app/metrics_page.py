"""A server's metrics page, read from outside."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

_SAMPLE: Final = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+\d+)?$")
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

NO_LABELS: Final[Mapping[str, str]] = MappingProxyType({})
_CHUNKS: Final = "emberkv:tier_chunks"
_EVENTS: Final = "emberkv:chunks_total"
_UNDER_WAY: Final = "emberkv:copies_under_way_chunks"


class Page:
    """One reading of a metrics page (Prometheus text)."""

    def __init__(self, text: str) -> None:
        self._samples: list[tuple[str, dict[str, str], float]] = []
        for line in text.splitlines():
            if match := _SAMPLE.match(line):
                name, labels, value = match.groups()
                self._samples.append((name, dict(_LABEL.findall(labels or "")), float(value)))

    def total(self, name: str, labels: Mapping[str, str] = NO_LABELS) -> float:
        """The sum of a metric's samples that carry these labels; 0 if there are none."""
        wanted = labels.items()
        return sum(v for n, own, v in self._samples if n == name and wanted <= own.items())

    def has(self, name: str) -> bool:
        return any(n == name for n, _, _ in self._samples)

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
