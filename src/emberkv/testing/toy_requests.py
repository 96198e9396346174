"""Requests of a toy engine: their chains, what they are doing, and what may happen to them."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from emberkv.domain.types import ChunkKey, RequestId, Slot

MAX_DEPTH = 6


class Being(enum.Enum):
    """What a request is doing."""

    WAITING = "waiting"
    ANSWERED = "answered"
    LOADING = "loading"
    RUNNING = "running"


class Act(enum.Enum):
    """What may happen to a request."""

    LOAD = "load"  # what was ready when it was answered: it still is
    SKIP = "skip"  # the engine runs it without loading
    LOADED = "loaded"
    OFFLOAD = "offload"
    STORED = "stored"
    PREEMPT = "preempt"
    END = "end"


class Trouble(enum.Enum):
    """What may go wrong."""

    DAMAGE = "damage"
    RESET = "reset"
    RESTART = "restart"
    LOST_TIER = "lost_tier"


class Request:
    """One request by the machine's own account."""

    def __init__(self, name: int, chain: Sequence[ChunkKey]) -> None:
        self.id = RequestId(f"r{name}")
        self.chain = tuple(chain)
        self.being = Being.RUNNING
        self.ended = False
        self.computed = 0
        self.leased: list[ChunkKey] = []
        self.promised: tuple[ChunkKey, ...] = ()
        self.loading: list[tuple[ChunkKey, Slot]] = []
        self.writing: list[ChunkKey] = []
        self.asked_step = -2
        self.asked_at_s = 0.0
        self.waited_s = 0.0


def chain_of(path: Sequence[int]) -> list[ChunkKey]:
    """Keys of a path in a binary tree of prefixes, head first."""
    return [ChunkKey(bytes(path[: end + 1])) for end in range(len(path))]


def parent_of(key: ChunkKey) -> ChunkKey | None:
    """The key of the chunk before, in the same tree."""
    return ChunkKey(key[:-1]) if len(key) > 1 else None


def every_key() -> list[ChunkKey]:
    """The whole tree of prefixes."""
    keys: list[ChunkKey] = []
    level: list[bytes] = [b""]
    for _ in range(MAX_DEPTH):
        level = [key + bytes([branch]) for key in level for branch in (0, 1)]
        keys += map(ChunkKey, level)
    return keys
