"""Shadows: whatever happens in whatever order, every pin and every spare row comes back."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from emberkv.core.residents import Residents, State
from emberkv.core.shadows import Shadow, Shadows
from emberkv.domain.types import DISK, RAM, ChunkKey, RequestId, Slot, VisitId
from emberkv.policy.eviction import EVICTION_POLICIES

SLOTS = 10
KEPT = 6
REQUESTS = [RequestId("a"), RequestId("b")]
KEYS = [ChunkKey(bytes([at])) for at in range(KEPT)]


class Table:
    """A RAM tier with some chunks, and its shadows."""

    def __init__(self) -> None:
        self.ram = Residents(SLOTS, 4096, EVICTION_POLICIES["lru"](SLOTS))
        self.kept = self.ram.insert(KEYS, [None, *KEYS[:-1]], VisitId(0))
        for resident in self.kept:
            resident.state = State.READY
        self.shadows = Shadows(self.ram)
        self.shadows.use(self.reserve, self.ram.free_held)

    def reserve(self, count: int) -> Sequence[Slot]:
        slots = sorted(self.ram.free_slots())[:count]
        self.ram.hold(slots)
        return slots


def test_kept_chunks_are_pinned_and_written_beside() -> None:
    table = Table()
    shadows = table.shadows
    shadows.open(REQUESTS[0], table.kept[:3], {KEYS[1]: DISK})
    assert REQUESTS[0] in shadows
    assert table.ram.pinned_count == 3
    found = shadows.offered(REQUESTS[0], [*KEYS[:2], ChunkKey(b"new")])
    assert [(shadow.key, shadow.origin) for shadow in found] == [(KEYS[0], RAM), (KEYS[1], DISK)]
    assert not {shadow.spare for shadow in found} & {each.slot for each in table.kept}
    assert shadows.offered(REQUESTS[0], KEYS[:2]) == []  # once is enough
    assert shadows.written(REQUESTS[0], [KEYS[1]]) == [found[1]]
    shadows.compared(found[1])
    assert table.ram.pinned_count == 2
    shadows.ended(REQUESTS[0])
    assert table.ram.pinned_count == 1  # still being written
    (last,) = shadows.written(REQUESTS[0], KEYS)
    shadows.compared(last)
    assert (table.ram.pinned_count, dict(table.ram.held)) == (0, {})
    assert REQUESTS[0] not in shadows


def test_nothing_leaves_for_a_spare_row() -> None:
    table = Table()
    table.shadows.open(REQUESTS[0], table.kept, {})
    found = table.shadows.offered(REQUESTS[0], KEYS)
    assert [shadow.key for shadow in found] == KEYS[: SLOTS - KEPT]
    assert len(table.ram.entries) == KEPT


def test_a_request_that_is_no_canary_has_no_shadows() -> None:
    table = Table()
    assert table.shadows.offered(REQUESTS[0], KEYS) == []
    assert table.shadows.written(REQUESTS[0], KEYS) == []
    table.shadows.ended(REQUESTS[0])


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["open", "offered", "written", "compared", "ended", "clear"]),
        st.sampled_from(REQUESTS),
        st.integers(0, KEPT - 1),
        st.integers(1, KEPT),
    ),
    max_size=40,
)


@given(STEPS)
def test_all_that_is_taken_is_given_back(steps: list[tuple[str, RequestId, int, int]]) -> None:
    table = Table()
    shadows, ram = table.shadows, table.ram
    comparing: list[Shadow] = []
    fenced: list[Slot] = []
    for what, request, first, count in steps:
        keys = KEYS[first : first + count]
        match what:
            case "open" if request not in shadows:
                kept = [ram.entries[key] for key in keys if key in ram.entries]
                shadows.open(request, kept, {})
            case "offered":
                shadows.offered(request, keys)
            case "written":
                comparing += shadows.written(request, keys)
            case "compared" if comparing:
                shadows.compared(comparing.pop())
            case "ended":
                shadows.ended(request)
            case "clear":
                fenced += shadows.clear()
                ram.clear([])
        assert ram.pinned_count == sum(bool(each.pins) for each in ram.entries.values())
        assert not set(ram.held) & {each.slot for each in ram.entries.values()}
    for request in REQUESTS:
        shadows.ended(request)
        comparing += shadows.written(request, KEYS)
    for shadow in comparing:
        shadows.compared(shadow)
    ram.free_held(fenced)
    assert ram.pinned_count == 0
    assert dict(ram.held) == {}
    assert ram.free_count + len(ram.entries) == SLOTS
