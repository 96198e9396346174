"""One frame of `emberkv top`: a server's tiers, hits, waits and last events, in 80 columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from emberkv.app.figures import SOURCES, age, count, fact, share, size_or_dash, span
from emberkv.app.guard_words import guard_line
from emberkv.app.stories import HAPPENED, TIERS
from emberkv.domain.units import format_size

if TYPE_CHECKING:
    from rich.console import RenderableType

    from emberkv.live.control.messages import Occurrence, ServerStatus, TierStatus

BAR_CHARACTERS: Final = 20
EVENT_LINES: Final = 5
FACT_LINES: Final = 4
FACT_CHARACTERS: Final = 60
SOURCE_STYLES: Final = {"device": "cyan", "ram": "green", "disk": "blue", "computed": "dim"}


@dataclass(frozen=True, slots=True)
class Moment:
    """A status and when it was taken, in monotonic seconds."""

    status: ServerStatus
    at_s: float


def frame(now: Moment, before: Moment | None, *, keys: str = "") -> RenderableType:
    """The frame of a moment, with rates since the one before, or else since the start.

    `keys` says what may be pressed.
    """
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [_head(now.status, keys), Text(), _tiers(now.status), Text()]
    parts += [_sources(now, before), _ever(now.status), _requests(now, before)]
    parts.append(_copies(now, before))
    parts += _facts(now.status)
    parts += [Text(), *_events(now.status)]
    return Group(*parts)


def silence(instance: str, reason: str) -> RenderableType:
    """The frame of a server that does not answer."""
    from rich.text import Text

    return Text(f"{instance}: {reason}", style="red")


def _head(status: ServerStatus, keys: str) -> RenderableType:
    from rich.text import Text

    line = Text(status.instance, style="bold", no_wrap=True, overflow="ellipsis")
    line.append(f"  up {age(status.uptime_s)}  process {status.pid}", style="not bold")
    if not status.serving:
        line.append("  NOT SERVING: see the log", style="bold red")
    line.append(f"  {keys}", style="not bold dim")
    return line


def _tiers(status: ServerStatus) -> RenderableType:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 1, 0, 0))
    for title in ("tier", "gate", ""):
        table.add_column(title, no_wrap=True)
    for title in ("used", "of", "chunks", "pin", "in", "out"):
        table.add_column(title, justify="right", no_wrap=True)
    for tier in status.tiers:
        table.add_row(
            tier.name,
            _gate(tier),
            _bar(tier.used_bytes, tier.capacity_bytes),
            size_or_dash(tier.used_bytes),
            format_size(tier.capacity_bytes),
            count(tier.chunks),
            count(tier.pinned_chunks),
            count(tier.arriving_chunks),
            count(tier.leaving_chunks),
        )
    return table


def _gate(tier: TierStatus) -> RenderableType:
    from rich.text import Text

    if not tier.up:
        return Text("down", style="bold red")
    if tier.gate == "part":
        return Text(f"{100 * tier.load_share:.0f} %", style="yellow")
    return Text(tier.gate, style="green" if tier.gate == "on" else "yellow")


def _bar(part: float, whole: float) -> RenderableType:
    from rich.text import Text

    full = round(BAR_CHARACTERS * part / whole) if whole else 0
    bar = Text("█" * full, style="green")
    bar.append("░" * (BAR_CHARACTERS - full), style="dim")
    return bar


def _since(now: Mapping[str, float], before: Mapping[str, float] | None) -> dict[str, float]:
    return {key: value - (before or {}).get(key, 0) for key, value in now.items()}


def _sources(now: Moment, before: Moment | None) -> RenderableType:
    """Where prompt tokens of late came from."""
    from rich.text import Text

    whole = now.status.tokens_by_source
    late = _since(whole, None if before is None else before.status.tokens_by_source)
    line = Text("hits    ", no_wrap=True, overflow="ellipsis")
    for source in SOURCES:
        part = share(late.get(source, 0), sum(late.values()))
        line.append(f" {source} {part}", style=SOURCE_STYLES[source])
    line.append(f"   {_rate(sum(late.values()), now, before)} tokens/s")
    return line


def _ever(status: ServerStatus) -> RenderableType:
    from rich.text import Text

    total = sum(status.tokens_by_source.values())
    reused = total - status.tokens_by_source.get("computed", 0)
    said = f"ever     {share(reused, total)} of {count(total)} prompt tokens were not computed"
    return Text(said, no_wrap=True, overflow="ellipsis", style="dim")


def _requests(now: Moment, before: Moment | None) -> RenderableType:
    from rich.text import Text

    status, waits = now.status, now.status.waits
    ended = _since(
        status.requests_by_reason, None if before is None else before.status.requests_by_reason
    )
    line = Text("requests", no_wrap=True, overflow="ellipsis")
    line.append(f" {status.requests_here} here, {status.requests_waiting} waiting")
    line.append(f"   {_rate(sum(ended.values()), now, before)} ended/s")
    line.append(f"   waits p50 {span(waits.p50_s)} p99 {span(waits.p99_s)}")
    return line


def _copies(now: Moment, before: Moment | None) -> RenderableType:
    from rich.text import Text

    copied = _since(now.status.copied_bytes, None if before is None else before.status.copied_bytes)
    line = Text("copies  ", no_wrap=True, overflow="ellipsis")
    seconds = _seconds(now, before)
    for way, words in (("disk_to_ram", "disk → RAM"), ("ram_to_disk", "RAM → disk")):
        line.append(f" {words} {format_size(int(copied.get(way, 0) / seconds))}/s  ")
    return line


def _facts(status: ServerStatus) -> list[RenderableType]:
    from rich.text import Text

    lines: list[RenderableType] = []
    for name, facts in list(status.facts.items())[:FACT_LINES]:
        said = ", ".join(f"{key} {fact(value)[:FACT_CHARACTERS]}" for key, value in facts.items())
        if name == "guard":
            said = guard_line(facts)
        lines.append(Text(f"{name:8} {said}", no_wrap=True, overflow="ellipsis"))
    return lines


def _events(status: ServerStatus) -> list[RenderableType]:
    from rich.text import Text

    lines = []
    for occurrence in status.occurrences[:EVENT_LINES]:
        line = Text(f"{age(occurrence.age_s):>7} ago  ", style="dim", no_wrap=True)
        line.append(_event(occurrence), style="not dim")
        line.overflow = "ellipsis"
        lines.append(line)
    return list(lines)


def _event(occurrence: Occurrence) -> str:
    tier = TIERS.get(occurrence.tier or "", "everything")
    if not occurrence.chunks:
        return f"{tier} emptied by a {occurrence.event}"
    text = HAPPENED.get(occurrence.event, occurrence.event.replace("_", " ") + " in {tier}")
    noun = "chunk" if occurrence.chunks == 1 else "chunks"
    return f"{count(occurrence.chunks)} {noun} {text.format(tier=tier, policy='')}"


def _seconds(now: Moment, before: Moment | None) -> float:
    seconds = now.status.uptime_s if before is None else now.at_s - before.at_s
    return max(seconds, 1e-3)


def _rate(amount: float, now: Moment, before: Moment | None) -> str:
    return count(amount / _seconds(now, before))
