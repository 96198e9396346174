"""The command line: `emberkv`, with one file per command.

Exit status: 0 done, 1 the world's fault or something found to be wrong, 2 wrong use. An error is
one line on standard error that says what to do. Commands are imported when they are needed.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

import click

import emberkv
from emberkv.config_values import nearest
from emberkv.errors import EmberError, UsageError

COMMANDS = (
    "serve",
    "status",
    "top",
    "why",
    "hits",
    "control",
    "doctor",
    "inspect",
    "verify",
    "purge",
    "baseline",
    "load",
    "selfcheck",
    "drill",
)


class _Commands(click.Group):
    """Finds a command in the module of its name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            raise UsageError(f"no command '{cmd_name}'{nearest(cmd_name, COMMANDS)}")
        command: click.Command = importlib.import_module(f"{__name__}.{cmd_name}").command
        return command


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(emberkv.__version__, package_name="emberkv", prog_name="emberkv")
def cli() -> None:
    """A tiered KV cache for vLLM: device memory, host RAM, local disk."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status; prints errors, raises none of ours."""
    try:
        status = cli.main(arguments, prog_name="emberkv", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message(), file=sys.stderr)
        return 2
    except click.ClickException as error:
        return _complain(error.format_message(), error.exit_code)
    except UsageError as error:
        return _complain(str(error), 2)
    except EmberError as error:
        return _complain(str(error), 1)
    except (click.Abort, KeyboardInterrupt):
        return _complain("stopped", 130)
    except BrokenPipeError:
        # The reader has gone; nothing more can be said, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status if isinstance(status, int) else 0


def _complain(message: str, status: int) -> int:
    print(f"emberkv: {' '.join(message.split())}", file=sys.stderr)
    return status
