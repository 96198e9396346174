"""Reads what a server says of itself: counters on its metrics page, its request log.

Three witnesses say where a prompt's tokens came from, and must agree: the engine
(`vllm:prompt_tokens_cached_by_source`), emberkv's own counter (`emberkv:prompt_tokens`), and the
request log.
"""

from __future__ import annotations

import json
import re
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Final

_SAMPLE: Final = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+\d+)?$")
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

_ENGINE_CACHED: Final = "vllm:prompt_tokens_cached_by_source_total"
_EMBER_TOKENS: Final = "emberkv:prompt_tokens_total"
_EMBER_EVENTS: Final = "emberkv:chunks_total"
_EMBER_CHUNKS: Final = "emberkv:tier_chunks"
_EMBER_UNDER_WAY: Final = "emberkv:copies_under_way_chunks"


@dataclass(frozen=True, slots=True)
class Sources:
    """Prompt tokens by where they came from."""

    device: int = 0
    ram: int = 0
    disk: int = 0
    computed: int = 0

    def __add__(self, other: Sources) -> Sources:
        return Sources(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


class Page:
    """One reading of a metrics page (Prometheus text)."""

    def __init__(self, text: str) -> None:
        self._samples: list[tuple[str, dict[str, str], float]] = []
        for line in text.splitlines():
            if match := _SAMPLE.match(line):
                name, labels, value = match.groups()
                self._samples.append((name, dict(_LABEL.findall(labels or "")), float(value)))

    def total(self, name: str, **labels: str) -> float:
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
        return round(self.total(_EMBER_CHUNKS, tier=tier))

    def promoted_chunks(self) -> int:
        """Chunks that have been brought up to RAM so far."""
        return round(self.total(_EMBER_EVENTS, tier="ram", event="promoted"))

    def chunks_under_way(self, tier: str) -> int:
        """Chunks on their way into a tier."""
        return round(self.total(_EMBER_UNDER_WAY, tier=tier))


def engine_sources(before: Page, after: Page, prompt_tokens: int) -> Sources:
    """What the engine counted between two readings, with one prompt in between."""

    def cached(source: str) -> int:
        names = {"source": source}
        return round(after.total(_ENGINE_CACHED, **names) - before.total(_ENGINE_CACHED, **names))

    device, ram, disk = cached("device"), cached("host"), cached("disk")
    return Sources(device, ram, disk, prompt_tokens - device - ram - disk)


def ember_sources(before: Page, after: Page) -> Sources:
    """What emberkv counted between two readings."""

    def tokens(source: str) -> int:
        names = {"source": source}
        return round(after.total(_EMBER_TOKENS, **names) - before.total(_EMBER_TOKENS, **names))

    return Sources(tokens("device"), tokens("ram"), tokens("disk"), tokens("computed"))


def logged_sources(log: Path, request_id: str) -> Sources | None:
    """What the request log says of a request; None while it has no line of it."""
    try:
        lines = log.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return None
    for line in reversed(lines):
        facts = json.loads(line)
        if request_id in (facts["external_id"] or ""):
            return Sources(
                facts["device_tokens"],
                facts["ram_tokens"],
                facts["disk_tokens"],
                facts["computed_tokens"],
            )
    return None


def process_tree(root: int) -> list[int]:
    """A process and all its descendants that live now; empty if it is gone."""
    children: dict[int, list[int]] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # ended meanwhile
        if fields[0] != "Z":
            children.setdefault(int(fields[1]), []).append(int(status.parent.name))
    alive = {pid for pids in children.values() for pid in pids}
    found = [root] if root in alive else []
    for pid in found:
        found += children.get(pid, [])
    return found


def device_bytes_read(root: int) -> int:
    """Bytes that a process and its descendants had read from a device: not from the page cache."""
    total = 0
    for pid in process_tree(root):
        try:
            counters = Path(f"/proc/{pid}/io").read_text()
        except OSError:
            continue
        fields = dict(line.split(": ") for line in counters.splitlines())
        total += int(fields["read_bytes"])
    return total
