"""A lease: what one waiting request was promised, and how far it has come."""

from __future__ import annotations

import enum

from emberkv.domain.types import ChunkKey, Level, RequestId, TenantName, VisitId


class Phase(enum.Enum):
    """`QUEUED → PLANNED → ANSWERED`; a queued lease may be answered without a plan."""

    QUEUED = "queued"
    PLANNED = "planned"
    ANSWERED = "answered"


class Cut(enum.Enum):
    """Why a lease promises less than its whole chain."""

    NO_ROOM = "no_room"
    NOT_WORTH = "not_worth"
    WAIT_SPENT = "wait_spent"
    TRANSFER_FAILED = "transfer_failed"


class Lease:
    """Pins on a chain's chunks in RAM, from the plan until the request has loaded or ended.

    `keys[:cut]` is what the request may still get, `keys[:ready]` what it can have now,
    `keys[:pinned]` what the lease pins; `ready ≤ pinned` and `ready ≤ cut ≤ len(keys)`.
    `levels` are the tiers it may load from, `worth` the most chunks that are worth loading; `had`
    chunks were in RAM when it asked, and `ahead_s` of computing was due before it. A lease `ahead`
    is of a request that has not asked yet.
    When `missing_as_of` chunks had ever entered RAM, `missing` of `keys[:worth]` had to be copied
    up, and what followed could not be.
    """

    __slots__ = (
        "ahead",
        "ahead_s",
        "asked_at_s",
        "asked_step",
        "cut",
        "cut_reason",
        "first_token",
        "had",
        "keys",
        "levels",
        "max_wait_s",
        "missing",
        "missing_as_of",
        "origins",
        "phase",
        "pinned",
        "ready",
        "request",
        "tenant",
        "visit",
        "waited_s",
        "worth",
    )

    def __init__(
        self, request: RequestId, keys: tuple[ChunkKey, ...], visit: VisitId, max_wait_s: float
    ) -> None:
        self.request = request
        self.keys = keys
        self.visit = visit
        self.phase = Phase.QUEUED
        self.cut = len(keys)
        self.cut_reason: Cut | None = None
        self.ready = 0
        self.pinned = 0
        self.waited_s = 0.0
        self.asked_at_s = 0.0
        self.asked_step = -2
        self.missing = 0
        self.missing_as_of = -1
        self.origins: dict[ChunkKey, Level] = {}
        self.levels: frozenset[Level] | None = None
        self.max_wait_s = max_wait_s
        self.tenant: TenantName | None = None
        self.first_token = 0
        self.had = 0
        self.worth = len(keys)
        self.ahead_s = 0.0
        self.ahead = False

    def asked(self, step: int, now_s: float) -> None:
        """Count the time since the last step as waited, if the request was asked for then too."""
        if step == self.asked_step + 1:
            self.waited_s += now_s - self.asked_at_s
        self.asked_step, self.asked_at_s = step, now_s
