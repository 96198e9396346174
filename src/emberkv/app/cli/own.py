"""What commands that start a server of their own share: options of `serve`, a place for files."""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from emberkv.app.cli.serve import command as serve
from emberkv.errors import UsageError, WorldError

if TYPE_CHECKING:
    from emberkv.app.launch import ServeOptions

_NOT_OWN = (
    "instance",
    "request_log",
    "on_busy_disk",
    "print_command",
    "no_control",
    "guard",
    "canary",
)
"""Options of `serve` that mean nothing to a server of one's own."""


def server_parameters(without: Collection[str] = ()) -> list[click.Parameter]:
    """The parameters of `emberkv serve` that say how a server is laid out."""
    return [each for each in serve.params if each.name not in {*_NOT_OWN, *without}]


def serve_options(given: Mapping[str, Any], without: Collection[str] = ()) -> ServeOptions:
    """What was given, as `emberkv serve` would take it. Raises `UsageError`."""
    from emberkv.app.launch import ServeOptions

    names = {each.name for each in fields(ServeOptions)} & given.keys() - set(without)
    return ServeOptions(**{name: given[name] for name in names})


@contextmanager
def own_directory(disk: Path | None, purpose: str) -> Iterator[Path]:
    """A directory for a server's files, in the disk tier's where there is one; removed after."""
    try:
        with tempfile.TemporaryDirectory(dir=disk, prefix=f"{purpose}-") as made:
            yield Path(made)
    except FileNotFoundError as error:
        raise UsageError(f"{disk} does not exist; create the directory first") from error


@contextmanager
def ended_in_order() -> Iterator[None]:
    """Make SIGTERM end a block as Ctrl-C does: what it has started is ended with it.

    An error of a server brings the end of its log, which is printed before the error is one line.
    """

    def end(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except WorldError as error:
        message, *log = str(error).splitlines()
        if not log:
            raise
        print("\n".join(log), file=sys.stderr)
        raise WorldError(message) from error
    finally:
        signal.signal(signal.SIGTERM, before)
