"""`emberkv serve`: start a vLLM server with its KV cache in tiers."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NoReturn

import click

from emberkv.app.cli.options import DIRECTORY, SECONDS, SIZE, ManyOptions
from emberkv.config import EVICTION_POLICY_NAMES, ON_BUSY_DISK, Config

_DEFAULTS = Config(ram_bytes=1)
_HELP = """Start `vllm serve MODEL` with its KV cache in host RAM and, if asked, on disk.

Everything after -- goes to vllm serve as it is:

\b
    emberkv serve MODEL --ram 16GiB -- --port 8001
    emberkv serve MODEL --ram 16GiB --disk /mnt/kv --disk-size 200GiB

Sizes are explicit. A size that does not fit this machine is refused before anything starts.
"""


@click.command(
    "serve",
    cls=ManyOptions,
    help=_HELP,
    short_help="Start a vLLM server with its KV cache in tiers.",
)
@click.argument("model")
@click.option(
    "--ram", "ram_bytes", type=SIZE, required=True, help="RAM tier, total over all ranks: 16GiB."
)
@click.option("--disk", type=DIRECTORY, metavar="DIR", help="Directory of the disk tier.")
@click.option(
    "--disk-size", "disk_bytes", type=SIZE, help="Size of the disk tier, with --disk: 200GiB."
)
@click.option(
    "--reserve",
    "reserve_bytes",
    type=SIZE,
    help="RAM that is left to the system, the page cache and neighbours.  [default: 10 % of RAM]",
)
@click.option(
    "--chunk-tokens",
    type=click.IntRange(min=1),
    metavar="TOKENS",
    help="Tokens per chunk, a multiple of the engine's block.  [default: one block]",
)
@click.option(
    "--blocks-per-chunk",
    type=click.IntRange(min=1),
    metavar="BLOCKS",
    help="The chunk's size in blocks of the engine, instead of --chunk-tokens.",
)
@click.option(
    "--eviction-policy",
    type=click.Choice(EVICTION_POLICY_NAMES),
    help=f"What leaves a full tier first.  [default: {_DEFAULTS.eviction_policy}]",
)
@click.option(
    "--keep",
    "keep_s",
    type=SECONDS,
    metavar="SECONDS",
    help="How long the RAM tier outlives a crash of the engine; 0 = not at all.  "
    f"[default: {_DEFAULTS.keep_s:g}]",
)
@click.option(
    "--max-wait",
    "max_wait_s",
    type=SECONDS,
    metavar="SECONDS",
    help="How long a request may wait for its chunks from disk.  "
    f"[default: {_DEFAULTS.max_wait_s:g}]",
)
@click.option(
    "--max-stall",
    "max_stall_s",
    type=SECONDS,
    metavar="SECONDS",
    help=f"How long it may wait without any chunk arriving.  [default: {_DEFAULTS.max_stall_s:g}]",
)
@click.option(
    "--max-slowdown",
    type=click.FloatRange(1.0, 10.0),
    metavar="FACTOR",
    help="How much later than without emberkv a request may be served because it waited for its "
    f"chunks.  [default: {_DEFAULTS.max_slowdown:g}]",
)
@click.option(
    "--request-log", type=DIRECTORY, metavar="FILE", help="Write a JSON line per request."
)
@click.option(
    "--instance",
    metavar="NAME",
    help="Name by which a restarted server finds its RAM tier.  [default: by model and replica]",
)
@click.option(
    "--model-identity",
    metavar="TEXT",
    help="The model and its version, where its files can't tell them.",
)
@click.option(
    "--on-busy-disk",
    type=click.Choice(ON_BUSY_DISK),
    help="What to do if another server has the disk tier open.  "
    f"[default: {_DEFAULTS.on_busy_disk}]",
)
@click.option(
    "--no-control", is_flag=True, help="No control socket: no status, control, top and why."
)
@click.option(
    "--canary",
    type=click.FloatRange(0.0, 1.0),
    metavar="SHARE",
    help="Share of requests with a hit that are computed and compared with what is kept.  "
    "[default: 0]",
)
@click.option(
    "--baseline",
    type=DIRECTORY,
    metavar="FILE",
    help="What emberkv baseline recorded, for budgets of the guard and for the cost model.",
)
@click.option(
    "--guard",
    type=DIRECTORY,
    metavar="FILE",
    help="Rules of the guard, as JSON: when a tier is taken out because requests get slower.",
)
@click.option("--print-command", is_flag=True, help="Print the plain vllm command; start nothing.")
@click.argument("vllm_arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- VLLM_FLAG ...]")
def command(given: Mapping[str, Any]) -> int:
    """Start the engine in place of this process; the help text is `_HELP`."""
    from emberkv.app import launch
    from emberkv.engines.vllm.compat import require_tested

    options = launch.ServeOptions(**{f.name: given[f.name] for f in fields(launch.ServeOptions)})
    arguments = launch.vllm_arguments(options, os.environ)
    plan = launch.check(options, os.environ)
    if given["print_command"]:
        print(launch.plain_command(arguments))
        return 0
    engine_command = launch.engine_command(arguments)
    require_tested()
    print(f"emberkv: {launch.summary(options, plan)}", file=sys.stderr, flush=True)
    return _become(engine_command)


def _become(engine_command: list[str]) -> NoReturn:
    """Replace this process, so that signals and the exit status are the engine's own."""
    os.execv(engine_command[0], engine_command)
