"""Requests of late: what each asked for, where it was found, and where its chain broke."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from emberkv.domain.types import ChunkKey
from emberkv.observe.requests import MissReason, RequestFacts

MAX_REQUESTS: Final = 512
MAX_RECENT_BYTES: Final = 16 << 20
"""About what the requests that have ended take at most."""

REQUEST_BYTES: Final = 2048
KEY_BYTES: Final = 96


@dataclass(frozen=True, slots=True)
class Seen:
    """What the look-ups of one admission came upon.

    `found[n]` is the level of `chain[n]`, `stopped` the chunk that ended the chain. What had
    happened by the answer has no greater mark than `mark`.
    """

    chain: tuple[ChunkKey, ...]
    found: bytes
    stopped: ChunkKey | None
    mark: int | None
    reason: MissReason


class Trail:
    """What one request's look-ups come upon: `chain`, `found`, `stopped` and `mark` as in `Seen`.

    Its facts are of its first admission; so is what is told of a request that was preempted.
    """

    __slots__ = (
        "_count",
        "_first",
        "_keys",
        "_name",
        "began_s",
        "chain",
        "ended_s",
        "facts",
        "found",
        "mark",
        "stopped",
    )

    def __init__(self, facts: RequestFacts, chain: list[ChunkKey], began_s: float) -> None:
        self.facts = facts
        self.chain: Sequence[ChunkKey] = chain
        self.found = bytearray()
        self.stopped: ChunkKey | None = None
        self.mark: int | None = None
        self.began_s = began_s
        self.ended_s: float | None = None
        self._name: Callable[[], Sequence[ChunkKey]] | None = None
        self._count = 0
        self._first: Seen | None = None
        self._keys: tuple[ChunkKey, ...] | None = None

    @property
    def keys(self) -> tuple[ChunkKey, ...] | None:
        """All whole chunks of the prompt; None where nobody names them."""
        if self._name is not None:
            return tuple(self._name()[: self._count])
        return self._keys

    def names(self, name: Callable[[], Sequence[ChunkKey]], count: int) -> None:
        """The chunks of the request, the first `count` of them its prompt's, can be named."""
        self._name, self._count = name, count

    def end(self, now_s: float) -> None:
        """The request is over: keep what it asked for, and let go of it."""
        self.ended_s = now_s
        self.chain = tuple(self.chain)
        self._keys, self._name = self.keys, None

    @property
    def seen(self) -> Seen:
        """What the look-ups of its first admission came upon."""
        return self._first or self._seen()

    def _seen(self) -> Seen:
        reason = self.facts.miss_reason
        return Seen(tuple(self.chain), bytes(self.found), self.stopped, self.mark, reason)

    def begin_pass(self) -> None:
        """The request is about to ask anew, and its chain to be cleared."""
        if self.facts.preemptions and self._first is None:
            self._first = self._seen()
        self.found.clear()
        self.stopped = None

    def is_named(self, name: str) -> bool:
        """Whether a request is known by a name: the engine's id, or the client's."""
        return name in (self.facts.request, self.facts.external_id)

    def may_be_named(self, name: str) -> bool:
        """Whether a name is part of an id: engines put words before and numbers behind."""
        return name in (self.facts.external_id or self.facts.request)


class Recent:
    """The trails of the newest `MAX_REQUESTS` that have ended, in no more than `max_bytes`."""

    def __init__(self, *, max_bytes: int = MAX_RECENT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._ended: deque[Trail] = deque()
        self._bytes = 0

    @property
    def size_bytes(self) -> int:
        """About what they take now."""
        return self._bytes

    def end(self, trail: Trail, now_s: float) -> None:
        """A request is over."""
        trail.end(now_s)
        self._ended.append(trail)
        self._bytes += _cost_bytes(trail)
        while len(self._ended) > MAX_REQUESTS or self._bytes > self._max_bytes:
            self._bytes -= _cost_bytes(self._ended.popleft())

    def ended(self) -> list[Trail]:
        """Newest first."""
        return list(reversed(self._ended))


def _cost_bytes(trail: Trail) -> int:
    return REQUEST_BYTES + KEY_BYTES * max(len(trail.keys or ()), len(trail.chain))
