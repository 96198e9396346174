"""Write the tables of options in docs/reference/cli.md from the command line itself.

The prose around them is written by hand. `--check` writes nothing and fails if a table is old.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import click

from emberkv.app.cli import cli

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "cli.md"
REGION = re.compile(r"(<!-- options of (\w+) -->\n).*?(<!-- end of options -->)", re.DOTALL)
DEFAULT = re.compile(r"\s*\[default: (.*?)\]")

RANGE = re.compile(r";\s*[\d.]*(<=?)?x[<>]?.*")


def table(name: str) -> str:
    """The options of a command as a Markdown table."""
    context = click.Context(cli)
    command = cli.get_command(context, name)
    assert command is not None
    return options(command) + (
        commands(command, context) if isinstance(command, click.Group) else ""
    )


def commands(group: click.Group, context: click.Context) -> str:
    """What a command of several parts can be told, as a Markdown table."""
    rows = ["", "| command | meaning |", "|---|---|"]
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        words = " ".join([name, *command.collect_usage_pieces(click.Context(command))[1:]])
        meaning = " ".join((command.help or "").split())
        words = words.replace("|", "\\|")
        rows.append(f"| `{words}` | {meaning} |")
    return "\n".join(rows) + "\n"


def options(command: click.Command) -> str:
    """The options of one command."""
    rows = ["| option | value | default | meaning |", "|---|---|---|---|"]
    for parameter in command.params:
        if not isinstance(parameter, click.Option):
            continue
        record = parameter.get_help_record(click.Context(command))
        assert record is not None
        words, text = record
        option = ", ".join(parameter.opts)
        value = words.removeprefix(option).strip()
        text = re.sub(r"\s*\[(required|x>=\d)\]", "", text)
        default = DEFAULT.search(text)
        shown = "required" if parameter.required else (default[1] if default else "")
        shown = RANGE.sub("", shown)
        meaning = DEFAULT.sub("", text).strip()
        cells = (f"`{option}`", value.replace("|", "\\|"), shown, meaning.replace("|", "\\|"))
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def page(text: str) -> str:
    """The page with every table as it should be."""
    return REGION.sub(lambda region: region[1] + table(region[2]) + region[3], text)


def main() -> int:
    old = PAGE.read_text(encoding="utf-8")
    documented = {region[2] for region in REGION.finditer(old)}
    missing = set(cli.list_commands(click.Context(cli))) - documented
    if missing:
        print(f"{PAGE.name} has no table for: {', '.join(sorted(missing))}", file=sys.stderr)
        return 1
    new = page(old)
    if "--check" in sys.argv[1:]:
        if new != old:
            print(f"{PAGE.name} is old; run {Path(__file__).name}", file=sys.stderr)
        return int(new != old)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
