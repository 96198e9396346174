"""New weights: after a reset nothing of before is served, whatever was under way.

The rig's model gives other KV after `new_weights`; a block of old KV fails the next forward pass.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rig_parts import BLOCK_TOKENS, Setup
from scheduler_rig import Rig
from vllm.v1.request import RequestStatus

from emberkv.core.counts import Event
from emberkv.domain.types import DISK, RAM
from emberkv.live.control.messages import PurgeScope
from emberkv.live.manager import STEPS_IN_FLIGHT
from emberkv.live.operations import About, Operations
from emberkv.tiers.format import StoredNamespace
from emberkv.tiers.memory import MemoryStorage
from emberkv.tiers.slab import Slab
from emberkv.tiers.slab_directory import SlabDirectory

pytestmark = pytest.mark.engine

MakeRig = Callable[[Setup], Rig]

Way = dict[str, Any]
ways = pytest.mark.parametrize(
    "way",
    [
        {"entry": "spec"},
        {"entry": "spec", "async_scheduling": True, "late_by": 2},
        {"entry": "connector", "late_by": 2},
        {"entry": "connector", "async_scheduling": True},
    ],
    ids=["spec-sync", "spec-async-late", "connector-sync-late", "connector-async"],
)


def prompt_of(tokens: int, seed: int = 0) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(500) for _ in range(tokens)]


def rig_over_disk(make_rig: MakeRig, way: Way, ram_chunks: int = 16) -> Rig:
    storage = MemoryStorage(64, Setup().chunk_bytes)
    return make_rig(Setup(**way, ram_chunks=ram_chunks, storage=storage))


def onto_disk(rig: Rig, prompt: list[int]) -> None:
    """Serve a prompt, then see to it that it is left on disk alone."""
    rig.serve("first", prompt)
    for number in range(2):
        rig.serve(f"filler-{number}", prompt_of(rig.setup.ram_chunks * BLOCK_TOKENS, 90 + number))
    rig.tick()
    rig.forget_device()


@ways
def test_an_idle_engine_forgets_every_tier(make_rig: MakeRig, way: Way) -> None:
    rig = rig_over_disk(make_rig, way)
    prompt = prompt_of(200)
    onto_disk(rig, prompt)
    assert len(rig.tiers.stack.tiers[DISK].entries) > 6
    assert rig.new_weights()
    assert all(not tier.entries for tier in rig.tiers.stack.tiers)
    assert list(rig.setup.storage.entries()) == []
    assert rig.serve("again", prompt, 3) == 0
    rig.forget_device()
    assert rig.serve("renewed", prompt, 3) == 6 * BLOCK_TOKENS


@ways
def test_requests_that_run_are_computed_anew(make_rig: MakeRig, way: Way) -> None:
    rig = rig_over_disk(make_rig, way)
    prompts = {f"run-{at}": prompt_of(200 + at, seed=at) for at in range(2)}
    for name, prompt in prompts.items():
        rig.add(name, prompt, 30)
    rig.run_until(lambda: all(len(rig.outputs[name]) > 5 for name in prompts), 30)
    assert rig.new_weights()
    rig.run()
    assert all(len(rig.outputs[name]) == 30 for name in prompts)
    for name, prompt in prompts.items():
        rig.tick()
        rig.forget_device()
        assert rig.serve(f"again-{name}", prompt, 3) == 6 * BLOCK_TOKENS


@ways
@pytest.mark.parametrize("hung", [False, True], ids=["moving", "hung"])
def test_a_promotion_under_way(make_rig: MakeRig, way: Way, hung: bool) -> None:
    """Its copies end after the reset; till then their slots are out of use."""
    rig = rig_over_disk(make_rig, way)
    prompt = prompt_of(200)
    onto_disk(rig, prompt)
    rig.driver.hold_back = True
    rig.add("waits", prompt)
    rig.run_until(lambda: rig.tiers.stack.transfers.under_way(RAM) == 6, 5)
    rig.driver.hold_back = hung
    assert rig.new_weights()
    rig.driver.hold_back = False
    rig.run()
    assert rig.outputs["waits"] == rig.expected("waits")
    assert rig.external_tokens("waits") == 0
    check_nothing_is_fenced_for_ever(rig)
    assert rig.serve("again", prompt, 3) == 0
    rig.forget_device()
    assert rig.serve("last", prompt, 3) == 6 * BLOCK_TOKENS


@ways
def test_stores_and_write_behind_under_way(make_rig: MakeRig, way: Way) -> None:
    """Copies from the device and to the disk that were asked for before the reset."""
    rig = rig_over_disk(make_rig, way)
    prompt = prompt_of(200)
    rig.driver.hold_back = True
    rig.serve("first", prompt_of(200, seed=5))
    rig.add("stores", prompt, 20)
    stack = rig.tiers.stack
    rig.run_until(lambda: "stores" in stack.pending_stores(), 5)
    assert rig.new_weights()
    assert len(stack.tiers[RAM].held) >= 6
    rig.driver.hold_back = False
    rig.run()
    check_nothing_is_fenced_for_ever(rig)
    rig.forget_device()
    assert rig.serve("again", prompt, 3) == 6 * BLOCK_TOKENS


@ways
def test_a_load_under_way(make_rig: MakeRig, way: Way) -> None:
    """The engine then refuses to reset its own cache; our slots stay fenced, and all goes on."""
    rig = rig_over_disk(make_rig, way)
    prompt = prompt_of(200)
    rig.serve("first", prompt)
    rig.tick()
    rig.forget_device()
    rig.add("loads", prompt, 3)
    stack = rig.tiers.stack
    if way.get("late_by"):
        rig.run_until(lambda: "loads" in stack.loads_under_way(), 5)
        assert rig.status("loads") is RequestStatus.WAITING_FOR_REMOTE_KVS
        assert not rig.scheduler.reset_prefix_cache(reset_connector=True)
        assert len(stack.tiers[RAM].held) == 6
    rig.run()
    assert rig.outputs["loads"] == rig.expected("loads")
    assert rig.tiers.serving
    check_nothing_is_fenced_for_ever(rig)


@ways
def test_requests_that_wait_for_their_turn(make_rig: MakeRig, way: Way) -> None:
    rig = rig_over_disk(make_rig, way, ram_chunks=8)
    prompts = {f"first-{at}": prompt_of(200 + at, seed=at) for at in range(4)}
    for name, prompt in prompts.items():
        rig.serve(name, prompt)
        rig.tick()
    rig.forget_device()
    rig.driver.hold_back = True
    for name, prompt in prompts.items():
        rig.add(f"again-{name}", prompt, 2)
    for _ in range(3):
        rig.step()
    rig.run_until(lambda: not any(is_loading(rig, name) for name in rig.requests), 20)
    waiting = [lease.request for lease in rig.tiers.stack.promotions.leases()]
    assert len(waiting) > 1
    rig.driver.hold_back = False
    assert rig.new_weights()
    rig.run()
    assert all(rig.external_tokens(name) == 0 for name in waiting)
    check_nothing_is_fenced_for_ever(rig)


def is_loading(rig: Rig, name: str) -> bool:
    return rig.status(name) is RequestStatus.WAITING_FOR_REMOTE_KVS


def test_who_resets_is_told_that_it_will_not_last(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk hangs: a crash now would bring the old weights' KV back."""
    rig = rig_over_disk(make_rig, {"entry": "connector"})
    onto_disk(rig, prompt_of(200))
    assert rig.scheduler.reset_prefix_cache(reset_connector=True)
    monkeypatch.setattr(rig.driver, "reset", lambda: False)
    assert not rig.scheduler.reset_prefix_cache(reset_connector=True)
    monkeypatch.undo()
    assert rig.scheduler.reset_prefix_cache(reset_connector=True)


