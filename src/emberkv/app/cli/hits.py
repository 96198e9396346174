"""`emberkv hits`: what a request log says of the tiers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from emberkv.app.cli.options import DIRECTORY, as_json, console, print_json

if TYPE_CHECKING:
    from rich.table import Table

    from emberkv.app.hits import Group, Hits

P95_SAMPLES: Final = 20


@click.command("hits", short_help="Show what a request log says of the tiers.")
@click.argument("log", type=DIRECTORY, metavar="FILE")
@as_json
def command(log: Path, as_json: bool) -> int:
    """Show where the prompts in the request log FILE came from, and how soon answers began.

    A request counts for the slowest place that it got tokens from: disk, RAM, device. `saved` holds
    its time to first token against computed requests of the same class of context lengths. A figure
    in brackets is only the largest of few.
    """
    from emberkv.app import hits

    found = hits.figures(*hits.read(log))
    if as_json:
        print_json(hits.facts_of(found))
        return 0
    out = console()
    for line in _head(found):
        out.print(line, markup=False, soft_wrap=True)
    if found.groups:
        out.print(_table(found.groups))
    for line in _tail(found):
        out.print(line, markup=False, soft_wrap=True)
    return 0


def _head(found: Hits) -> list[str]:
    from emberkv.app.figures import tokens_by_source

    lines = [f"{found.requests} requests; prompt tokens: {tokens_by_source(found.tokens)}"]
    if found.unreadable:
        lines.append(f"{found.unreadable} lines could not be read and are left out")
    return lines


def _tail(found: Hits) -> list[str]:
    from emberkv.app.load.tables import short_time

    waited = "nobody waited for the disk"
    if found.waits is not None:
        waits = found.waits
        waited = (
            f"{waits.count} waited for the disk, p50 {short_time(waits.p50_s)}, "
            f"p99 {short_time(waits.p99_s)}"
        )
    lines = [f"{waited}; {found.stored_chunks} chunks were stored"]
    if found.reasons:
        said = ", ".join(f"{reason} {count}" for reason, count in found.reasons.most_common())
        lines.append(f"why they got no more: {said}")
    return lines


def _table(groups: tuple[Group, ...]) -> Table:
    from rich.table import Table

    from emberkv.app.hits import computed_beside
    from emberkv.app.load.tables import short_time
    from emberkv.observe.baseline import P99_SAMPLES, class_name

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("prompt tokens", no_wrap=True)
    table.add_column("from", no_wrap=True)
    for title in ("requests", "reused", "first token p50", "p95", "p99", "saved at p50"):
        table.add_column(title, justify="right", no_wrap=True)
    for group in groups:
        times, beside = group.first_token, computed_beside(group, groups)
        cells = ["-"] * 3
        if times is not None:
            p95, p99 = short_time(times.p95_s), short_time(times.p99_s)
            cells = [
                short_time(times.p50_s),
                p95 if times.count >= P95_SAMPLES else f"({p95})",
                p99 if times.count >= P99_SAMPLES else f"({p99})",
            ]
        saved = "-"
        if times is not None and beside is not None and beside.p50_s:
            saved = f"{100 * (1 - times.p50_s / beside.p50_s):.0f} %"
        name, reused = class_name(group.up_to_tokens), f"{100 * group.reused_share:.0f} %"
        table.add_row(name, group.source, str(group.requests), reused, *cells, saved)
    return table
