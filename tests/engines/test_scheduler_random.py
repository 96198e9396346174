"""Long random runs: requests that share prefixes, aborts, resets, a slow or failing disk.

Small tiers and a small device, so that chunks are evicted, promotions cut and requests preempted
all the time. Bytes are compared before every forward pass, the stack audits itself at every call,
and every answer is compared with the model's.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
from rig_parts import BLOCK_TOKENS, Setup
from scheduler_rig import Rig

from emberkv.core.counts import Event
from emberkv.domain.types import RAM, Outcome
from emberkv.drills.faults import Fault, FaultyStorage, Operation
from emberkv.tiers.memory import MemoryStorage

pytestmark = pytest.mark.engine

STEPS = 400
SEEDS = 20 if os.environ.get("HYPOTHESIS_PROFILE") == "nightly" else 1
SETUPS: list[dict[str, Any]] = [
    {"entry": "spec", "blocks_per_chunk": 1, "ram_chunks": 24, "device_blocks": 40},
    {"entry": "connector", "blocks_per_chunk": 3, "ram_chunks": 9, "device_blocks": 48},
    {"entry": "spec", "blocks_per_chunk": 2, "ram_chunks": 6, "device_blocks": 30},
    {"entry": "connector", "blocks_per_chunk": 1, "ram_chunks": 40, "device_blocks": 24},
]


class RandomRun:
    """What happens between the steps of one rig, decided by a seed."""

    def __init__(self, rig: Rig, disk: FaultyStorage, seed: int) -> None:
        self.rig = rig
        self.disk = disk
        self.chance = random.Random(seed)
        room = (rig.setup.device_blocks - 2) * BLOCK_TOKENS  # what one request may take of it
        self.longest = min(700, room - 100)
        self.documents = [self._tokens(700) for _ in range(5)]
        self.added = 0
        self.torn: set[str] = set()  # requests whose answer spans two sets of weights
        self.answers: dict[str, list[int]] = {}

    def _tokens(self, count: int) -> list[int]:
        return [self.chance.randrange(500) for _ in range(count)]

    def play(self) -> None:
        """Disturb and step, then let everything end."""
        rig, chance = self.rig, self.chance
        for _ in range(STEPS):
            if len(self._alive()) < 8 and chance.random() < 0.35:
                self._add()
            self._disturb()
            if rig.busy:
                rig.step()
            self._note_answers()
        rig.driver.hold_back = False
        self.disk.plan()
        rig.run(5000)
        self._note_answers()

    def _note_answers(self) -> None:
        """Note the right answer to each request that has ended, under the weights of now."""
        for name in self.rig.finished.keys() - self.answers.keys():
            self.answers[name] = self.rig.expected(name)

    def _alive(self) -> list[str]:
        return [name for name in self.rig.requests if name not in self.rig.finished]

    def _add(self) -> None:
        chance = self.chance
        document = chance.choice(self.documents)
        prompt = document[: chance.randrange(20, self.longest)] + self._tokens(chance.randrange(40))
        tenant = chance.choice([None, None, None, "tenant"])
        self.rig.add(f"request-{self.added}", prompt, chance.randrange(1, 60), salt=tenant)
        self.added += 1

    def _disturb(self) -> None:
        rig, chance = self.rig, self.chance
        what = chance.random()
        if what < 0.03 and self._alive():
            rig.abort(chance.choice(self._alive()))
        elif what < 0.06:
            rig.driver.hold_back = not rig.driver.hold_back
        elif what < 0.08:
            outcome = chance.choice([Outcome.FAILED, Outcome.CORRUPT, Outcome.ABSENT])
            self.disk.plan(Fault(chance.choice(list(Operation)), outcome=outcome))
        elif what < 0.12:
            self.disk.plan()
        elif what < 0.13:
            rig.scheduler.reset_prefix_cache()
        elif what < 0.14:
            self._reset()

    def _reset(self) -> None:
        rig = self.rig
        rig.finish_steps()
        self._note_answers()
        torn = {name for name in self._alive() if rig.outputs[name]}
        only_device = self.chance.random() < 0.3
        try:
            if only_device:
                assert rig.scheduler.reset_prefix_cache(reset_running_requests=True)
            else:
                assert rig.new_weights()
                self.torn |= torn
        except RuntimeError as refusal:  # the engine's own, while anything loads
            if "waiting for remote KV transfer" not in str(refusal):
                raise


@pytest.mark.parametrize("setup", SETUPS, ids=["one", "three", "two", "tiny-device"])
@pytest.mark.parametrize("late_by", [0, 2], ids=["prompt", "late"])
@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_random_run(
    make_rig: Callable[[Setup], Rig],
    setup: dict[str, Any],
    late_by: int,
    async_scheduling: bool,
    seed: int,
) -> None:
    given = Setup(
        **setup,
        async_scheduling=async_scheduling,
        late_by=late_by,
        max_batched_tokens=160,
        extra={"offload_prompt_only": False, "max_stall_s": 0.02, "max_wait_s": 0.1},
    )
    disk = FaultyStorage(MemoryStorage(40, given.chunk_bytes))
    rig = make_rig(Setup(**vars(given) | {"storage": disk}))
    run = RandomRun(rig, disk, seed)
    run.play()
    for name, request in rig.requests.items():
        if rig.finished[name] == "abort":
            continue
        assert len(rig.outputs[name]) == request.max_tokens
        if name not in run.torn:
            assert rig.outputs[name] == run.answers[name]
    stack = rig.tiers.stack
    assert rig.tiers.serving
    assert list(stack.promotions.leases()) == []
    assert stack.loads_under_way() == {}
    assert stack.pending_stores() == {}
    assert rig.chunks("ram", Event.ADMITTED) > 0
    assert stack.tiers[RAM].used_bytes <= stack.tiers[RAM].capacity_bytes
