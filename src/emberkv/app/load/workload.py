"""A mixed workload, planned whole before it runs: the same seed asks the same prompts.

Prompts are random token ids, so that no tokenizer is needed and nothing is shared by accident. A
share of them return: they begin with most of an earlier prompt of the same length, as a
conversation's next turn does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Final

from emberkv.errors import UsageError

DEFAULT_LENGTHS: Final = (256, 1024, 4096)
RETURNED_SHARE: Final = 0.8
"""How much of an earlier prompt a returning one begins with."""
SHORTEST_SHARE: Final = 0.75
"""Lengths are drawn between this share of a given one and the whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is asked in one step: lengths are prompt tokens, the longest of each kind."""

    lengths: tuple[int, ...] = DEFAULT_LENGTHS
    requests: int = 300
    answer_tokens: int = 16
    returning: float = 0.5
    documents: int = 16
    vocabulary: int = 30_000
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 2:
            raise UsageError("a prompt needs 2 tokens or more: check --lengths")
        if self.requests < 1 or self.answer_tokens < 1 or self.documents < 1:
            raise UsageError("--requests, --answer-tokens and --documents must be 1 or more")
        if not 0.0 <= self.returning <= 1.0:
            raise UsageError(f"--returning is a share between 0 and 1, got {self.returning}")
        if self.vocabulary < 1000:
            raise UsageError("--vocabulary must be 1000 tokens or more")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One planned prompt: how it begins, and that the rest is its own."""

    tokens: int
    beginning: str  # what the beginning is made from; the prompt's own name where it is new
    shared_tokens: int
    own: str

    @property
    def is_returning(self) -> bool:
        return self.beginning != self.own


def plan(workload: Workload, step: int) -> Iterator[Prompt]:
    """The prompts of one step, in the order in which they are asked.

    Lengths take turns in shuffled rounds, and of each length exactly the returning share returns,
    so that two runs differ in nothing that chance decides.
    """
    name = f"{workload.seed}/{step}"
    numbers = Random(name)
    documents: dict[int, list[tuple[str, int]]] = {length: [] for length in workload.lengths}
    due = dict.fromkeys(workload.lengths, 0.0)
    round_: list[int] = []
    for number in range(workload.requests):
        if not round_:
            round_ = list(workload.lengths)
            numbers.shuffle(round_)
        length = round_.pop()
        tokens = numbers.randint(max(2, int(SHORTEST_SHARE * length)), length)
        known, own = documents[length], f"{name}/{number}"
        due[length] += workload.returning
        if due[length] >= 1.0 and known:
            due[length] -= 1.0
            beginning, had_tokens = known[numbers.randrange(len(known))]
            shared_tokens = min(int(RETURNED_SHARE * had_tokens), tokens - 1)
            yield Prompt(tokens, beginning, shared_tokens, own)
            continue
        known.append((own, tokens))
        del known[: -workload.documents]
        yield Prompt(tokens, own, tokens, own)


def token_ids(prompt: Prompt, vocabulary: int) -> list[int]:
    """The prompt's tokens. The lowest ids are left out: many are special."""
    lowest = min(1000, vocabulary // 10)
    ids = Random(prompt.beginning).choices(range(lowest, vocabulary), k=prompt.shared_tokens)
    if prompt.is_returning:
        own_tokens = prompt.tokens - prompt.shared_tokens
        ids += Random(prompt.own).choices(range(lowest, vocabulary), k=own_tokens)
    return ids


def fitting(lengths: tuple[int, ...] | None, longest: int | None) -> tuple[int, ...]:
    """The lengths asked for, or those of the default that fit. Raises `UsageError` if none does."""
    if lengths is None:
        found = tuple(x for x in DEFAULT_LENGTHS if longest is None or x <= longest)
        if not found:
            raise UsageError(f"the server takes {longest} tokens of prompt: give --lengths")
        return found
    too_long = [length for length in lengths if longest is not None and length > longest]
    if too_long:
        raise UsageError(
            f"--lengths {too_long[0]} is too long: the server takes {longest} tokens of prompt "
            "beside the answer"
        )
    return lengths
