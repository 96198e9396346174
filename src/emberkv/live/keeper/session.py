"""What the keeper says to one manager: kept in order, from any thread, from before it is there."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from emberkv.domain.types import Copy, Outcome
from emberkv.live.keeper.loop import Loop
from emberkv.live.keeper.messages import OUTCOME_CODES, Message, Progress, encode


class Session:
    """One manager's time with the keeper; what is said after its end is dropped."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._deliver: Callable[[bytes], None] | None = None
        self._waiting: deque[bytes] = deque()
        self._due = False
        self._ended = False

    def send(self, message: Message) -> None:
        """Say something, from any thread."""
        if self._ended:
            return
        self._waiting.append(encode(message))
        if not self._due:
            self._due = True
            self._loop.post(self._pump)

    def progress(self, copy: Copy, first: int, outcomes: Sequence[Outcome], busy_s: float) -> None:
        """Say that chunks `first` … of a copy have ended, from any thread."""
        codes = bytes(OUTCOME_CODES[outcome] for outcome in outcomes)
        self.send(Progress(copy.transfer, first, codes, busy_s, self._loop.now_s()))

    def begin(self, deliver: Callable[[bytes], None]) -> None:
        """The manager is there: hand over what was said, and what will be."""
        self._deliver = deliver
        self._pump()

    def end(self) -> None:
        self._ended = True
        self._deliver = None
        self._waiting.clear()

    def _pump(self) -> None:
        self._due = False
        while self._deliver is not None and self._waiting:
            self._deliver(self._waiting.popleft())
