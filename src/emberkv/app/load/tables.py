"""Tables and lines that fit a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from emberkv.app.load.compare import Held, Verdict
from emberkv.observe.baseline import (
    Baseline,
    Latencies,
    LengthClass,
    Quantiles,
    class_name,
)

if TYPE_CHECKING:
    from rich.table import Table

_SIGNALS: Final = ("first_token", "inter_token", "end_to_end")
SIGNAL_NAMES: Final = {
    "first_token": "first token",
    "inter_token": "inter-token",
    "end_to_end": "end-to-end",
}
SOURCE_NAMES: Final = {"host": "ram"}
"""The engine's words where they are not ours."""

QUANTILES: Final = ("p50", "p95", "p99")
_COLOURS: Final = {
    Held.WITHIN: "green",
    Held.OVER: "bold red",
    Held.UNCLEAR: "yellow",
    Held.TOO_FEW: "dim",
}
_MARKS: Final = {
    Held.WITHIN: "{} ",
    Held.OVER: "{}!",
    Held.UNCLEAR: "{}?",
    Held.TOO_FEW: "({})",
}


def short_time(seconds: float) -> str:
    """A time in at most six letters: `843ms`, `12.3s`, `421s`."""
    if seconds < 0.000995:
        return f"{seconds * 1000:.2f}ms"
    if seconds < 0.00995:
        return f"{seconds * 1000:.1f}ms"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f}ms"
    return f"{seconds:.2f}s" if seconds < 100 else f"{seconds:.0f}s"


def latency_table(overall: Latencies, classes: Sequence[LengthClass]) -> Table:
    """Quantiles by class of context length, and of all."""
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(box=SIMPLE, padding=0, pad_edge=False)
    table.add_column("\nprompt\ntokens", no_wrap=True)
    table.add_column("\n\nn", justify="right", no_wrap=True)
    for name in ("first\ntoken", "inter-\ntoken", "end to\nend"):
        for quantile in QUANTILES:
            heading = f"{name}\n{quantile}" if quantile == "p50" else f"\n\n{quantile}"
            table.add_column(heading, justify="right", no_wrap=True)
    for each in classes:
        table.add_row(class_name(each.up_to_tokens), *_cells(each.latencies))
    if len(classes) != 1:
        table.add_row("all", *_cells(overall))
    return table


def _cells(latencies: Latencies) -> list[str]:
    cells = [str(latencies.requests)]
    for signal in _SIGNALS:
        found: Quantiles | None = getattr(latencies, signal)
        if found is None:
            cells += ["-", "-", "-"]
        else:
            cells += [short_time(each) for each in (found.p50_s, found.p95_s, found.p99_s)]
    return cells


def verdict_table(verdicts: Sequence[Verdict], budget: float) -> Table:
    """A row per signal: its quantiles as multiples of the baseline's, those over marked."""
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("at a\ntime", justify="right")
    table.add_column("prompt\ntokens", no_wrap=True)
    table.add_column("\nfigure", no_wrap=True)
    for heading in QUANTILES:
        table.add_column(f"\n{heading}", justify="right", no_wrap=True)
    table.add_column(f"budget\n{budget:g}x", no_wrap=True)
    rows: dict[tuple[int, str, str], dict[str, Verdict]] = {}
    for each in verdicts:
        row = rows.setdefault((each.concurrency, each.length_class, each.signal), {})
        row[each.quantile] = each
    for (concurrency, length_class, signal), by_quantile in rows.items():
        found = list(by_quantile.values())
        name = SIGNAL_NAMES[signal]
        table.add_row(
            str(concurrency), length_class, name, *map(_ratio, found), _row_verdict(found)
        )
    return table


def _ratio(verdict: Verdict) -> str:
    shown = f"{verdict.ratio:.2f}x"
    return f"[{_COLOURS[verdict.held]}]{_MARKS[verdict.held].format(shown)}[/]"


def _row_verdict(verdicts: Sequence[Verdict]) -> str:
    held = {verdict.held for verdict in verdicts}
    worst = next(
        each for each in (Held.OVER, Held.UNCLEAR, Held.WITHIN, Held.TOO_FEW) if each in held
    )
    return f"[{_COLOURS[worst]}]{worst.value}[/]"


def verdict_summary(verdicts: Sequence[Verdict], budget: float) -> str:
    """What the comparison comes to, in one line."""
    counts = {held: sum(verdict.held is held for verdict in verdicts) for held in Held}
    judged = len(verdicts) - counts[Held.TOO_FEW]
    if not judged:
        return f"nothing could be judged: too few samples for each of {len(verdicts)} figures"
    parts = [
        f"{counts[Held.OVER]} of {judged} figures are over {budget:g}x the baseline (!)"
        if counts[Held.OVER]
        else f"none of {judged} figures is over {budget:g}x the baseline by more than chance"
    ]
    if counts[Held.UNCLEAR]:
        parts.append(f"{counts[Held.UNCLEAR]} are over by what chance explains (?)")
    if counts[Held.TOO_FEW]:
        parts.append(f"{counts[Held.TOO_FEW]} have too few samples (in brackets)")
    return "; ".join(parts)


def sources_line(tokens: Mapping[str, int]) -> str:
    """Prompt tokens by source, in one line."""
    whole = sum(tokens.values())
    if not whole:
        return "prompt tokens: none"
    parts = [
        f"{SOURCE_NAMES.get(source, source)} {count} ({count / whole:.0%})"
        for source, count in tokens.items()
    ]
    return f"prompt tokens: {', '.join(parts)}"


def baseline_lines(baseline: Baseline) -> list[str]:
    """What a baseline holds beside its table."""
    lines = []
    if baseline.concurrency is not None:
        seen = baseline.concurrency
        lines.append(f"requests at a time: {seen.mean:.1f} on average, {seen.highest:g} at most")
    if baseline.reused_share is not None:
        lines.append(f"reused by the engine's own prefix cache: {baseline.reused_share:.0%}")
    cache = baseline.device_cache
    if cache.usage_mean is not None and cache.usage_highest is not None:
        lines.append(
            f"device cache in use: {cache.usage_mean:.0%} on average, {cache.usage_highest:.0%} "
            f"at most; {cache.preemptions} preemptions"
        )
    if baseline.prefill:
        points = ", ".join(f"{x.tokens}: {short_time(x.seconds)}" for x in baseline.prefill)
        lines.append(f"prefill of single prompts: {points}")
    return lines + [f"note: {note}" for note in baseline.notes]
