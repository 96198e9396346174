"""`emberkv top`: a running server's tiers, live in the terminal."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from emberkv.app.cli.options import console
from emberkv.errors import ControlError, UsageError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from emberkv.app.screen import Moment

QUIT_KEYS = frozenset("qQ\x03\x04\x1b")


@click.command("top", short_help="Show a running server live.")
@click.argument("instance", required=False)
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(min=0.1, max=60),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between two frames.",
)
@click.option("--once", is_flag=True, help="Print one frame and end.")
def command(instance: str | None, interval_s: float, once: bool) -> int:
    """Show the tiers of the server INSTANCE live; q ends it.

    Rates and hits are of the last interval; with --once, since the server's start.
    """
    from emberkv.app import screen, servers

    name = servers.chosen(instance)
    out = console()
    if once:
        moment = screen.Moment(servers.status_of(name), time.monotonic())
        out.print(screen.frame(moment, None))
        return 0
    if not sys.stdout.isatty():
        raise UsageError("there is no terminal to draw on; --once prints one frame")
    _watch(name, interval_s)
    return 0


def _watch(name: str, interval_s: float) -> None:
    from rich.console import Console
    from rich.live import Live

    before: Moment | None = None
    with (
        _keys() as keys,
        Live(console=Console(highlight=False), screen=True, auto_refresh=False) as live,
    ):
        while True:
            rendered, before = _next(name, before)
            live.update(rendered, refresh=True)
            if _quits(keys, interval_s):
                return


def _next(name: str, before: Moment | None) -> tuple[RenderableType, Moment | None]:
    """The next frame; a server that is gone may come back under its name."""
    from emberkv.app import screen, servers

    try:
        now = screen.Moment(servers.status_of(name), time.monotonic())
    except ControlError as error:
        return screen.silence(name, str(error)), None
    if before is not None and before.status.pid != now.status.pid:
        before = None
    return screen.frame(now, before, keys="q quits"), now


@contextlib.contextmanager
def _keys() -> Iterator[int | None]:
    """Standard input without waiting for whole lines; None if it is no terminal."""
    import termios
    import tty

    if not sys.stdin.isatty():
        yield None
        return
    fd = sys.stdin.fileno()
    settings = termios.tcgetattr(fd)
    tty.setcbreak(fd)
    try:
        yield fd
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, settings)


def _quits(keys: int | None, seconds: float) -> bool:
    """Wait; whether a key that quits was pressed meanwhile."""
    if keys is None:
        time.sleep(seconds)
        return False
    deadline_s = time.monotonic() + seconds
    while (left_s := deadline_s - time.monotonic()) > 0:
        if not select.select([keys], [], [], left_s)[0]:
            return False
        pressed = os.read(keys, 64).decode(errors="replace")
        if not pressed or QUIT_KEYS.intersection(pressed[:1]):
            return True
    return False
