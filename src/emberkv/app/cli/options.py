"""Types of options, and where results go."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from emberkv.domain.units import parse_size
from emberkv.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console


class Size(click.ParamType):  # type: ignore[type-arg]
    """A size in bytes, written like 16GiB."""

    name = "size"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        if isinstance(value, int):
            return value
        try:
            return parse_size(str(value))
        except UsageError as error:
            self.fail(str(error), param, ctx)


class NamedPath(click.Path):
    """A path that is not empty: an unset variable of a shell must not mean the directory here."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not os.fspath(value):
            self.fail("the path is empty", param, ctx)
        return super().convert(value, param, ctx)


class FiniteSeconds(click.FloatRange):
    """A number of seconds that is one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        seconds = super().convert(value, param, ctx)
        if not math.isfinite(seconds):
            self.fail(f"{value} is not a number of seconds", param, ctx)
        return seconds


SIZE = Size()
DIRECTORY = NamedPath(path_type=Path, file_okay=True)
SECONDS = FiniteSeconds(min=0)


class ManyOptions(click.Command):
    """A command whose function takes its options as one mapping, by their names."""

    def invoke(self, ctx: click.Context) -> object:
        assert self.callback is not None
        return ctx.invoke(self.callback, ctx.params)


as_json = click.option("--json", "as_json", is_flag=True, help="Print the facts as JSON.")


def print_json(facts: object) -> None:
    """Print facts for programs: one JSON document on standard output."""
    print(json.dumps(facts, indent=2, ensure_ascii=False))


def console() -> Console:
    """Standard output for people; as wide as it takes when it is no terminal."""
    from rich.console import Console

    out = Console(highlight=False)
    return out if sys.stdout.isatty() else Console(highlight=False, width=160)


@contextmanager
def progress_bar(name: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal, nothing elsewhere. Yields what is called with chunks done and in all."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = ("[progress.description]{task.description}", BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task(name, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
