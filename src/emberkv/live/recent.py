"""Requests of late: what each asked for, where it was found, and where its chain broke."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from emberkv.domain.types import ChunkKey
from emberkv.observe.requests import RequestFacts

MAX_REQUESTS: Final = 512
MAX_RECENT_BYTES: Final = 16 << 20
"""About what the requests that have ended take at most."""

REQUEST_BYTES: Final = 2048
KEY_BYTES: Final = 96


class Trail:
    """What one request's look-ups came upon.

    `keys` are all whole chunks of the prompt, where the adapter names them. `chain` is what its
    last pass found, `found[n]` the level of `chain[n]`, `stopped` the chunk that was nowhere.
    Before `mark` is what had happened by its last answer.
    """

    __slots__ = (
        "_count",
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

    def begin_pass(self) -> None:
        """The request asks anew."""
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
