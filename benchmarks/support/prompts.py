"""Prompts by token ids: documents that return with new questions, at unaligned lengths."""

from __future__ import annotations

import random

LEAD_TOKENS = 7
"""Before every document, so that neither it nor the question ends with a block."""

DOCUMENT_TOKENS = 4096
QUESTION_TOKENS = 64
FIRST_ID, LAST_ID = 100, 40_000


def tokens(name: str, count: int) -> list[int]:
    """Ids of ordinary tokens of SmolLM2's vocabulary, by name."""
    chance = random.Random(name)
    return [chance.randrange(FIRST_ID, LAST_ID) for _ in range(count)]


def prompt(document: str, question: str) -> list[int]:
    """A document of 4,096 tokens and a question of 64 about it."""
    return [
        *tokens("lead", LEAD_TOKENS),
        *tokens(document, DOCUMENT_TOKENS),
        *tokens(question, QUESTION_TOKENS),
    ]


PROMPT_TOKENS = LEAD_TOKENS + DOCUMENT_TOKENS + QUESTION_TOKENS
