"""Virtual time, trace reading and replay, in small."""

from __future__ import annotations

import lzma
from pathlib import Path

import pytest

from emberkv.core.audit import AuditedStack
from emberkv.core.counts import Event
from emberkv.domain.types import DISK, RAM, ChunkKey, Copy, Level, Slot, TransferId
from emberkv.errors import ConfigError, UsageError
from emberkv.sim.clock import FinishHeap, SimulatedDriver, TierSpeed
from emberkv.sim.replay import Replay, ReplayPlan, ReplayResult, TierPlan, build_stack
from emberkv.sim.traces import TraceRequest, read_mooncake, trace_lines

LINE = '{"timestamp": 1500, "input_length": 1100, "output_length": 7, "hash_ids": [3, 4, 9]}\n'


def request(arrival_s: float, *names: str) -> TraceRequest:
    return TraceRequest(arrival_s, len(names), 1, tuple(ChunkKey(n.encode()) for n in names))


def run(plan: ReplayPlan, *requests: TraceRequest) -> ReplayResult:
    return Replay(plan, build_stack(plan, AuditedStack)).run(requests)


# ── time ─────────────────────────────────────────────────────────────────────────────────────


def test_things_end_in_the_order_of_their_times_and_then_of_their_coming() -> None:
    heap: FinishHeap[str] = FinishHeap()
    for at_s, name in ((2.0, "c"), (1.0, "a"), (1.0, "b"), (3.0, "d")):
        heap.add(at_s, name)
    assert heap.next_s() == 1.0
    assert heap.due(2.0) == ["a", "b", "c"]
    assert len(heap) == 1
    assert heap.due(2.5) == []


def copy_up(transfer: int, chunks: int) -> Copy:
    keys = tuple(ChunkKey(bytes([transfer, n])) for n in range(chunks))
    slots = tuple(Slot(n) for n in range(chunks))
    return Copy(TransferId(transfer), DISK, RAM, keys, (None, *keys[:-1]), slots, slots)


def test_a_tier_serves_one_copy_after_another_and_reports_chunks_as_they_arrive() -> None:
    speeds = [TierSpeed(), TierSpeed(latency_s=1.0, read_bytes_per_s=10.0)]
    driver = SimulatedDriver(speeds, chunk_bytes=10, report_chunks=2)
    driver.submit([copy_up(1, 3), copy_up(2, 1)], 0.0)
    assert driver.next_s() == 3.0
    assert driver.poll(2.9) == []
    assert [(each.transfer, len(each.results)) for each in driver.poll(4.0)] == [(1, 2), (1, 1)]
    assert [each.transfer for each in driver.poll(6.0)] == [2]
    assert driver.next_s() is None


# ── traces ───────────────────────────────────────────────────────────────────────────────────


def test_a_partial_last_block_counts_in_tokens_and_not_in_chunks() -> None:
    [traced] = read_mooncake([LINE])
    assert (traced.arrival_s, traced.input_tokens, traced.output_tokens) == (1.5, 1100, 7)
    assert traced.keys == ((3).to_bytes(8, "big"), (4).to_bytes(8, "big"))


def test_a_chunk_of_several_blocks_is_named_by_its_last() -> None:
    [traced] = read_mooncake([LINE.replace("1100", "1536")], blocks_per_chunk=2)
    assert traced.keys == ((4).to_bytes(8, "big"),)


@pytest.mark.parametrize("line", ["", "[]", "{}", LINE.replace("[3,", '["x",'), "not JSON"])
def test_a_line_that_is_none_is_named(line: str) -> None:
    with pytest.raises(UsageError, match="line 2 is not of a Mooncake trace"):
        list(read_mooncake([LINE, line]))


def test_files_are_read_plain_and_compressed(tmp_path: Path) -> None:
    plain, packed = tmp_path / "trace.jsonl", tmp_path / "trace.jsonl.xz"
    plain.write_text(LINE)
    packed.write_bytes(lzma.compress(LINE.encode()))
    assert list(trace_lines(plain)) == list(trace_lines(packed)) == [LINE]


@pytest.mark.parametrize("name", ["absent.jsonl", "absent.jsonl.xz", "broken.jsonl.xz"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "broken.jsonl.xz").write_bytes(b"not compressed")
    with pytest.raises(UsageError, match=name):
        list(trace_lines(tmp_path / name))


# ── replay ───────────────────────────────────────────────────────────────────────────────────


def test_only_the_leading_chunks_hit() -> None:
    plan = ReplayPlan((TierPlan(8),), tokens_per_chunk=1)
    result = run(plan, request(0, "a", "b", "c"), request(1, "a", "b", "x"), request(2, "y"))
    assert result.hit_tokens == [2]
    assert (result.requests, result.input_tokens) == (3, 7)
    assert result.hit_ratio == pytest.approx(2 / 7)


def test_what_comes_back_from_disk_counts_as_of_the_disk_and_was_waited_for() -> None:
    slow = TierSpeed(latency_s=0.2)
    plan = ReplayPlan((TierPlan(2), TierPlan(8, speed=slow)), tokens_per_chunk=1)
    result = run(plan, request(0, "a", "b"), request(1, "x", "y"), request(2, "a", "b"))
    assert result.hit_tokens == [0, 2]
    assert 0.2 <= result.waited_s < 0.4
    assert result.counts[Event.PROMOTED, RAM] == 2


def test_nobody_waits_for_a_tier_that_takes_too_long() -> None:
    hung = TierSpeed(latency_s=1000.0, write_bytes_per_s=1e12)
    plan = ReplayPlan((TierPlan(2), TierPlan(8, speed=hung)), tokens_per_chunk=1)
    result = run(plan, request(0, "a"), request(2000, "x", "y"), request(4000, "a"))
    assert result.hit_tokens == [0, 0]
    assert 1.0 <= result.waited_s < 1.2


def test_requests_that_share_a_prefix_wait_for_one_promotion() -> None:
    slow = TierSpeed(latency_s=0.2)
    plan = ReplayPlan((TierPlan(4), TierPlan(16, speed=slow)), tokens_per_chunk=1)
    result = run(
        plan,
        request(0, "a", "b"),
        request(1, "w", "x", "y", "z"),
        request(2, "a", "b", "c"),
        request(2.01, "a", "b", "d"),
    )
    assert result.hit_tokens == [0, 4]
    assert result.counts[Event.PROMOTED, RAM] == 2


def test_three_tiers() -> None:
    plan = ReplayPlan((TierPlan(1), TierPlan(1), TierPlan(8)), tokens_per_chunk=1)
    result = run(plan, request(0, "a"), request(1, "b"), request(2, "c"), request(3, "a"))
    assert result.hit_tokens == [0, 0, 1]
    assert result.counts[Event.WRITTEN_BEHIND, Level(2)] >= 1


def test_plans_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="there are: arc, lru"):
        TierPlan(1, "fifo")
    with pytest.raises(ConfigError, match="room for a chunk"):
        TierPlan(0)
