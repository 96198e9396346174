"""`emberkv status`: how the tiers of running servers are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from emberkv.app.cli.options import as_json, console, print_json
from emberkv.errors import ControlError

if TYPE_CHECKING:
    from rich.console import Console

    from emberkv.live.control.messages import ServerStatus


@click.command("status", short_help="Show how running servers are.")
@click.argument("instance", required=False)
@as_json
def command(instance: str | None, as_json: bool) -> int:
    """Show the tiers of the server INSTANCE, or of all servers of this user.

    Exit status 1 if a server does not answer, or one of its tiers can't be used.
    """
    import msgspec

    from emberkv.app import servers
    from emberkv.live.control.address import instances

    names = instances() if instance is None else [servers.chosen(instance)]
    if not names and not as_json:
        print("no server of yours runs here, or its control socket is off")
    statuses: list[ServerStatus] = []
    silent: list[tuple[str, str]] = []
    for name in names:
        try:
            statuses.append(servers.status_of(name))
        except ControlError as error:
            silent.append((name, str(error)))
    if as_json:
        facts = [msgspec.to_builtins(status) for status in statuses]
        print_json(facts + [{"instance": name, "error": why} for name, why in silent])
    else:
        out = console()
        for at, status in enumerate(statuses):
            if at:
                out.print()
            _show(out, status)
        for name, why in silent:
            out.print(f"{name}: {why}", markup=False)
    well = all(s.serving and all(tier.up for tier in s.tiers) for s in statuses)
    return int(bool(silent) or not well)


def _show(out: Console, status: ServerStatus) -> None:
    from rich.table import Table

    from emberkv.app import figures
    from emberkv.domain.units import format_size

    keeper = f", keeper {status.keeper_pid}" if status.keeper_pid else ""
    namespace = f", namespace {status.namespace[:16]}" if status.namespace else ""
    out.print(
        f"{status.instance}: emberkv {status.version}, up {figures.age(status.uptime_s)}, "
        f"process {status.pid}{keeper}{namespace}",
        markup=False,
        soft_wrap=True,
    )
    if not status.serving:
        out.print("the tiers are off until the next start: see the log", markup=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("tier")
    table.add_column("gate")
    for title in ("used", "of", "chunks", "pinned", "coming", "leaving"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("evicts by")
    for tier in status.tiers:
        gate = tier.gate if tier.gate != "part" else f"{100 * tier.load_share:g} %"
        table.add_row(
            tier.name,
            gate if tier.up else "down",
            figures.size_or_dash(tier.used_bytes),
            format_size(tier.capacity_bytes),
            str(tier.chunks),
            str(tier.pinned_chunks),
            str(tier.arriving_chunks),
            str(tier.leaving_chunks),
            tier.eviction_policy,
        )
    out.print(table)
    for tier in status.tiers:
        if not tier.up:
            out.print(f"{tier.name} is down: {tier.why_down or 'see the log'}", markup=False)
    for line in _lines(status):
        out.print(line, markup=False, soft_wrap=True)


def _lines(status: ServerStatus) -> list[str]:
    from emberkv.app import figures
    from emberkv.app.guard_words import guard_lines

    waits = status.waits
    waited = "nobody has waited yet"
    if waits.count:
        waited = (
            f"waits p50 {figures.span(waits.p50_s)}, p99 {figures.span(waits.p99_s)} "
            f"of the last {waits.count}"
        )
    limits = ", ".join(f"{name}={value:g}" for name, value in status.limits.items())
    reasons = sorted(status.requests_by_reason.items(), key=lambda each: -each[1])
    lines = [
        f"requests: {status.requests_here} here, {status.requests_waiting} waiting; {waited}",
        f"prompt tokens: {figures.tokens_by_source(status.tokens_by_source)}",
    ]
    if reasons:
        said = ", ".join(f"{reason} {number}" for reason, number in reasons)
        lines.append(f"ended requests, by why they got no more: {said}")
    for tier, events in status.chunks_by_event.items():
        said = ", ".join(f"{event} {number}" for event, number in events.items() if number)
        if said:
            lines.append(f"chunks of {tier} since the start: {said}")
    lines.append(f"budgets: {limits}")
    for name, facts in status.facts.items():
        if name == "guard":
            lines += guard_lines(facts)
            continue
        said = ", ".join(f"{key} {figures.fact(value)}" for key, value in facts.items())
        lines.append(f"{name}: {said}")
    return lines
