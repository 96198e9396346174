"""Token hit ratios on a public trace: LRU as the literature has it, the rest pinned as measured.

The reference figures for LRU come from an independent block-level simulator: a request hits its
leading cached blocks, all its full blocks are then offered, capacity is a share of the trace's
unique blocks. Ours run through `TierStack`, by the calls that the live manager makes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from emberkv.sim.replay import Replay, ReplayPlan, ReplayResult, TierPlan
from emberkv.sim.traces import MOONCAKE_BLOCK_TOKENS, TraceRequest, read_mooncake, trace_lines

TRACE = Path(__file__).parent / "data" / "mooncake_conversation.jsonl.xz"

UNIQUE_BLOCKS = 170_899
CHUNK_BYTES = 1 << 20


@cache
def requests() -> Sequence[TraceRequest]:
    return tuple(read_mooncake(trace_lines(TRACE)))


def replay(policy: str, *percents: int) -> ReplayResult:
    tiers = tuple(TierPlan(UNIQUE_BLOCKS * percent // 100, policy) for percent in percents)
    return Replay(ReplayPlan(tiers, MOONCAKE_BLOCK_TOKENS, CHUNK_BYTES)).run(requests())


def test_the_trace_is_the_one_that_the_figures_are_for() -> None:
    assert len(requests()) == 12_031
    assert len({key for request in requests() for key in request.keys}) == UNIQUE_BLOCKS


@pytest.mark.parametrize(
    ("percent", "reference"), [(1, 5.32), (3, 12.45), (10, 28.18), (30, 36.45)]
)
def test_lru_in_ram_equals_the_reference(percent: int, reference: float) -> None:
    assert replay("lru", percent).hit_ratio * 100 == pytest.approx(reference, abs=0.05)


@pytest.mark.parametrize(
    ("percent", "chunks"), [(1, 18_430), (3, 36_842), (10, 81_432), (30, 100_151)]
)
def test_arc_in_ram_is_as_it_was(percent: int, chunks: int) -> None:
    assert replay("arc", percent).hit_tokens == [chunks * MOONCAKE_BLOCK_TOKENS]


def test_lru_in_ram_and_on_disk_is_as_it_was() -> None:
    """Disk ten times as large as RAM: together they hit what the disk alone would."""
    result = replay("lru", 1, 10)
    assert [tokens // MOONCAKE_BLOCK_TOKENS for tokens in result.hit_tokens] == [15_121, 64_581]
    assert result.hit_ratio * 100 == pytest.approx(28.18, abs=0.05)
