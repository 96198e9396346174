"""Says whether a run showed what it should: who served each prompt, and that answers are equal."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from demo.client import Answer
from demo.measures import Sources
from emberkv.observe import baseline

TIE_LOGPROB: Final = 1e-3
"""Two tokens closer than this are a tie: which one comes first is a matter of rounding."""

BLOCK_TOKENS: Final = 32
_SLACK_BLOCKS: Final = 1


class Source(enum.Enum):
    """Where a phase's prompts have to come from."""

    COMPUTED = "computed"
    DEVICE = "device"
    RAM = "RAM"
    DISK = "disk"


class Agreement(enum.Enum):
    """How an answer compares with the one without emberkv."""

    EQUAL = "equal"
    TIE = "tie"  # differs first where the two best tokens were as good as equal
    DIFFERENT = "different"


@dataclass(frozen=True, slots=True)
class Comparison:
    """How two answers compare, and where they part."""

    agreement: Agreement
    position: int | None = None
    gap: float | None = None


@dataclass(slots=True)
class Turn:
    """One question asked with emberkv, its witnesses, and the same question without.

    `known_tokens` is the length of what the conversation had when this document was last left:
    the part of the prompt that can come back.
    """

    document: str
    known_tokens: int
    answer: Answer
    baseline: Answer
    engine: Sources
    ember: Sources
    logged: Sources | None


@dataclass(slots=True)
class Phase:
    """A group of turns that are to be served from one place, and what else must hold."""

    name: str
    source: Source
    turns: list[Turn] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    promoted_tokens: int = 0
    promoted_and_used_tokens: int = 0

    def require(self, holds: bool, otherwise: str) -> None:
        """Note a failure unless something holds."""
        if not holds:
            self.failures.append(otherwise)

    @property
    def sources(self) -> Sources:
        """The tokens of all turns by source, as the engine counted."""
        return sum((turn.engine for turn in self.turns), Sources())

    def problems(self) -> list[str]:
        """Everything that is not as it should be; empty if the phase has shown its point."""
        found = list(self.failures)
        if not self.turns:
            found.append("no question was asked")
        for turn in self.turns:
            found += [f"{turn.document}: {problem}" for problem in problems_of(turn, self.source)]
        return found


def problems_of(turn: Turn, source: Source) -> list[str]:
    """What is wrong with one turn: another source, witnesses that disagree, another answer."""
    found = []
    if turn.logged is None:
        found.append("the request log has no line of it")
    elif not turn.engine == turn.ember == turn.logged:
        found.append(
            f"the witnesses disagree: engine {turn.engine}, metrics {turn.ember}, "
            f"request log {turn.logged}"
        )
    if not _served_from(turn, source):
        found.append(f"not served from {source.value}: {turn.engine}")
    comparison = compare(turn.answer, turn.baseline)
    if comparison.agreement is Agreement.DIFFERENT:
        found.append(f"another answer from token {comparison.position} on")
    return found


def _served_from(turn: Turn, source: Source) -> bool:
    """Whether all that could come back came from one source, and nothing from another."""
    got = {
        Source.DEVICE: turn.engine.device,
        Source.RAM: turn.engine.ram,
        Source.DISK: turn.engine.disk,
    }
    if source is Source.COMPUTED:
        return not any(got.values())
    whole_blocks = turn.known_tokens // BLOCK_TOKENS - _SLACK_BLOCKS
    others = [tokens for place, tokens in got.items() if place is not source]
    return got[source] >= max(1, whole_blocks) * BLOCK_TOKENS and not any(others)


def compare(answer: Answer, baseline: Answer) -> Comparison:
    """Compare token by token. After a tie the two go different ways, so only the first counts."""
    for position, (ours, theirs) in enumerate(zip(answer.tokens, baseline.tokens, strict=False)):
        if ours == theirs:
            continue
        best = baseline.candidates[position]
        gap = best[0].logprob - best[1].logprob if len(best) == 2 else math.inf
        tied = gap < TIE_LOGPROB and ours in {candidate.token for candidate in best}
        return Comparison(Agreement.TIE if tied else Agreement.DIFFERENT, position, gap)
    if len(answer.tokens) != len(baseline.tokens):
        shorter = min(len(answer.tokens), len(baseline.tokens))
        return Comparison(Agreement.DIFFERENT, shorter)
    return Comparison(Agreement.EQUAL)


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least a share of the values does not exceed (nearest rank)."""
    return baseline.quantile(sorted(values), share)
