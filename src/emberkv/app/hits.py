"""What a request log says of the tiers: where prompt tokens came from, and how soon answers began.

A request counts for the slowest place that it got tokens from, since it waited for that one: disk
before RAM before the device. Times are held against those of requests of the same class of context
lengths that were computed, because a long prompt takes longer wherever it comes from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from emberkv.errors import UsageError
from emberkv.observe.baseline import Quantiles, class_bound, class_name, quantiles

SLOWEST_FIRST: Final = ("disk", "ram", "device")
COMPUTED: Final = "computed"
SOURCES: Final = ("device", "ram", "disk", COMPUTED)


class Line(msgspec.Struct, frozen=True):
    """The fields of a line of the request log that count here."""

    prompt_tokens: int | None
    device_tokens: int
    ram_tokens: int
    disk_tokens: int
    computed_tokens: int | None
    stored_chunks: int
    wait_s: float
    first_token_s: float | None
    why_not_more: str

    @property
    def source(self) -> str:
        """The slowest place that it got tokens from."""
        return next((name for name in SLOWEST_FIRST if self.tokens(name)), COMPUTED)

    def tokens(self, source: str) -> int:
        """Its prompt tokens from there."""
        return int(getattr(self, f"{source}_tokens") or 0)


@dataclass(frozen=True, slots=True)
class Group:
    """Requests of one class of context lengths that came from one place."""

    up_to_tokens: int | None
    source: str
    requests: int
    reused_share: float
    first_token: Quantiles | None


@dataclass(slots=True)
class Hits:
    """A request log in figures."""

    requests: int = 0
    tokens: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    stored_chunks: int = 0
    groups: tuple[Group, ...] = ()
    waits: Quantiles | None = None
    unreadable: int = 0


def read(path: Path) -> tuple[list[Line], int]:
    """The lines of a request log, and how many could not be read: the last may be half written.

    Raises `UsageError` if there is no such file, or no line of it is one of a request log.
    """
    try:
        raw = path.read_bytes().splitlines()
    except OSError as error:
        raise UsageError(f"can't read the request log {path}: {error.strerror}") from error
    lines, unreadable = [], 0
    decoder = msgspec.json.Decoder(Line)
    for each in raw:
        try:
            lines.append(decoder.decode(each))
        except msgspec.DecodeError:
            unreadable += 1
    if raw and not lines:
        raise UsageError(f"{path} is no request log: it is what `serve --request-log` writes")
    return lines, unreadable


def figures(lines: Sequence[Line], unreadable: int = 0) -> Hits:
    """All that a report needs; requests of unknown prompt length count in totals only."""
    found = Hits(requests=len(lines), unreadable=unreadable)
    for line in lines:
        found.reasons[line.why_not_more] += 1
        found.stored_chunks += line.stored_chunks
        for source in SOURCES:
            found.tokens[source] += line.tokens(source)
    found.groups = tuple(_groups(lines))
    found.waits = quantiles([line.wait_s for line in lines if line.wait_s > 0])
    return found


def _groups(lines: Iterable[Line]) -> Iterable[Group]:
    by_group: dict[tuple[int | None, str], list[Line]] = {}
    for line in lines:
        if line.prompt_tokens:
            key = (class_bound(line.prompt_tokens), line.source)
            by_group.setdefault(key, []).append(line)
    for key in sorted(by_group, key=_order):
        members = by_group[key]
        asked = sum(line.prompt_tokens or 0 for line in members)
        times = [line.first_token_s for line in members if line.first_token_s is not None]
        reused = 1 - sum(line.computed_tokens or 0 for line in members) / asked
        yield Group(*key, len(members), round(reused, 4), quantiles(times))


def _order(key: tuple[int | None, str]) -> tuple[bool, int, int]:
    bound, source = key
    return bound is None, bound or 0, SOURCES.index(source)


def computed_beside(group: Group, groups: Iterable[Group]) -> Quantiles | None:
    """The times of computed requests of the same class; None for those themselves."""
    if group.source == COMPUTED:
        return None
    for each in groups:
        if (each.up_to_tokens, each.source) == (group.up_to_tokens, COMPUTED):
            return each.first_token
    return None


def facts_of(found: Hits) -> dict[str, Any]:
    """The report for programs."""
    return {
        "requests": found.requests,
        "prompt_tokens_by_source": {source: found.tokens[source] for source in SOURCES},
        "requests_by_reason": dict(found.reasons.most_common()),
        "stored_chunks": found.stored_chunks,
        "waits": msgspec.to_builtins(found.waits),
        "groups": [
            {
                "prompt_tokens": class_name(group.up_to_tokens),
                "source": group.source,
                "requests": group.requests,
                "reused_share": group.reused_share,
                "first_token": msgspec.to_builtins(group.first_token),
            }
            for group in found.groups
        ],
        "unreadable_lines": found.unreadable,
    }
