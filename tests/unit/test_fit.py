"""Too much is refused by naming the number that is too large and what fits."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberkv.app.fit import (
    RamPlan,
    default_reserve_bytes,
    require_chunk_fits,
    require_disk_fit,
)
from emberkv.app.machine import DiskSpace, Machine
from emberkv.domain.units import parse_size
from emberkv.engines.vllm.command_line import Need
from emberkv.errors import UsageError

GIB = 1 << 30
MACHINE = Machine(
    ram_bytes=64 * GIB,
    ram_limit="this machine's RAM",
    available_bytes=60 * GIB,
    shm_bytes=32 * GIB,
    locked_bytes=None,
)
NEEDS = (Need("weights", 14 * GIB), Need("vLLM's KV cache", 4 * GIB))


def plan(tier_gib: float, needs: tuple[Need, ...] = NEEDS, reserve_gib: float = 6) -> RamPlan:
    return RamPlan(int(tier_gib * GIB), int(reserve_gib * GIB), needs, MACHINE)


def refusal_of(asked: RamPlan) -> str:
    try:
        asked.require_fit()
    except UsageError as refusal:
        return str(refusal)
    return ""


def test_what_fits_exactly_fits() -> None:
    plan(40).require_fit()
    with pytest.raises(UsageError):
        plan(40.001).require_fit()


def test_the_refusal_names_every_share_and_what_fits() -> None:
    with pytest.raises(UsageError) as refusal:
        plan(50).require_fit()
    assert str(refusal.value) == (
        "--ram 50GiB is too large: this machine's RAM is 64.0 GiB, the engine takes 18.0 GiB "
        "(weights 14.0 GiB + vLLM's KV cache 4.0 GiB), and --reserve keeps 6.0 GiB; "
        "at most --ram 40GiB fits"
    )


@given(st.floats(0.001, 200), st.floats(0, 60), st.floats(0, 20))
def test_what_the_refusal_says_fits_does_fit(
    tier_gib: float, engine_gib: float, reserve_gib: float
) -> None:
    asked = plan(tier_gib, (Need("weights", int(engine_gib * GIB)),), reserve_gib)
    refusal = refusal_of(asked)
    offered = re.search(r"at most --ram (\S+) fits", refusal)
    if offered:
        dataclasses.replace(asked, tier_bytes=parse_size(offered[1])).require_fit()
    elif refusal:
        assert "no --ram fits" in refusal
        assert engine_gib + reserve_gib > 63.9


def test_where_nothing_fits_the_largest_share_is_named() -> None:
    with pytest.raises(UsageError, match=r"no --ram fits.*less for weights"):
        plan(1, (Need("weights", 60 * GIB),)).require_fit()
    with pytest.raises(UsageError, match="make --reserve smaller"):
        plan(1, (), reserve_gib=64).require_fit()
    share = Need("vLLM's share of the RAM (--gpu-memory-utilization 0.92)", 59 * GIB)
    with pytest.raises(UsageError, match="set VLLM_CPU_KVCACHE_SPACE"):
        plan(1, (share,)).require_fit()


def test_the_reserve_is_a_tenth_unless_told() -> None:
    assert default_reserve_bytes(MACHINE) == 64 * GIB // 10


def test_a_disk_tier_may_take_what_is_free_and_what_its_own_slabs_hold() -> None:
    space = DiskSpace(Path("/mnt/kv"), free_bytes=100 * GIB, slabs_bytes=50 * GIB)
    require_disk_fit(150 * GIB, space)
    with pytest.raises(UsageError) as refusal:
        require_disk_fit(151 * GIB, space)
    assert str(refusal.value) == (
        "--disk-size 151GiB is too large: /mnt/kv has 100.0 GiB free and 50.0 GiB in emberkv's "
        "own slabs; at most --disk-size 150GiB fits"
    )


def test_a_tier_smaller_than_a_chunk_is_refused() -> None:
    require_chunk_fits("--ram", 4096, 4096, 16)
    with pytest.raises(UsageError, match=r"--ram 2KiB is smaller than one chunk of 16 tokens"):
        require_chunk_fits("--ram", 2048, 4096, 16)
