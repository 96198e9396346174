"""What ends other caches: prefixes beyond RAM, queues beyond RAM, disks that hang, fail or lie.

Each of these ends in answers, within few steps. vLLM's own tiering manager goes through the same
scenes; where it fails, the test says how, and fails if that ever changes.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import native_tier
import pytest
from rig_parts import BLOCK_TOKENS, STEP_S, Setup
from scheduler_rig import Rig

from emberkv.core.counts import Event
from emberkv.domain.types import DISK, Outcome
from emberkv.drills.faults import Fault, FaultyStorage, Operation
from emberkv.tiers.memory import MemoryStorage

pytestmark = pytest.mark.engine

MakeRig = Callable[[Setup], Rig]
WALL_S = 3.0
STEP_LIMIT_S = 0.05
MAX_STALL_S = 0.05


def native_fails(how: str) -> Any:
    """The native manager as a peer that fails a scene in a known way."""
    mark = pytest.mark.xfail(strict=True, raises=AssertionError, reason=how)
    return pytest.param("native", marks=mark)


def peers(*native: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("peer", ["spec", "connector", *native])


both_ways = pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])


def prompt_of(tokens: int, seed: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(500) for _ in range(tokens)]


class Scene:
    """A rig of ours or a native one, over RAM of a few chunks and a disk that can be spoilt."""

    def __init__(
        self, make_rig: MakeRig, peer: str, root_dir: Path, *, ram_chunks: int, **more: Any
    ) -> None:
        self.root_dir = root_dir
        self.native = peer == "native"
        setup: dict[str, Any] = {
            "entry": peer,
            "ram_chunks": ram_chunks,
            "device_blocks": 256,
            "max_batched_tokens": 256,
            **more,
        }
        self.disk = FaultyStorage(MemoryStorage(512, Setup().chunk_bytes))
        if self.native:
            tier = {"type": "fs", "root_dir": str(root_dir), "n_read_threads": 2}
            setup["extra"] = {"secondary_tiers": [tier | {"n_write_threads": 2}]}
        else:
            setup["storage"] = self.disk
            setup["extra"] = {"max_stall_s": MAX_STALL_S}
        self.rig = make_rig(Setup(**setup))

    def fill(self, prompts: dict[str, list[int]]) -> None:
        """Serve each prompt once, and see to it that the device and RAM have forgotten it."""
        rig = self.rig
        fillers = {f"filler-{n}": prompt_of(rig.setup.ram_chunks * 32, -1 - n) for n in range(2)}
        for name, prompt in {**prompts, **fillers}.items():
            self._serve(name, prompt)
            self._serve(f"tick-{rig.steps}", [1, 2, 3])  # notes what the driver has done
        rig.forget_device()

    def _serve(self, name: str, prompt: list[int]) -> None:
        """One request to its end, however long native's threads take over their files."""
        self.rig.add(name, prompt, 1)
        self.run()

    def run(self, max_steps: int = 4000) -> None:
        """Until all is answered; fails after so many steps or seconds."""
        rig, deadline = self.rig, time.monotonic() + WALL_S
        for _ in range(max_steps):
            if not rig.busy:
                break
            assert time.monotonic() < deadline, f"not done after {rig.steps} steps"
            rig.step()
            if self.native:
                native_tier.wait_for_files(rig.manager, STEP_LIMIT_S)
        assert not rig.busy, f"not done after {max_steps} steps"
        for name in rig.requests:
            assert rig.outputs[name] == rig.expected(name)
        assert self.native or rig.tiers.serving

    @contextmanager
    def hung_disk(self) -> Iterator[None]:
        if self.native:
            with native_tier.hung_files(self.root_dir):
                yield
        else:
            self.rig.driver.hold_back = True
            yield
            self.rig.driver.hold_back = False


@peers(native_fails("evicts the chain's head to promote its tail, in a circle, and never answers"))
@both_ways
def test_a_prefix_larger_than_ram(
    make_rig: MakeRig, peer: str, async_scheduling: bool, tmp_path: Path
) -> None:
    scene = Scene(make_rig, peer, tmp_path, ram_chunks=32, async_scheduling=async_scheduling)
    prompt = prompt_of(40 * BLOCK_TOKENS + 3, seed=1)
    scene.fill({"first": prompt})
    scene.rig.add("again", prompt)
    scene.run()
    assert scene.rig.external_tokens("again") == 32 * BLOCK_TOKENS


@peers(native_fails("fills RAM with promotions in flight and answers most requests with a miss"))
@both_ways
def test_sixteen_waiting_requests_that_do_not_fit_together(
    make_rig: MakeRig, peer: str, async_scheduling: bool, tmp_path: Path
) -> None:
    """Sixteen prefixes of 6 chunks, RAM for 4 of them: each has its turn."""
    scene = Scene(make_rig, peer, tmp_path, ram_chunks=24, async_scheduling=async_scheduling)
    prompts = {f"first-{at}": prompt_of(6 * BLOCK_TOKENS + 3, seed=at) for at in range(16)}
    scene.fill(prompts)
    for name, prompt in prompts.items():
        scene.rig.add(f"again-{name}", prompt)
    scene.run()
    got = [scene.rig.external_tokens(f"again-{name}") for name in prompts]
    assert got == [6 * BLOCK_TOKENS] * 16


