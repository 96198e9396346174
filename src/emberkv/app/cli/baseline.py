"""`emberkv baseline`: record how quick a server is without tiers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from emberkv.app.cli.load_options import LONGER, NUMBERS, asked, load_options
from emberkv.app.cli.options import (
    DIRECTORY,
    ManyOptions,
    as_json,
    console,
    print_json,
    progress_bar,
)

if TYPE_CHECKING:
    from emberkv.observe.baseline import Baseline

_HELP = """Record how quick a running server is without tiers, for guard, load and cost model.

\b
    emberkv baseline --server http://127.0.0.1:8000 --out baseline.json
    emberkv baseline --server http://127.0.0.1:8000 --out baseline.json --watch 3600

A mixed workload is put on the server, which must be your own and have no other traffic. With
--watch nothing is put on it but a few single requests: the engine's metrics are read while your own
traffic runs.
"""


@click.command(
    "baseline",
    cls=ManyOptions,
    help=_HELP,
    short_help="Record how quick a server is without tiers.",
)
@click.option("--out", type=DIRECTORY, required=True, metavar="FILE", help="The file to write.")
@load_options
@click.option(
    "--watch",
    "watch_s",
    type=LONGER,
    metavar="SECONDS",
    help="Only read the engine's metrics for so long, under your own traffic.",
)
@click.option(
    "--prefill-lengths",
    type=NUMBERS,
    metavar="TOKENS,…",
    help="Lengths of the single requests.  [default: doubling, up to the longest of --lengths]",
)
@click.option("--no-prefill", is_flag=True, help="Send no single requests.")
@click.option("--with-tiers", is_flag=True, help="Record a server that runs with emberkv.")
@as_json
def command(given: Mapping[str, Any]) -> int:
    """Record and write a baseline; the help text is `_HELP`."""
    from emberkv.app.load.record import record
    from emberkv.app.machine import require_writable
    from emberkv.observe.baseline import write_baseline

    out: Path = given["out"]
    what = asked(given)
    require_writable(out.absolute().parent)
    baseline = asyncio.run(record(what, progress_bar))
    write_baseline(out, baseline)
    if given["as_json"]:
        from msgspec import to_builtins

        print_json(to_builtins(baseline))
    else:
        _show(baseline, out)
    return 0


def _show(baseline: Baseline, out: Path) -> None:
    from emberkv.app.load.tables import baseline_lines, latency_table

    screen = console()
    server = baseline.server
    version = f", vLLM {server.engine_version}" if server.engine_version else ""
    screen.print(f"{server.model} at {server.url}{version}", markup=False)
    screen.print(latency_table(baseline.overall, baseline.classes))
    for line in baseline_lines(baseline):
        screen.print(line, markup=False)
    screen.print(f"written to {out}", markup=False)
