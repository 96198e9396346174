"""`emberkv selfcheck`: show that what comes back from a tier is what would be computed."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from emberkv.app.cli.options import ManyOptions, as_json, console, print_json
from emberkv.app.cli.own import ended_in_order, own_directory, serve_options, server_parameters
from emberkv.errors import UsageError

if TYPE_CHECKING:
    from emberkv.app.launch import ServeOptions
    from emberkv.app.selfcheck import Row

_HELP = """Start a server of its own with the layout given, and compare answers.

Prompts of several lengths are answered computed, from the device, from RAM, from RAM after a kill
and from disk. Tokens must be equal and log-probabilities no further apart than the engine is from
itself, which is measured first. Takes the options of serve; everything after -- goes to vllm serve:

\b
    emberkv selfcheck MODEL --ram 4GiB --disk /mnt/kv --disk-size 8GiB -- --dtype bfloat16

Give --chunk-tokens more than once to check more than one size of chunk. Exit status 1 if an answer
disagrees or did not come from where it should.
"""


@click.command(
    "selfcheck",
    cls=ManyOptions,
    help=_HELP,
    short_help="Check that a restore equals a recompute, on a server of its own.",
)
@click.option(
    "--chunk-tokens",
    type=click.IntRange(min=1),
    multiple=True,
    metavar="TOKENS",
    help="Tokens per chunk; may be given more than once.  [default: one block]",
)
@as_json
def command(given: Mapping[str, Any]) -> int:
    """Check each layout; the help text is `_HELP`."""
    from emberkv.engines.vllm.compat import require_tested

    require_tested()
    from emberkv.app.selfcheck import ADVICE, Finding, finding

    with ended_in_order():
        rows = _check(given)
    if given["as_json"]:
        print_json([row.facts() for row in rows])
    else:
        _print(rows)
    found = finding(rows)
    if found is Finding.AGREES:
        return 0
    _say(ADVICE[found])
    return 1


command.params = [*server_parameters(without=("chunk_tokens",)), *command.params]


def _check(given: Mapping[str, Any]) -> list[Row]:
    from emberkv.app.own_server import OwnServer
    from emberkv.app.selfcheck import EAGER_SPEC, SelfCheck, longest_prompt
    from emberkv.engines.vllm.command_line import Flags, Launch, is_cpu_build

    options = serve_options(given, without=("chunk_tokens",))
    flags = Flags(options.vllm_arguments)
    engine = Launch(options.model, flags, os.environ, on_cpu=is_cpu_build(os.environ))
    block_tokens = engine.block_tokens()
    rows: list[Row] = []
    for layout in _layouts(options, given["chunk_tokens"]):
        chunk_tokens = layout.chunk_tokens or block_tokens * (layout.blocks_per_chunk or 1)
        longest = longest_prompt(layout.ram_bytes, engine.kv_bytes_per_token())
        with own_directory(layout.disk, "selfcheck") as directory:
            server = OwnServer(layout, directory, spec=EAGER_SPEC)
            check = SelfCheck(server, block_tokens, chunk_tokens, longest, _say)
            _say(f"chunks of {chunk_tokens} tokens: starting a server")
            rows += check.run()
    return rows


def _layouts(options: ServeOptions, chunk_tokens: Sequence[int]) -> list[ServeOptions]:
    if not chunk_tokens:
        return [options]
    if options.blocks_per_chunk is not None:
        raise UsageError("give --chunk-tokens or --blocks-per-chunk, not both")
    return [replace(options, chunk_tokens=each) for each in chunk_tokens]


def _say(what: str) -> None:
    print(f"emberkv: {what}", file=sys.stderr, flush=True)


def _print(rows: Sequence[Row]) -> None:
    from rich.table import Table

    table = Table("chunk", "prompt", "from", "loaded", "apart", "limit", "result")
    for row in rows:
        found = row.comparison
        result = row.problem or found.verdict.value
        table.add_row(
            str(row.chunk_tokens),
            str(row.prompt_tokens),
            row.source.value,
            str(row.loaded_tokens),
            f"{found.distance:.1e}",
            f"{found.limit:.1e}",
            result if row.agrees else f"[bold red]{result}[/]",
        )
    console().print(table)
