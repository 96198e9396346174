"""A preempted request comes back as soon as it would without tiers, whoever else arrives."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from rig_parts import BLOCK_TOKENS, Setup
from scheduler_rig import Rig
from vllm.v1.request import RequestStatus

pytestmark = pytest.mark.engine

MakeRig = Callable[[Setup], Rig]

NEWCOMERS = 300


def prompt_of(tokens: int, seed: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(500) for _ in range(tokens)]


def steps_until_back(rig: Rig) -> int:
    """Two long requests outgrow the device; one waits to return, with a newcomer in every step."""
    rig.add("old", prompt_of(10 * BLOCK_TOKENS - 4, 1), 120)
    rig.step()
    rig.step()
    rig.add("victim", prompt_of(10 * BLOCK_TOKENS - 4, 2), 120)
    victim = rig.requests["victim"]
    rig.run_until(lambda: victim.num_preemptions > 0)
    for waited in range(NEWCOMERS):
        if victim.status is RequestStatus.RUNNING:
            return waited
        rig.add(f"newcomer-{waited}", prompt_of(BLOCK_TOKENS - 2, 100 + waited), 30)
        rig.step()
    return NEWCOMERS


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("entry", ["spec", "connector"])
def test_newcomers_do_not_overtake_it_for_ever(
    make_rig: MakeRig, entry: str, async_scheduling: bool
) -> None:
    setup = Setup(entry="native", device_blocks=25, async_scheduling=async_scheduling)
    without_us = steps_until_back(make_rig(setup))
    setup = Setup(entry=entry, device_blocks=25, async_scheduling=async_scheduling)
    rig = make_rig(setup)
    assert steps_until_back(rig) <= without_us + 1
    rig.run()
    assert rig.outputs["victim"] == rig.expected("victim")
