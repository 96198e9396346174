"""What the demo shows while it works, and the table at its end."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.status import Status
from rich.table import Table

from demo.client import Answer
from demo.measures import Sources
from demo.script import Question
from demo.verdicts import Agreement, Phase, compare, quantile

MIN_COLUMNS = 100


class Screen:
    """Lines for a person; the same without colour and spinner where no terminal is."""

    def __init__(self) -> None:
        self._console = Console(highlight=False)
        if not self._console.is_terminal and self._console.width < MIN_COLUMNS:
            self._console = Console(highlight=False, width=MIN_COLUMNS)
        self._began_s = time.monotonic()

    def heading(self, text: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - self._began_s), 60)
        self._console.print(f"\n[bold]{escape(text)}[/]  [dim]{minutes}:{seconds:02}[/]")

    def say(self, text: str) -> None:
        self._console.print(f"  {escape(text)}", soft_wrap=True)

    def plain(self, text: str) -> None:
        """A line to copy: never wrapped or styled."""
        self._console.print(text, markup=False, soft_wrap=True)

    def fail(self, text: str) -> None:
        self._console.print(f"  [red]✗[/] {escape(text)}", soft_wrap=True)

    @contextmanager
    def working(self, text: str) -> Iterator[Working]:
        """A spinner with the seconds that something has taken so far."""
        with self._console.status(f"  {escape(text)}") as status:
            yield Working(status, text)

    def asked(self, question: Question, answer: Answer, sources: Sources | None) -> None:
        """One line for one answered question, and the answer beneath."""
        parts = [f"{answer.prompt_tokens:,} tokens"]
        if sources:
            parts.append(describe(sources))
        parts.append(f"first token after [bold]{answer.first_token_s:.2f} s[/]")
        self._console.print(f"  {question.document.name:<12} {' · '.join(parts)}")
        said = f"{question.text}  →  {answer.first_line}"
        self._console.print(f"  [dim]{'':<12} {escape(said)}[/]", no_wrap=True, overflow="ellipsis")

    def table(self, phases: Sequence[Phase]) -> None:
        """One row a phase."""
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        table.add_column("")
        table.add_column("phase")
        for name in ("asked", "device", "RAM", "disk", "computed"):
            table.add_column(name, justify="right")
        for name in ("p50", "p95", "without", "faster"):
            table.add_column(name, justify="right")
        table.add_column("answers")
        for phase in phases:
            table.add_row(*_cells(phase))
        self._console.print()
        self._console.print(table)
        self._console.print(
            "tokens of all prompts of a phase by source, as the engine counted them; p50, p95: "
            "seconds to the first token;\nwithout: p50 of the same questions with emberkv off; "
            "faster: without ÷ p50\n",
            style="dim",
            soft_wrap=True,
        )

    def ties(self, phases: Sequence[Phase]) -> None:
        """Every answer that parted from the baseline's at a tie."""
        for phase in phases:
            for turn in phase.turns:
                comparison = compare(turn.answer, turn.baseline)
                if comparison.agreement is Agreement.TIE:
                    self.say(
                        f"{phase.name}, {turn.document}: from token {comparison.position} on "
                        f"another answer, at a tie ({comparison.gap:.1e} in log-probability)"
                    )


class Working:
    """A line that says what is going on and for how long."""

    def __init__(self, status: Status, text: str) -> None:
        self._status = status
        self._text = text
        self._began_s = time.monotonic()

    def tick(self) -> None:
        passed_s = time.monotonic() - self._began_s
        self._status.update(f"  {escape(self._text)}  [dim]{passed_s:.0f} s[/]")


def describe(sources: Sources) -> str:
    """Tokens by source, those that are not zero."""
    named = (
        ("device", sources.device),
        ("RAM", sources.ram),
        ("disk", sources.disk),
        ("computed", sources.computed),
    )
    return ", ".join(f"{count:,} {name}" for name, count in named if count)


def _cells(phase: Phase) -> list[str]:
    if not phase.turns:
        return ["[red]✗[/]", phase.name, "0", *["-"] * 9]
    sources = phase.sources
    ours_s = [turn.answer.first_token_s for turn in phase.turns]
    without_s = quantile([turn.baseline.first_token_s for turn in phase.turns], 0.5)
    p50_s = quantile(ours_s, 0.5)
    return [
        "[red]✗[/]" if phase.problems() else "[green]✓[/]",
        phase.name,
        str(len(phase.turns)),
        *(f"{n:,}" if n else "·" for n in (sources.device, sources.ram, sources.disk)),
        f"{sources.computed:,}",
        f"{p50_s:.2f}",
        f"{quantile(ours_s, 0.95):.2f}",
        f"{without_s:.2f}",
        f"{without_s / p50_s:.1f}x",
        _agreement(phase),
    ]


def _agreement(phase: Phase) -> str:
    found = [compare(turn.answer, turn.baseline).agreement for turn in phase.turns]
    different, tied = found.count(Agreement.DIFFERENT), found.count(Agreement.TIE)
    if different:
        return f"[red]{different} different[/]"
    return f"equal but {tied} tie{'s' if tied > 1 else ''}" if tied else "equal"