@ways
def test_another_engine_gets_nothing_that_new_weights_have_computed(
    make_rig: MakeRig, way: Way, tmp_path: Path
) -> None:
    """Weights are updated in memory, the engine is killed, and comes back with those of the files.

    The worker compares every byte before it builds on it.
    """
    prompt = prompt_of(200)
    rig = make_rig(Setup(**way, ram_chunks=16, storage=slab_in(tmp_path)))
    assert rig.new_weights()
    onto_disk(rig, prompt)
    assert len(list(rig.setup.storage.entries())) > 6
    rig.setup.storage.close()
    restarted = make_rig(Setup(**way, ram_chunks=16, storage=slab_in(tmp_path)))
    assert restarted.serve("again", prompt) == 0


@pytest.mark.parametrize("scope", [PurgeScope.ALL, PurgeScope.DISK])
def test_another_engine_gets_what_was_stored_after_a_purge(
    make_rig: MakeRig, tmp_path: Path, scope: PurgeScope
) -> None:
    """A purge says nothing of the weights, unlike a reset."""
    before, after = prompt_of(200, seed=1), prompt_of(200, seed=2)
    rig = make_rig(Setup(ram_chunks=16, storage=slab_in(tmp_path)))
    onto_disk(rig, before)
    operations_on(rig).purge(scope)
    assert list(rig.setup.storage.entries()) == []
    onto_disk(rig, after)
    rig.setup.storage.close()
    restarted = make_rig(Setup(ram_chunks=16, storage=slab_in(tmp_path)))
    assert restarted.serve("again", before) == 0
    assert restarted.serve("kept", after) == 6 * BLOCK_TOKENS


