"""`emberkv control`: change a running server's tiers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from emberkv.app.cli.options import as_json, print_json
from emberkv.errors import UsageError

if TYPE_CHECKING:
    from emberkv.live.control.messages import Message

GATES = ("on", "off", "drain")
SCOPES = ("ram", "disk", "all")


@click.group("control", short_help="Change a running server's tiers.")
@click.option("-i", "--instance", metavar="NAME", help="The server, if several run.")
@as_json
@click.pass_context
def command(context: click.Context, instance: str | None, as_json: bool) -> None:
    """Change the tiers of a running server, under load too; a restart forgets it.

    Exit status 0 if it was done, 1 if it could not be, or not wholly, 2 for wrong use.
    """
    context.obj = (instance, as_json)


@command.command("tier", short_help="Open, shut or drain a tier.")
@click.argument("tier")
@click.argument("gate", type=click.Choice(GATES))
@click.pass_context
def tier(context: click.Context, tier: str, gate: str) -> int:
    """Open TIER (on), shut it (off: neither read nor written) or drain it (read only).

    RAM shut is all tiers shut, since everything passes through RAM.
    """
    from emberkv.live.control.messages import GateName, SetGate

    return _tell(context, SetGate(tier, GateName(gate)))


@command.command("purge", short_help="Forget chunks.")
@click.argument("scope", type=click.Choice(SCOPES), default="all")
@click.pass_context
def purge(context: click.Context, scope: str) -> int:
    """Forget what is in RAM, on disk, or (the default) everything, for good.

    Of RAM alone, chunks that are just being loaded or copied stay. The device cache is the
    engine's own and stays too.
    """
    from emberkv.live.control.messages import Purge, PurgeScope

    return _tell(context, Purge(PurgeScope(scope)))


@command.command("policy", short_help="Change what leaves a full tier first.")
@click.argument("tier")
@click.argument("policy")
@click.pass_context
def policy(context: click.Context, tier: str, policy: str) -> int:
    """Evict from TIER by POLICY from now on; what is there stays, in its order."""
    from emberkv.live.control.messages import SetPolicy

    return _tell(context, SetPolicy(tier, policy))


@command.command("budget", short_help="Change limits in force.")
@click.argument("limits", nargs=-1, required=True, metavar="NAME=VALUE ...")
@click.pass_context
def budget(context: click.Context, limits: tuple[str, ...]) -> int:
    """Put other limits in force, like max_wait_s=2; `emberkv status` shows them all."""
    from emberkv.live.control.messages import SetBudget

    return _tell(context, SetBudget(dict(map(_limit, limits))))


def _limit(text: str) -> tuple[str, float]:
    name, equals, value = text.partition("=")
    try:
        number = float(value)
    except ValueError:
        number = float("nan")
    if not equals or not name or not 0 <= number < float("inf"):
        raise UsageError(f"a budget is written NAME=VALUE, with a number from 0; got '{text}'")
    return name, number


def _tell(context: click.Context, message: Message) -> int:
    from emberkv.app import servers
    from emberkv.live.control.client import ControlClient
    from emberkv.live.control.messages import Done

    instance, as_json = context.obj
    name = servers.chosen(instance)
    with ControlClient(name) as client:
        done = client.ask(message, Done)
    if as_json:
        print_json({"instance": name, "done": done.what, "undone": done.undone})
    else:
        print(f"{name}: {done.what}")
        if done.undone is not None:
            print(f"{name}: {done.undone}")
    return int(done.undone is not None)
