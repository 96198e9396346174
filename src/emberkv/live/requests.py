"""What the manager remembers of one request while it is there."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

from emberkv.domain.hints import Hints
from emberkv.domain.types import ChunkKey, Level, RequestId
from emberkv.live.recent import Trail
from emberkv.observe.requests import RequestFacts


class Answering(enum.Enum):
    """How the next look-up pass of a request is answered."""

    COLLECT = "collect"  # say what is where, and remember the chain
    WAIT = "wait"  # its promotion is under way
    SETTLED = "settled"  # what is ready counts, nothing else


class RequestState:
    """One request between its arrival and its last completed copy."""

    __slots__ = (
        "answering",
        "arrived_s",
        "asked_step",
        "canary",
        "chain",
        "chunk_limit",
        "deferred",
        "facts",
        "first_token",
        "held",
        "held_since_s",
        "held_tokens",
        "hints",
        "index",
        "keys",
        "levels",
        "load_began_s",
        "may_run",
        "passes",
        "put_off",
        "token_s",
        "trail",
        "wait_began_s",
        "waits_step",
        "walked_step",
    )

    def __init__(self, request: RequestId, hints: Hints, arrived_s: float) -> None:
        self.hints = hints
        self.arrived_s = arrived_s
        self.keys: Callable[[], Sequence[ChunkKey]] | None = None
        self.first_token = 0
        self.canary: bool | None = None
        self.held = False
        self.held_since_s: float | None = None
        self.held_tokens = 0
        self.walked_step = 0
        self.levels: frozenset[Level] | None = None
        self.chunk_limit: int | None = None
        self.token_s: float | None = None
        self.facts = RequestFacts(request)
        self.answering = Answering.COLLECT
        self.asked_step = -1
        self.index = 0
        self.chain: list[ChunkKey] = []
        self.trail = Trail(self.facts, self.chain, arrived_s)
        self.deferred = False
        self.wait_began_s: float | None = None
        self.load_began_s: float | None = None
        self.put_off = False
        self.passes = False
        self.waits_step = -1
        self.may_run = False

    def got_token(self, now_s: float) -> None:
        """The engine has made one more token."""
        facts = self.facts
        if facts.first_token_s is None:
            facts.first_token_s = now_s - self.arrived_s
        elif self.token_s is not None:
            facts.longest_gap_s = max(facts.longest_gap_s, now_s - self.token_s)
        self.token_s = now_s
        facts.output_tokens += 1
