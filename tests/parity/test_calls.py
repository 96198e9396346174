"""Same calls, same decisions: a log of calls replays to itself on a fresh stack."""

from __future__ import annotations

import json
from random import Random

import pytest

from emberkv.core.stack import TierStack
from emberkv.errors import UsageError
from emberkv.sim.calls import RecordedStack, replay_calls
from emberkv.sim.replay import Replay, ReplayPlan, TierPlan, build_stack
from emberkv.sim.traces import TraceRequest
from emberkv.testing.stack_player import Shape, StackPlayer
from emberkv.testing.toy_requests import chain_of


@pytest.mark.parametrize("seed", range(8))
def test_a_random_log_replays_to_itself(seed: int) -> None:
    shape = Shape((3, 8, 6), ("lru", "arc", "lru"), 4, 4)
    player = StackPlayer(TierStack, shape)
    player.bustle(Random(seed), 150)
    assert len(player.log) > 30
    assert list(replay_calls(player.log)) == player.log


def test_the_log_of_a_simulation_replays_to_itself() -> None:
    plan = ReplayPlan((TierPlan(6), TierPlan(12, "arc")), tokens_per_chunk=1)
    stack = build_stack(plan, RecordedStack)
    assert isinstance(stack, RecordedStack)
    log: list[str] = []
    stack.record_to(log.append)
    random = Random(7)
    paths = [[random.randrange(2) for _ in range(random.randint(1, 5))] for _ in range(60)]
    result = Replay(plan, stack).run(
        TraceRequest(0.1 * number, len(path), 1, tuple(chain_of(path)))
        for number, path in enumerate(paths)
    )
    assert min(result.hit_tokens) > 0
    assert {json.loads(line)[0] for line in log} >= {"residence", "promote", "waiting", "done"}
    assert list(replay_calls(log)) == log


def test_another_decision_shows() -> None:
    log: list[str] = []
    stack = build_stack(ReplayPlan((TierPlan(4),), 1), RecordedStack)
    assert isinstance(stack, RecordedStack)
    stack.record_to(log.append)
    stack.offload(*OFFLOAD)
    wrong = [log[0], log[1].replace(",0]]]", ",3]]]")]
    assert wrong != log
    assert list(replay_calls(wrong)) == log


OFFLOAD = ("r", chain_of([1]), None, 0.0)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{}",
        '["stack"]',
        '["__init__",{},null]',
        '["record_to",{},null]',
        '["offload",{"request":"r"},null]',
        '["residence",{"key":"xyz","now_s":0},null]',
    ],
)
def test_a_line_that_is_none_is_named(line: str) -> None:
    log: list[str] = []
    stack = build_stack(ReplayPlan((TierPlan(4),), 1), RecordedStack)
    assert isinstance(stack, RecordedStack)
    stack.record_to(log.append)
    with pytest.raises(UsageError, match="line 2 is not"):
        list(replay_calls([*log, line]))
