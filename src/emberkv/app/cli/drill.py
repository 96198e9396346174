"""`emberkv drill`: make things go wrong on a server of its own, under load."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from emberkv.app.cli.options import ManyOptions, as_json, console, print_json
from emberkv.app.cli.own import ended_in_order, own_directory, serve_options, server_parameters
from emberkv.config_values import nearest
from emberkv.errors import UsageError

if TYPE_CHECKING:
    from emberkv.app.drilling.drills import Drill
    from emberkv.app.drilling.scene import Row

_HELP = """Start a server of its own, put load on it, and make things go wrong.

Takes the options of serve; everything after -- goes to vllm serve. The RAM tier and the device's
cache are made small, so that prompts return from disk.

\b
    emberkv drill MODEL --ram 4GiB --disk /mnt/kv --disk-size 8GiB -- --dtype bfloat16
    emberkv drill MODEL … --only hung-disk --only slow-disk

The cost of a drill is the p99 of the time to first token while things go wrong, over that of the
same requests without emberkv. Exit status 1 if a drill fails.
"""


@click.command(
    "drill",
    cls=ManyOptions,
    help=_HELP,
    short_help="Make things go wrong on a server of its own, under load.",
)
@click.option("--only", multiple=True, metavar="NAME", help="Only this drill; may be repeated.")
@click.option(
    "--requests",
    type=click.IntRange(min=4),
    default=100,
    metavar="COUNT",
    help="Requests in each phase of a drill.  [default: 100]",
)
@click.option(
    "--prompt-tokens",
    type=click.IntRange(min=1),
    default=1024,
    metavar="TOKENS",
    help="Tokens of each prompt.  [default: 1024]",
)
@as_json
def command(given: Mapping[str, Any]) -> int:
    """Run the drills; the help text is `_HELP`."""
    from emberkv.engines.vllm.compat import require_tested

    require_tested()
    with ended_in_order():
        rows = _drill(given)
    if given["as_json"]:
        print_json([row.facts() for row in rows])
    else:
        _print(rows)
    return int(not all(row.passed for row in rows))


command.params = [*server_parameters(), *command.params]


def _drill(given: Mapping[str, Any]) -> list[Row]:
    from emberkv.app.drilling.drills import run
    from emberkv.app.drilling.load import Workload
    from emberkv.app.drilling.scene import ANSWER_TOKENS, FRESH, Scene, shape_of
    from emberkv.engines.vllm.command_line import Flags, Launch, is_cpu_build

    options = serve_options(given)
    flags = Flags(options.vllm_arguments)
    engine = Launch(options.model, flags, os.environ, on_cpu=is_cpu_build(os.environ))
    drills = _chosen(given["only"], has_disk=options.disk is not None)
    shape = shape_of(options, engine, given["prompt_tokens"])
    if not shape.whole_tokens:
        raise UsageError(
            f"--prompt-tokens {shape.prompt_tokens} is less than one chunk of "
            f"{shape.chunk_tokens} tokens: nothing would be kept"
        )
    workload = Workload.make(shape.returning, FRESH, shape.prompt_tokens, ANSWER_TOKENS)
    with own_directory(options.disk, "drill") as directory:
        scene = Scene(options, directory, shape, workload, given["requests"])
        _say("the same load on a server without tiers")
        scene.measure()
        _say("a server with tiers")
        rows: list[Row] = []
        with scene.server:
            scene.begin()
            try:
                for drill in drills:
                    _say(f"{drill.name}: {drill.about}")
                    rows.append(run(drill, scene))
            finally:
                scene.end()
        return rows


def _chosen(names: Sequence[str], *, has_disk: bool) -> list[Drill]:
    from emberkv.app.drilling.drills import DRILLS

    known = [drill.name for drill in DRILLS]
    for name in names:
        if name not in known:
            raise UsageError(f"no drill '{name}'{nearest(name, known)}")
    chosen = [drill for drill in DRILLS if not names or drill.name in names]
    left_out = [drill.name for drill in chosen if drill.needs_disk and not has_disk]
    if left_out:
        _say(f"without --disk there is no {', '.join(left_out)}")
    if len(left_out) == len(chosen):
        raise UsageError("nothing is left to drill; give --disk and --disk-size")
    return [drill for drill in chosen if drill.name not in left_out]


def _say(what: str) -> None:
    print(f"emberkv: {what}", file=sys.stderr, flush=True)


def _print(rows: Sequence[Row]) -> None:
    from rich.table import Table

    table = Table("drill", "result", "p99", "detail")
    for row in rows:
        result = "passed" if row.passed else "[bold red]failed[/]"
        ratio = "" if row.p99_ratio is None else f"{row.p99_ratio:.2f} x"
        table.add_row(row.drill, result, ratio, row.detail)
    console().print(table)
