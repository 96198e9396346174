"""Making room where much is kept: what it costs the engine's thread, and who is found to go."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hinted_stack import always, chain

from emberkv.core.economy import Terms
from emberkv.core.limits import Limits
from emberkv.core.residents import PASSED_PER_LISTED, Residents
from emberkv.core.retention import Quotas
from emberkv.core.stack import TierStack
from emberkv.domain.hints import Hints
from emberkv.domain.types import RAM, ChunkKey, RequestId
from emberkv.policy.eviction.lru import Lru

SLOTS = 4000
KEPT = SLOTS * 3 // 4
CALLS = 100
PER_CALL = 10


class CountingLru(Lru):
    """Counts the chunks of its order that somebody looks at."""

    looked_at = 0

    def victims(self) -> Iterator[ChunkKey]:
        for key in super().victims():
            self.looked_at += 1
            yield key


class Busy:
    """RAM full of old chunks that are kept, with others passing through what is left."""

    def __init__(self, quotas: Quotas, kept: Hints, *, kept_slots: int = KEPT) -> None:
        self.policy = CountingLru(SLOTS)
        ram = Residents(SLOTS, 1, self.policy)
        self.stack = TierStack([ram], Limits(), Terms(tokens_per_chunk=16), quotas)
        for at in range(kept_slots // PER_CALL):
            self.compute(f"kept-{at}", kept)
        for at in range((SLOTS - kept_slots) // PER_CALL):
            self.compute(f"filler-{at}")

    def compute(self, name: str, hints: Hints = Hints()) -> int:  # noqa: B008
        request, keys = RequestId(name), chain(name, PER_CALL)
        self.stack.begin(request, hints, PER_CALL * 16)
        admitted = self.stack.offload(request, keys, None, 0.0)
        self.stack.stored(request, [resident.key for resident in admitted], 0.0)
        self.stack.end(request)
        self.stack.take_effects()
        return len(admitted)

    def holds(self, name: str) -> bool:
        return all(self.stack.tiers[RAM].ready(key) for key in chain(name, PER_CALL))


WAYS = pytest.mark.parametrize(
    ("quotas", "kept"),
    [
        (Quotas(tenants=(("a", 0.75),)), Hints(tenant="a")),
        (Quotas(raised_share=0.75), always(90)),
        (Quotas(pin_share=0.75), Hints(pin_s=60.0)),
    ],
    ids=["protected", "raised", "pinned"],
)


@WAYS
def test_what_is_kept_is_not_walked_past_in_every_call(quotas: Quotas, kept: Hints) -> None:
    busy = Busy(quotas, kept)
    before = busy.policy.looked_at
    for at in range(CALLS):
        assert busy.compute(f"new-{at}") == PER_CALL
    # Walking past all that is kept, each time, would be CALLS * KEPT.
    assert busy.policy.looked_at - before <= 3 * PASSED_PER_LISTED * CALLS * PER_CALL
    assert all(busy.holds(f"kept-{at}") for at in range(KEPT // PER_CALL))


@WAYS
def test_the_oldest_of_the_others_leave_first(quotas: Quotas, kept: Hints) -> None:
    busy = Busy(quotas, kept)
    fillers = (SLOTS - KEPT) // PER_CALL
    for at in range(fillers // 2):
        busy.compute(f"new-{at}")
    left = [busy.holds(f"filler-{at}") for at in range(fillers)]
    assert left == [False] * (fillers // 2) + [True] * (fillers - fillers // 2)


@WAYS
def test_who_was_used_since_is_struck_off(quotas: Quotas, kept: Hints) -> None:
    busy = Busy(quotas, kept)
    busy.compute("new")
    busy.compute("filler-1")  # listed to leave next, and used again
    busy.compute("newer")
    assert busy.holds("filler-1")
    assert not busy.holds("filler-2")


def test_where_nothing_may_go_nobody_walks_in_every_call() -> None:
    """A tenant's protected share, and the rest of RAM pinned."""
    quotas = Quotas(pin_share=0.25, tenants=(("a", 0.75),))
    busy = Busy(quotas, Hints(tenant="a"))
    for at in range((SLOTS - KEPT) // PER_CALL):
        busy.compute(f"filler-{at}", Hints(pin_s=60.0))
    before = busy.policy.looked_at
    assert all(busy.compute(f"new-{at}") == 0 for at in range(CALLS))
    assert busy.policy.looked_at - before <= SLOTS * (1 + CALLS // (KEPT // 256))