def operations_on(rig: Rig) -> Operations:
    return Operations(rig.tiers, About(rig.engine_id, BLOCK_TOKENS), rig.clock)


def slab_in(root_dir: Path) -> Slab:
    namespace = StoredNamespace(bytes(32), {"weights": "the files'"})
    directory = SlabDirectory(root_dir, 8 << 20, reserve_bytes=0)
    return directory.open_slab(namespace, Setup().chunk_bytes)


def test_twice_in_a_row(make_rig: MakeRig) -> None:
    rig = rig_over_disk(make_rig, {"entry": "spec", "async_scheduling": True})
    prompt = prompt_of(200)
    rig.add("one", prompt, 10)
    for _ in range(3):
        rig.step()
    assert rig.new_weights()
    assert rig.new_weights()
    rig.step()
    assert rig.new_weights()
    rig.run()
    check_nothing_is_fenced_for_ever(rig)
    rig.forget_device()
    assert rig.serve("again", prompt, 3) == 6 * BLOCK_TOKENS


@ways
def test_the_device_alone(make_rig: MakeRig, way: Way) -> None:
    """A plain reset of the prefix cache is not passed on: the tiers stay as they are.

    The engine preempts what runs, and fails if it loads in the very step that says so.
    """
    rig = rig_over_disk(make_rig, way)
    prompt = prompt_of(200)
    onto_disk(rig, prompt)
    rig.add("runs", prompt, 40)
    rig.run_until(lambda: len(rig.outputs["runs"]) > 5, 30)
    rig.finish_steps()
    assert rig.scheduler.reset_prefix_cache(reset_running_requests=True)
    rig.run()
    assert rig.outputs["runs"] == rig.expected("runs")
    assert rig.chunks("disk", Event.LOST) == 0
    rig.forget_device()
    assert rig.serve("again", prompt, 3) == 6 * BLOCK_TOKENS


def check_nothing_is_fenced_for_ever(rig: Rig) -> None:
    for _ in range(STEPS_IN_FLIGHT):
        rig.tick()
    assert rig.tiers.stack.tiers[RAM].held == {}
    assert rig.tiers.stack.tiers[DISK].held == {}
