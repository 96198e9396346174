"""How much of a match is worth loading, held against every possible cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberkv.core.costs import LEAST_LOADS
from emberkv.core.economy import Economy, Stretch, Terms
from emberkv.domain.types import DISK, RAM, RequestId

TOKENS = 128
REMOTE = 2

NOW_S = 100.0


def economy(
    *,
    token_s: float = 1e-4,
    rise: float = 0.0,
    first_s: float = 0.0,
    chunk_s: float = 0.0,
    load_s: float = 0.0,
) -> Economy:
    """An economy that has learned these costs; a token at a position costs more with `rise`."""
    made = Economy(Terms(tokens_per_chunk=TOKENS), 3)
    for first in range(0, 65536, 2048):
        seconds = 2048 * token_s + rise * ((first + 2048) ** 2 - first**2) / 2
        made.compute.observe([(first, first + 2048)], 0, seconds)
    for level in (DISK, REMOTE):
        made.reads[level].started(400, 0.0)
        made.reads[level].ended(1, 1, first_s)
        made.reads[level].ended(399, 399, first_s + 399 * chunk_s)
    if load_s:
        for _ in range(LEAST_LOADS):
            made.loads.observe(100, 100 * load_s, NOW_S)
    return made


def gain(made: Economy, stretches: list[Stretch], at: int, first: int) -> float:
    """What loading the first `at` chunks saves, by the definition."""
    saved_s = made.compute.seconds(first, first + at * TOKENS)
    wanted: dict[int, int] = {}
    seen = 0
    for level, count in stretches:
        take = max(0, min(count, at - seen))
        seen += count
        if take and level != RAM:
            wanted[level] = wanted.get(level, 0) + take
    waits = []
    for level, count in wanted.items():
        cost = made.reads[level]
        if cost.first_s > 0.05 * saved_s:
            return -1.0
        waits.append(cost.first_s + count * cost.chunk_s)
    return saved_s - max(waits, default=0.0) - at * made.loads.chunk_s(NOW_S)


def test_a_quick_tier_is_loaded_whole_and_a_slow_one_not() -> None:
    stretches: list[Stretch] = [(RAM, 10), (DISK, 20)]
    quick = economy(first_s=0.001, chunk_s=0.001)
    assert quick.cut(stretches, 0, 0.0, 10.0) == 30
    slow = economy(first_s=0.001, chunk_s=0.05)
    assert slow.cut(stretches, 0, 0.0, 10.0) == 10


def test_the_head_of_a_slow_part_may_be_worth_it() -> None:
    """Computing gets dearer with the position: a long match can pay where a short one does not."""
    rising = economy(token_s=1e-5, rise=2e-8, first_s=0.0001, chunk_s=0.0125)
    assert rising.cut([(DISK, 20)], 0, 0.0, 10.0) == 0
    assert rising.cut([(DISK, 200)], 0, 0.0, 10.0) == 200


def test_nothing_is_known_at_first_and_everything_is_tried() -> None:
    made = Economy(Terms(tokens_per_chunk=TOKENS), 2)
    assert made.cut([(DISK, 7)], 0, 0.0, 0.0) == 7


def test_ram_pays_only_if_copying_is_quicker_than_computing() -> None:
    assert economy(load_s=0.001).ram_pays(0, 4096, NOW_S)
    assert not economy(load_s=0.1).ram_pays(0, 4096, NOW_S)


@given(
    stretches=st.lists(
        st.tuples(st.sampled_from([RAM, DISK, REMOTE]), st.integers(1, 60)), min_size=1, max_size=5
    ),
    first=st.integers(0, 100).map(lambda chunk: chunk * TOKENS),
    rise=st.sampled_from([0.0, 1e-9, 2e-8]),
    first_s=st.floats(0.0, 0.05),
    chunk_s=st.floats(0.0, 0.05),
    load_s=st.floats(0.0, 0.02),
)
def test_no_other_cut_gains_much_more(  # noqa: PLR0917
    stretches: list[Stretch],
    first: int,
    rise: float,
    first_s: float,
    chunk_s: float,
    load_s: float,
) -> None:
    made = economy(rise=rise, first_s=first_s, chunk_s=chunk_s, load_s=load_s)
    length = sum(count for _, count in stretches)
    chosen = made.cut(stretches, first, 0.0, NOW_S)
    best = max(gain(made, stretches, at, first) for at in range(length + 1))
    whole = made.compute.seconds(first, first + length * TOKENS)
    mine = gain(made, stretches, chosen, first)
    assert mine >= 0.0
    assert mine >= best - 0.1 * whole


def test_a_wait_ends_when_the_promise_would_be_broken() -> None:
    made = economy()
    request = RequestId("r")
    made.backlog.arrive(request, 10 * TOKENS)
    made.park(request, 0, 0, 10 * TOKENS, 5.0)
    whole = made.compute.seconds(0, 10 * TOKENS)
    assert made.backlog.slack_s(request, 5.0) == pytest.approx(0.05 * whole)
    made.backlog.has(request, 5 * TOKENS)
    assert made.backlog.slack_s(request, 5.0) == pytest.approx(0.55 * whole)
