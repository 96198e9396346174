"""Options that `emberkv baseline` and `emberkv load` share: which server, and which workload."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click

from emberkv.app.cli.options import FiniteSeconds

if TYPE_CHECKING:
    from emberkv.app.load.record import Asked


class WholeNumbers(click.ParamType):  # type: ignore[type-arg]
    """Whole numbers, 1 or more, with commas between: `256,1024`."""

    name = "numbers"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        parts = [part.strip() for part in str(value).split(",")]
        if not all(re.fullmatch(r"\d{1,9}", part) and int(part) for part in parts):
            self.fail(f"'{value}' is no list of whole numbers like 256,1024", param, ctx)
        return tuple(int(part) for part in parts)


NUMBERS = WholeNumbers()
COUNT = click.IntRange(min=1)
SHARE = click.FloatRange(min=0, max=1)
LONGER = FiniteSeconds(min=1)

_OPTIONS = (
    click.option("--server", required=True, metavar="URL", help="The server's address."),
    click.option(
        "--model", metavar="NAME", help="Which model of the server.  [default: its first]"
    ),
    click.option(
        "--lengths",
        type=NUMBERS,
        metavar="TOKENS,…",
        help="Prompt lengths, in equal shares.  [default: 256,1024,4096, those that fit]",
    ),
    click.option(
        "--concurrency",
        type=NUMBERS,
        default="1,4,8",
        show_default=True,
        metavar="N,…",
        help="Requests at a time, a step for each.",
    ),
    click.option(
        "--requests",
        type=COUNT,
        default=300,
        show_default=True,
        metavar="N",
        help="Requests of a step, all lengths together.",
    ),
    click.option(
        "--answer-tokens",
        type=COUNT,
        default=16,
        show_default=True,
        metavar="N",
        help="Tokens of each answer.",
    ),
    click.option(
        "--returning",
        type=SHARE,
        default=0.5,
        show_default=True,
        metavar="SHARE",
        help="Share of requests that begin with most of an earlier prompt.",
    ),
    click.option(
        "--documents",
        type=COUNT,
        default=16,
        show_default=True,
        metavar="N",
        help="How many of the latest prompts of a length may return.",
    ),
    click.option(
        "--vocabulary",
        type=COUNT,
        default=30_000,
        show_default=True,
        metavar="N",
        help="Prompts are of token ids below this.",
    ),
    click.option(
        "--seed",
        type=click.IntRange(min=0),
        default=0,
        show_default=True,
        metavar="N",
        help="The same seed asks the same prompts; take another to find none of them cached.",
    ),
    click.option(
        "--timeout",
        "timeout_s",
        type=LONGER,
        default=300,
        show_default=True,
        metavar="SECONDS",
        help="How long the server may send nothing before a request has failed.",
    ),
    click.option(
        "--this-server-is-mine",
        is_flag=True,
        help="Load a server that is not on this machine.",
    ),
)


def load_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the shared options to a command."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def asked(given: Mapping[str, Any]) -> Asked:
    """What the options ask for. Raises `UsageError`, also for a server that may not be loaded."""
    from emberkv.app.load.client import server_url
    from emberkv.app.load.record import Asked
    from emberkv.app.load.server import require_own
    from emberkv.app.load.workload import Workload

    url = server_url(given["server"])
    if given.get("watch_s") is None:
        require_own(url, is_mine=given["this_server_is_mine"])
    names = ("requests", "answer_tokens", "returning", "documents", "vocabulary", "seed")
    workload = Workload(**{name: given[name] for name in names})
    return Asked(
        url=url,
        model=given["model"],
        lengths=given["lengths"],
        workload=workload,
        concurrency=given["concurrency"],
        timeout_s=given["timeout_s"],
        watch_s=given.get("watch_s"),
        prefill_lengths=() if given.get("no_prefill") else given.get("prefill_lengths"),
        with_tiers=given.get("with_tiers", False),
        command=shlex.join(["emberkv", *sys.argv[1:]]),
    )
