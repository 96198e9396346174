"""Canary requests: computed though a tier could serve them, and held against what it keeps.

    look-up     the first hit of a chosen request is answered as a miss, what was ready is pinned
    store       the engine writes the recomputed chunks to spare rows beside the kept ones
    compare     off the scheduler's thread, as numbers
    judge       a chunk that is not what the engine computes takes its tier out

The request itself is never at risk: it gets what was computed. It pays with the time of one
recompute, which is what it would have taken without emberkv.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import takewhile
from typing import Final

from emberkv.core.canary import Canary
from emberkv.core.shadows import Shadow
from emberkv.core.stack import TierStack
from emberkv.domain.types import RAM, TIER_NAMES, ChunkKey, Level, RequestId, Slot
from emberkv.live.canary import Comparer, Pair
from emberkv.live.requests import RequestState
from emberkv.observe.metrics import CANARY_CHUNKS
from emberkv.observe.tally import Tally

MOST_SPARE_ROWS: Final = 64
SPARE_SHARE: Final = 0.02
"""Of RAM, so much at most is set aside for recomputed chunks."""

logger = logging.getLogger(__name__)

TakeOut = Callable[[Level, str], None]


class Canaries:
    """The canary requests of one engine. All calls come from the scheduler's thread."""

    def __init__(
        self,
        stack: TierStack,
        tally: Tally,
        canary: Canary,
        comparer: Comparer,
        take_out: TakeOut,
    ) -> None:
        """The comparer is this object's from now on."""
        self._stack = stack
        self._tally = tally
        self._canary = canary
        self._comparer = comparer
        self._take_out = take_out
        slots = stack.tiers[RAM].slot_count
        self._wanted = min(MOST_SPARE_ROWS, max(1, int(SPARE_SHARE * slots)))
        self._has_rows = False
        self._spare: list[Slot] = []
        self._fenced: list[Slot] = []
        self._comparing: dict[Slot, Shadow] = {}
        self._found_wrong: list[str] = []
        stack.shadows.use(self._reserve, self._spare.extend)

    def takes(self, state: RequestState, key: ChunkKey) -> bool:
        """Whether a request whose next chunk is a hit is to be computed and compared instead."""
        if state.canary is None:
            state.canary = bool(self._spare) and self._canary.chooses()
            if state.canary:
                self._open(state, key)
        return state.canary

    def offered(self, request: RequestId, keys: Sequence[ChunkKey]) -> list[tuple[ChunkKey, Slot]]:
        """Spare rows for those of these chunks, about to be computed, that are compared."""
        return [(shadow.key, shadow.spare) for shadow in self._stack.shadows.offered(request, keys)]

    def written(self, request: RequestId, keys: Collection[ChunkKey]) -> None:
        """The engine has written these."""
        shadows = self._stack.shadows.written(request, keys)
        if shadows:
            self._comparing.update((shadow.spare, shadow) for shadow in shadows)
            self._comparer.submit(
                [Pair(each.key, each.origin, each.kept.slot, each.spare) for each in shadows]
            )

    def step(self) -> None:
        """Once a step: judge what has been compared; at first, set rows aside."""
        if not self._has_rows:  # none before the tiers have said what they hold
            self._spare += self._stack.reserve(self._wanted)
            self._has_rows = bool(self._spare)
        for pair, compared in self._comparer.poll():
            self._stack.shadows.compared(self._comparing.pop(pair.spare))
            self._tally.add(CANARY_CHUNKS, (TIER_NAMES[pair.origin],), 1)
            wrong = self._canary.judge([compared])
            if wrong is not None:
                self._found_wrong.append(wrong.reason)
                self._take_out(wrong.origin, wrong.reason)

    def reset(self, fenced: Sequence[Slot]) -> None:
        """Everything was forgotten; the engine may still write to `fenced`."""
        self._fenced += fenced

    def unfence(self) -> None:
        """The engine is done with what it had begun before the last reset."""
        self._spare += self._fenced
        self._fenced = []

    def facts(self) -> Mapping[str, object]:
        """For status."""
        return {
            "share": self._canary.rule.share,
            "compared_chunks": self._canary.compared_chunks,
            "limit": self._canary.limit,
            "disagreements": self._found_wrong[-8:],
        }

    def close(self) -> None:
        """End the comparing thread: it reads the arena."""
        self._comparer.close()

    def _open(self, state: RequestState, key: ChunkKey) -> None:
        """Pin what the request would have been served."""
        request = RequestId(state.facts.request)
        ram = self._stack.tiers[RAM]
        keys = [key] if state.keys is None else list(state.keys())
        here = keys.index(key) if key in keys else len(keys)
        ready = list(takewhile(ram.ready, keys[here:]))
        origins = {each: self._stack.origin(request, each) for each in ready}
        self._stack.shadows.open(request, [ram.entries[each] for each in ready], origins)

    def _reserve(self, count: int) -> list[Slot]:
        taken = self._spare[:count]
        del self._spare[:count]
        return taken
