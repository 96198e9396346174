"""Pages whose commands a test runs as they stand: `bash` blocks are typed, `text` blocks are seen.

The blocks run in one shell, in the order of the page, so that variables, functions and jobs go on.
What a `text` block shows must be seen after the commands before it: line by line, in order, with
any number where it has one and anything where it has `…`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

BLOCK = re.compile(r"^```(bash|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"\(?\d[\d.,]*(?:[a-zA-Z]+\b)?[!?]?\)?")
UNITS = frozenset({"ms", "s", "min", "h", "B", "KiB", "MiB", "GiB", "k", "M"})
MARK = "── block {} ──"
ON_FAILURE = """
trap 'echo "── failed $?: $BASH_COMMAND ──"; [[ $BASH_COMMAND != return* ]] || exit 1' ERR
"""
FAILED = re.compile(r"^── failed (\d+): (.*) ──$", re.MULTILINE)


@dataclass
class Block:
    """Commands of a page, what the page says one sees, and what was seen."""

    commands: str
    shown: list[str] = field(default_factory=list)
    seen: str = ""

    @property
    def failed(self) -> list[tuple[int, str]]:
        """Status and text of each command that failed."""
        return [(int(status), command) for status, command in FAILED.findall(self.seen)]

    def missing(self) -> list[str]:
        """Lines that the page shows and the commands did not print, in that order."""
        rest, missing = self.seen, []
        for line in self.shown:
            found = re.search(pattern_of(line), rest, re.MULTILINE)
            if found is None:
                missing.append(line)
            else:
                rest = rest[found.end() :]
        return missing


def pattern_of(line: str) -> str:
    """What a shown line may look like elsewhere: other numbers, units and spaces."""
    return r"\s+".join(r"\S+" if word in UNITS else _pattern(word) for word in line.split())


def _pattern(word: str) -> str:
    parts = [
        ".*".join(re.escape(piece) for piece in part.split("…")) for part in NUMBER.split(word)
    ]
    return r"\(?\d[\d.,]*\w*[!?]?\)?".join(parts)


def blocks_of(page: Path) -> Iterator[Block]:
    """The blocks of commands of a page, in order."""
    block: Block | None = None
    for language, body in BLOCK.findall(page.read_text(encoding="utf-8")):
        if language == "bash":
            if block is not None:
                yield block
            block = Block(body)
        elif block is not None:
            block.shown += [line for line in body.splitlines() if line.strip()]
    if block is not None:
        yield block


def script_of(blocks: list[Block]) -> str:
    """A script for bash that runs all blocks; a command that fails is named, and the rest goes on.

    A function that gives up (`return`) ends it: a server did not come up.
    """
    parts = [ON_FAILURE]
    for number, block in enumerate(blocks):
        parts += [f"echo '{MARK.format(number)}'", block.commands]
    return "\n".join([*parts, f"echo '{MARK.format(len(blocks))}'", ""])


def share_out(output: str, blocks: list[Block]) -> bool:
    """Give each block what was printed while it ran; whether the script came to its end."""
    for number, block in enumerate(blocks):
        _, _, rest = output.partition(MARK.format(number) + "\n")
        block.seen = rest.partition(MARK.format(number + 1))[0]
    return MARK.format(len(blocks)) in output