@peers(native_fails("waits for a read without a deadline"))
@both_ways
def test_a_disk_that_hangs(
    make_rig: MakeRig, peer: str, async_scheduling: bool, tmp_path: Path
) -> None:
    """The request is answered without it, and so is everybody after."""
    scene = Scene(make_rig, peer, tmp_path, ram_chunks=16, async_scheduling=async_scheduling)
    rig = scene.rig
    prompt = prompt_of(200, seed=1)
    scene.fill({"first": prompt})
    with scene.hung_disk():
        steps_before = rig.steps
        rig.add("again", prompt)
        scene.run(400)
        assert rig.external_tokens("again") == 0
        if not scene.native:
            assert rig.steps - steps_before <= MAX_STALL_S / STEP_S + 12
        rig.forget_device()
        rig.add("other", prompt_of(200, seed=2))
        scene.run(20)
    rig.tick()
    rig.forget_device()
    rig.add("late", prompt)
    scene.run()
    assert rig.external_tokens("late") == 6 * BLOCK_TOKENS


@peers("native")
@both_ways
def test_a_disk_that_fails_every_read(
    make_rig: MakeRig, peer: str, async_scheduling: bool, tmp_path: Path
) -> None:
    scene = Scene(make_rig, peer, tmp_path, ram_chunks=16, async_scheduling=async_scheduling)
    prompt = prompt_of(200, seed=1)
    scene.fill({"first": prompt})
    scene.disk.plan(Fault(Operation.READ, outcome=Outcome.FAILED))
    if scene.native:
        native_tier.unreadable_files(tmp_path)
    scene.rig.add("again", prompt)
    scene.run()
    assert scene.rig.external_tokens("again") == 0


@peers(native_fails("serves whatever the file holds"))
@both_ways
def test_a_disk_that_returns_other_bytes(
    make_rig: MakeRig, peer: str, async_scheduling: bool, tmp_path: Path
) -> None:
    scene = Scene(make_rig, peer, tmp_path, ram_chunks=16, async_scheduling=async_scheduling)
    prompt = prompt_of(200, seed=1)
    scene.fill({"first": prompt})
    scene.disk.plan(Fault(Operation.READ, flip=True))
    if scene.native:
        native_tier.damaged_files(tmp_path)
    scene.rig.add("again", prompt)
    scene.run()
    assert scene.rig.external_tokens("again") == 0


@pytest.mark.parametrize("outcome", [Outcome.CORRUPT, Outcome.ABSENT])
def test_what_is_bad_on_disk_is_forgotten_and_written_anew(
    make_rig: MakeRig, tmp_path: Path, outcome: Outcome
) -> None:
    scene = Scene(make_rig, "spec", tmp_path, ram_chunks=16)
    rig = scene.rig
    prompt = prompt_of(200, seed=1)
    scene.fill({"first": prompt})
    third = list(rig.tiers.stack.tiers[DISK].entries.values())[2]
    scene.disk.plan(Fault(Operation.READ, frozenset([third.slot]), outcome=outcome))
    rig.add("again", prompt)
    scene.run()
    assert rig.external_tokens("again") == 2 * BLOCK_TOKENS
    assert rig.chunks("disk", Event.LOST) == 1
    scene.disk.plan()
    scene.fill({"renewed": prompt})
    rig.add("last", prompt)
    scene.run()
    assert rig.external_tokens("last") == 6 * BLOCK_TOKENS


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.FULL])
def test_a_disk_that_takes_no_writes(make_rig: MakeRig, tmp_path: Path, outcome: Outcome) -> None:
    scene = Scene(make_rig, "spec", tmp_path, ram_chunks=8)
    rig = scene.rig
    scene.disk.plan(Fault(Operation.WRITE, outcome=outcome))
    prompt = prompt_of(200, seed=1)
    rig.serve("first", prompt)
    rig.tick()
    rig.forget_device()
    assert rig.serve("again", prompt) == 6 * BLOCK_TOKENS
    scene.fill({"other": prompt_of(200, seed=2)})
    assert len(rig.tiers.stack.tiers[DISK].entries) == 0
    rig.add("last", prompt)
    scene.run()
    assert rig.external_tokens("last") == 0


def test_writes_that_hang_do_not_stop_the_engine(make_rig: MakeRig, tmp_path: Path) -> None:
    """All of RAM is pinned by copies that do not end: nothing new is kept, all is answered."""
    scene = Scene(make_rig, "spec", tmp_path, ram_chunks=8)
    with scene.hung_disk():
        for at in range(5):
            scene.rig.add(f"request-{at}", prompt_of(200, seed=at))
            scene.run(60)
    assert len(scene.rig.tiers.stack.tiers[DISK].entries) > 0
    scene.rig.tick()
    scene.rig.forget_device()
    scene.rig.add("again", prompt_of(200, seed=0))
    scene.run()
    assert scene.rig.external_tokens("again") == 6 * BLOCK_TOKENS


@both_ways
@pytest.mark.parametrize("blocks_per_chunk", [1, 4])
def test_ram_of_one_chunk(
    make_rig: MakeRig, tmp_path: Path, async_scheduling: bool, blocks_per_chunk: int
) -> None:
    storage = MemoryStorage(64, Setup(blocks_per_chunk=blocks_per_chunk).chunk_bytes)
    setup = Setup(
        async_scheduling=async_scheduling,
        ram_chunks=1,
        blocks_per_chunk=blocks_per_chunk,
        storage=storage,
    )
    rig = make_rig(setup)
    for at in range(6):
        rig.add(f"request-{at}", prompt_of(500 + at, seed=at % 3), 3)
    rig.run()
    assert all(rig.outputs[name] == rig.expected(name) for name in rig.requests)
    rig.tick()
    rig.forget_device()
    assert rig.serve("again", prompt_of(500, seed=2)) <= blocks_per_chunk * BLOCK_TOKENS
