"""The engine's steps as they begin and end: what each computed, how long it took, whose token."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from emberkv.domain.types import RequestId

MAX_STEPS: Final = 64
"""More than any engine has under way; if so many are open, ends have been missed."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """What one step computes: tokens `first` … `end - 1` of prompts, and requests that decode."""

    pieces: Mapping[RequestId, tuple[int, int]] = field(default_factory=dict)
    decoding: tuple[RequestId, ...] = ()


@dataclass(frozen=True, slots=True)
class DoneStep:
    """A step that has ended, and how long the engine was at it."""

    work: StepWork
    seconds: float


class Steps:
    """Matches ends of steps to their beginnings, in order.

    An engine that schedules ahead begins the next step before the last has ended: a step's time
    runs from its beginning or the end of the one before, whichever is later.
    """

    def __init__(self) -> None:
        self._open: deque[tuple[StepWork, float]] = deque()
        self._ended_s = 0.0

    def begin(self, work: StepWork, now_s: float) -> None:
        if len(self._open) >= MAX_STEPS:
            self._open.clear()
        self._open.append((work, now_s))

    def end(self, now_s: float) -> DoneStep | None:
        """The oldest open step has ended; None if none is open."""
        if not self._open:
            return None
        work, began_s = self._open.popleft()
        seconds = now_s - max(began_s, self._ended_s)
        self._ended_s = now_s
        return DoneStep(work, seconds)


def with_token(
    work: StepWork, prompt_tokens: Callable[[RequestId], int | None]
) -> Iterator[RequestId]:
    """The requests that a step has given a token: whose prompt is done, and who decode."""
    for request, (_, end) in work.pieces.items():
        tokens = prompt_tokens(request)
        if tokens is not None and end >= tokens:
            yield request
    yield from work.decoding
