"""What the manager remembers of one request while it is there."""

from __future__ import annotations

import enum

from emberkv.domain.types import ChunkKey, RequestId
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
        "asked_step",
        "chain",
        "deferred",
        "facts",
        "index",
        "load_began_s",
        "may_run",
        "put_off",
        "trail",
        "wait_began_s",
    )

    def __init__(self, request: RequestId) -> None:
        self.facts = RequestFacts(request)
        self.answering = Answering.COLLECT
        self.asked_step = -1
        self.index = 0
        self.chain: list[ChunkKey] = []
        self.trail = Trail(self.facts, self.chain)
        self.deferred = False
        self.wait_began_s: float | None = None
        self.load_began_s: float | None = None
        self.put_off = False
        self.may_run = False
