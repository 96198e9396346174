"""What is asked, in which order, and what happens to the server in between; on both sides."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from demo.documents import Document
from demo.verdicts import Source

DEVICE_BLOCKS: Final = 97
"""One block stays unused; 96 hold one conversation and no two."""
MAX_MODEL_TOKENS: Final = 96 * 32


class Before(enum.Enum):
    """What is done to the server before a visit."""

    NOTHING = "nothing"
    KILL = "kill"  # SIGKILL to every process of the engine; started again
    KILL_RAM_TOO = "kill ram too"  # the same, and the keeper with its memory


@dataclass(frozen=True, slots=True)
class Visit:
    """Each document is asked about twice: once on coming back, and once more right away."""

    name: str
    source: Source
    before: Before = Before.NOTHING


VISITS: Final = (
    Visit("first visit", Source.COMPUTED),
    Visit("back, device overrun", Source.RAM),
    Visit("back, server killed", Source.RAM, Before.KILL),
    Visit("back, RAM tier lost too", Source.DISK, Before.KILL_RAM_TOO),
)
NEXT_QUESTION: Final = Visit("next question, at once", Source.DEVICE)


@dataclass(frozen=True, slots=True)
class Question:
    """One request: which document, which turn, and whether the document is being come back to."""

    document: Document
    turn: int
    returning: bool

    @property
    def text(self) -> str:
        return self.document.questions[self.turn]


def questions_of(visit_number: int, documents: Sequence[Document]) -> Iterator[Question]:
    """The requests of one visit, one document after the other."""
    for document in documents:
        yield Question(document, 2 * visit_number, returning=True)
        yield Question(document, 2 * visit_number + 1, returning=False)


class Conversation:
    """A document and everything said about it so far; each prompt repeats all of it.

    Written in the form that SmolLM2 was trained on (ChatML).
    """

    def __init__(self, document: Document) -> None:
        self._text = f"<|im_start|>user\n{document.text}\n\n"
        self.known_tokens = 0

    def prompt(self, question: str) -> str:
        """What to send for the next question."""
        return f"{self._text}{question}<|im_end|>\n<|im_start|>assistant\n"

    def go_on(self, question: str, answer: str, prompt_tokens: int) -> None:
        """Take a question and its answer into the conversation."""
        self._text = f"{self.prompt(question)}{answer}<|im_end|>\n<|im_start|>user\n"
        self.known_tokens = prompt_tokens
