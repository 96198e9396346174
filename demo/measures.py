"""Reads what a server says of itself: counters on its metrics page, its request log.

Three witnesses say where a prompt's tokens came from, and must agree: the engine
(`vllm:prompt_tokens_cached_by_source`), emberkv's own counter (`emberkv:prompt_tokens`), and the
request log.
"""

from __future__ import annotations

import json
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Final

from emberkv.app.metrics_page import Page
from emberkv.app.own_server import process_tree

__all__ = [
    "Page",
    "Sources",
    "device_bytes_read",
    "ember_sources",
    "engine_sources",
    "logged_sources",
    "process_tree",
]

_ENGINE_CACHED: Final = "vllm:prompt_tokens_cached_by_source_total"
_EMBER_TOKENS: Final = "emberkv:prompt_tokens_total"


@dataclass(frozen=True, slots=True)
class Sources:
    """Prompt tokens by where they came from."""

    device: int = 0
    ram: int = 0
    disk: int = 0
    computed: int = 0

    def __add__(self, other: Sources) -> Sources:
        return Sources(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


def engine_sources(before: Page, after: Page, prompt_tokens: int) -> Sources:
    """What the engine counted between two readings, with one prompt in between."""

    def cached(source: str) -> int:
        names = {"source": source}
        return round(after.total(_ENGINE_CACHED, names) - before.total(_ENGINE_CACHED, names))

    device, ram, disk = cached("device"), cached("host"), cached("disk")
    return Sources(device, ram, disk, prompt_tokens - device - ram - disk)


def ember_sources(before: Page, after: Page) -> Sources:
    """What emberkv counted between two readings."""

    def tokens(source: str) -> int:
        names = {"source": source}
        return round(after.total(_EMBER_TOKENS, names) - before.total(_EMBER_TOKENS, names))

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
