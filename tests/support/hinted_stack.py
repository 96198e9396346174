"""A stack whose copies end at once, for tests of what requests say of themselves."""

from __future__ import annotations

from collections.abc import Sequence

from emberkv.core.audit import AuditedStack
from emberkv.core.counts import Event
from emberkv.core.economy import Terms
from emberkv.core.limits import Limits
from emberkv.core.residents import Residents
from emberkv.core.retention import Quotas
from emberkv.domain.hints import Hints, TokenRange
from emberkv.domain.types import RAM, ChunkKey, Copy, Level, Outcome, RequestId
from emberkv.policy.eviction.lru import Lru

TOKENS = 16


def chain(name: str, count: int) -> list[ChunkKey]:
    return [ChunkKey(f"{name}-{at}".encode()) for at in range(count)]


class Play:
    """A stack whose copies end at once, and requests that compute everything."""

    def __init__(self, *slot_counts: int, quotas: Quotas | None = None) -> None:
        tiers = [Residents(count, 1, Lru(count)) for count in slot_counts]
        terms = Terms(tokens_per_chunk=TOKENS)
        self.stack = AuditedStack(tiers, Limits(), terms, quotas)
        self.now_s = 0.0
        self.count = 0

    def compute(self, keys: Sequence[ChunkKey], hints: Hints = Hints()) -> int:  # noqa: B008
        """Serve one request without a hit; returns how many of its chunks were admitted."""
        self.count += 1
        request = RequestId(f"r{self.count}")
        self.stack.begin(request, hints, len(keys) * TOKENS)
        admitted = self.stack.offload(request, keys, None, self.now_s)
        self.stack.stored(request, [resident.key for resident in admitted], self.now_s)
        self.copy()
        self.stack.end(request)
        self.now_s += 1.0
        self.stack.settle(self.now_s)
        self.copy()
        return len(admitted)

    def copy(self) -> None:
        for effect in self.stack.take_effects():
            if isinstance(effect, Copy):
                results = [(at, Outcome.OK) for at in range(len(effect.keys))]
                self.stack.done(effect.transfer, results, self.now_s)

    def holds(self, keys: Sequence[ChunkKey], level: Level = RAM) -> bool:
        return all(self.stack.tiers[level].ready(key) for key in keys)

    def counted(self, event: Event, level: Level = RAM) -> int:
        return self.stack.counts[event, level]


def always(priority: int, duration_s: float | None = None) -> Hints:
    return Hints(priority=(TokenRange(0, None, priority, duration_s),))
