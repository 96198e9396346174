"""The guard by scenario: what it does to tiers that are slow, and to those that are not."""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import replace

import pytest
from guarded_server import CONFIG, GuardedServer, slow_disk

from emberkv.core.gates import DRAINING, OPEN, SHUT, Gate
from emberkv.core.guard import Budget, Cause, Guard, GuardConfig, Limit, Return, Signal
from emberkv.core.guard.guard import LOADS_OUT, Stage
from emberkv.domain.types import DISK, RAM, Level
from emberkv.errors import ConfigError

WINDOW_S = CONFIG.window_s


def causes(server: GuardedServer) -> list[Cause]:
    return [change.cause for change in server.changes]


def test_a_server_within_its_budget_is_left_alone() -> None:
    server = GuardedServer(lambda _now, _loads: 1.0)
    server.run(3600)
    assert server.changes == []


def test_a_slow_disk_loses_its_loads_and_keeps_its_stores() -> None:
    server = GuardedServer(slow_disk)
    (change,) = server.run(280)
    assert (change.level, change.gate, change.cause) == (DISK, LOADS_OUT, Cause.BREACH)
    assert change.at_s - 1000 >= WINDOW_S
    (evidence,) = change.evidence
    assert evidence.over == evidence.samples > CONFIG.min_samples
    assert evidence.p99_ratio == pytest.approx(3.0, rel=0.02)
    assert "ttft_p99 3.0" in change.reason
    assert "s, budget 1 s, 600 of 600 samples over" in change.reason
    assert "breach in 60 s" in change.reason


def test_a_disk_that_stays_slow_fails_each_trial_and_waits_longer_for_the_next() -> None:
    server = GuardedServer(slow_disk)
    server.run(30_000)
    assert causes(server)[:3] == [Cause.BREACH, Cause.COOLED_DOWN, Cause.TRIAL_FAILED]
    trials = [each for each in server.changes if each.cause is Cause.COOLED_DOWN]
    ends = [each for each in server.changes if each.gate == LOADS_OUT]
    waits = [round(b.at_s - a.at_s) for a, b in zip(ends, trials, strict=False)]
    assert waits[:4] == [300, 600, 1200, 2400]
    assert set(waits[4:]) == {3600}
    assert {each.gate.load_share for each in trials} == {0.05}
    assert server.guard.gate(RAM) == OPEN


def test_a_disk_that_recovers_comes_back_step_by_step() -> None:
    server = GuardedServer(lambda now, loads: slow_disk(now, loads) if now < 1100 else 0.5)
    server.run_until(lambda: len(server.changes) == 4)
    assert causes(server) == [
        Cause.BREACH,
        Cause.COOLED_DOWN,
        Cause.TRIAL_PASSED,
        Cause.TRIAL_PASSED,
    ]
    assert [each.gate for each in server.changes[1:]] == [Gate(0.05), Gate(0.25), OPEN]
    for passed in server.changes[2:]:
        assert passed.evidence[0].samples >= CONFIG.trial_samples
    assert server.run(5000) == []


def test_stores_and_then_ram_follow_while_the_breach_goes_on() -> None:
    """Writing alone makes everybody slow here, until nothing is written."""
    server = GuardedServer(lambda _now, _loads: 0.5)
    server.first_token = lambda _now, _loads: 2.0 if server.gates[DISK].stores else 0.5
    server.run_until(lambda: len(server.changes) == 2)
    assert [(each.level, each.gate) for each in server.changes] == [(DISK, LOADS_OUT), (DISK, SHUT)]
    assert causes(server) == [Cause.BREACH, Cause.BREACH_GOES_ON]
    server.run_until(lambda: len(server.changes) == 4)
    assert causes(server)[2:] == [Cause.COOLED_DOWN, Cause.BREACH]
    assert server.guard.gate(DISK) == SHUT
    assert server.guard.gate(RAM) == OPEN


def test_ram_is_taken_out_last() -> None:
    server = GuardedServer(lambda _now, loads: 2.0 if loads else 0.5)
    server.run_until(lambda: len(server.changes) == 3)
    assert [each.level for each in server.changes] == [DISK, DISK, RAM]
    assert server.guard.gate(RAM) == LOADS_OUT


def test_a_server_that_is_slow_by_itself_gets_its_tiers_back_and_it_is_said() -> None:
    server = GuardedServer(lambda _now, _loads: 2.0)
    server.run_until(lambda: len(server.changes) == 4)
    assert [each.gate for each in server.changes] == [LOADS_OUT, SHUT, LOADS_OUT, SHUT]
    assert server.guard.as_facts()["slow_without_tiers"] == []
    server.run_until(lambda: server.guard.gate(RAM) == server.guard.gate(DISK) == OPEN)
    back = server.changes[4:]
    assert [each.cause for each in back if each.gate.load_share == 0.05] == [
        Cause.NOT_THE_TIER,
        Cause.NOT_THE_TIER,
    ]
    assert [each.level for each in back] == [RAM] * 3 + [DISK] * 3
    said = server.guard.as_facts()["slow_without_tiers"]
    assert isinstance(said, list)
    assert said[0].startswith("ttft_p99 2")
    assert server.run(20_000) == []  # and they are not taken out again for the same slowness


def test_requests_on_trial_may_be_as_slow_as_the_others() -> None:
    """Bursts that everybody feels are no sustained breach, and fail no trial."""
    server = GuardedServer(slow_disk)
    server.run_until(lambda: bool(server.changes))
    server.first_token = lambda now, _loads: 5.0 if now % 60 < 8 else 0.5
    server.run_until(lambda: server.guard.gate(DISK) == OPEN)
    assert set(causes(server)[2:]) == {Cause.TRIAL_PASSED}
    assert server.changes[-1].evidence[0].p99_ratio > 1.0


def test_an_excuse_ends_when_the_budget_is_met_again() -> None:
    slow = True
    server = GuardedServer(lambda _now, loads: 2.0 if slow or DISK in loads else 0.5)
    server.run_until(lambda: server.guard.gate(DISK) == OPEN and len(server.changes) > 4)
    server.first_token = lambda _now, _loads: 0.5
    assert server.run(200) == []
    assert server.guard.as_facts()["slow_without_tiers"] == []
    server.first_token = slow_disk
    (change,) = server.run(100)
    assert (change.level, change.cause) == (DISK, Cause.BREACH)


def test_a_tier_slower_than_a_slow_server_is_still_found_out() -> None:
    server = GuardedServer(lambda _now, loads: 6.0 if DISK in loads else 2.0)
    server.run_until(lambda: Cause.TRIAL_FAILED in causes(server))
    assert server.changes[-1].level == DISK
    assert server.guard.gate(RAM) == OPEN


def test_by_hand_only_means_that_nothing_comes_back_alone() -> None:
    server = GuardedServer(slow_disk, replace(CONFIG, returns=Return.BY_HAND))
    server.run(20_000)
    assert causes(server) == [Cause.BREACH]
    server.first_token = lambda _now, _loads: 0.5
    server.guard.by_hand(DISK, OPEN, server.now_s)
    server.gates.set(DISK, OPEN)
    assert server.run(5000) == []
    assert [each.cause for each in server.guard.history] == [Cause.BREACH, Cause.BY_HAND]


def test_what_an_operator_has_set_is_left_alone() -> None:
    server = GuardedServer(slow_disk)
    server.guard.by_hand(DISK, DRAINING, server.now_s)
    server.gates.set(DISK, DRAINING)
    server.run_until(lambda: len(server.changes) == 2)
    assert {each.level for each in server.changes} == {RAM}
    assert server.guard.gate(DISK) == DRAINING
    assert server.guard.stage(DISK) is Stage.BY_HAND


def test_an_operator_ends_a_trial() -> None:
    server = GuardedServer(slow_disk)
    server.run_until(lambda: server.guard.stage(DISK) is Stage.ON_TRIAL)
    server.guard.by_hand(DISK, SHUT, server.now_s)
    server.gates.set(DISK, SHUT)
    assert server.run(10_000) == []


def test_an_idle_server_changes_nothing_and_gets_its_tier_back() -> None:
    server = GuardedServer(slow_disk)
    server.run_until(lambda: server.guard.gate(DISK) == LOADS_OUT)
    server.per_second = 0
    server.run_until(lambda: server.guard.gate(DISK) == OPEN)
    assert causes(server)[1:] == [Cause.COOLED_DOWN, Cause.TRIAL_QUIET, Cause.TRIAL_QUIET]
    assert server.run(20_000) == []


def test_too_few_samples_decide_nothing() -> None:
    server = GuardedServer(slow_disk, per_second=1)
    server.run(5000)
    assert server.changes == []


def test_one_burst_is_no_sustained_breach() -> None:
    """Ten seconds in which everything is slow, then nothing for long, again and again."""
    server = GuardedServer(lambda now, _loads: 5.0 if now % 300 < 10 else 0.5)
    assert server.run(10_000) == []


def test_a_share_over_budget_that_chance_explains_is_no_breach() -> None:
    """One in a hundred is what a 99th percentile means."""
    server = GuardedServer(lambda _now, _loads: 0.5)
    server.first_token = lambda _now, _loads: 2.0 if server.numbers.random() < 0.01 else 0.5
    assert server.run(50_000) == []
    server.first_token = lambda _now, _loads: 2.0 if server.numbers.random() < 0.05 else 0.5
    assert len(server.run(400)) >= 1


def test_a_break_of_the_clock_starts_the_window_anew() -> None:
    server = GuardedServer(slow_disk)
    server.run(55)
    server.now_s += 10_000
    assert server.run(59) == []
    assert len(server.run(10)) == 1


def test_a_break_during_a_trial_does_not_pass_it() -> None:
    server = GuardedServer(slow_disk)
    server.run_until(lambda: server.guard.stage(DISK) is Stage.ON_TRIAL)
    server.now_s += CONFIG.patience_s * 2
    server.per_second = 0
    assert server.run(WINDOW_S * 2) == []


def test_a_clock_that_goes_back_is_held() -> None:
    server = GuardedServer(slow_disk)
    server.run(30)
    server.now_s -= 500
    server.run(490)
    assert server.changes == []  # the guard's time has not moved
    server.run_until(lambda: bool(server.changes), 100)


def test_longer_prompts_are_no_slowdown_where_classes_have_budgets() -> None:
    limits = (Limit(1024, 0.2), Limit(8192, 2.0))
    guard = Guard(GuardConfig(budgets=(Budget(Signal.FIRST_TOKEN, limits),)), 2)
    now_s = 0.0
    for second in range(600):
        now_s = float(second)
        tokens, value_s = (500, 0.19) if second < 200 else (8000, 1.9)
        for _ in range(5):
            guard.observe(Signal.FIRST_TOKEN, value_s, now_s, context_tokens=tokens, on_trial=False)
            guard.observe(Signal.FIRST_TOKEN, 9.0, now_s, context_tokens=9000, on_trial=False)
            guard.observe(Signal.FIRST_TOKEN, 9.0, now_s, context_tokens=None, on_trial=False)
        assert guard.decide(now_s) == []
    (facts,) = guard.as_facts()["signals"]  # type: ignore[misc]
    assert facts["not_judged"] == 600 * 10
    assert facts["p99_ratio"] == pytest.approx(0.95, rel=0.011)
    for _ in range(100):
        now_s += 1
        for _ in range(5):
            guard.observe(Signal.FIRST_TOKEN, 0.3, now_s, context_tokens=500, on_trial=False)
        if change := guard.decide(now_s):
            break
    assert "x its budget by context length" in change[0].reason


def test_values_that_are_no_time_are_not_judged() -> None:
    guard = Guard(CONFIG, 1)
    for value_s in (math.nan, -1.0, math.inf, 0.0, 1e300):
        guard.observe(Signal.FIRST_TOKEN, value_s, 0.0, context_tokens=1, on_trial=False)
        guard.observe(Signal.INTER_TOKEN, value_s, 0.0, context_tokens=1, on_trial=False)
    assert guard.decide(1.0) == []
    (facts,) = guard.as_facts()["signals"]  # type: ignore[misc]
    assert facts["not_judged"] == 2


def test_facts_are_plain_values_at_every_stage() -> None:
    server = GuardedServer(slow_disk)
    json.dumps(server.guard.as_facts())
    for stage in (Stage.LOADS_OUT, Stage.ON_TRIAL):
        server.run_until(lambda stage=stage: server.guard.stage(DISK) is stage)  # type: ignore[misc]
        server.run(5)
        facts = json.loads(json.dumps(server.guard.as_facts(), allow_nan=False))
        assert facts["tiers"][1]["stage"] == stage.value
    assert facts["tiers"][1]["trial_samples"]["ttft_p99"]["others"] > 0
    assert [change["cause"] for change in facts["changes"]] == ["breach", "cooled_down"]


def test_memory_is_bounded_whatever_is_observed() -> None:
    guard = Guard(CONFIG, 2)
    sizes = []
    for second in range(3000):
        for step in range(5):
            guard.observe(
                Signal.FIRST_TOKEN,
                10.0 ** ((second * 5 + step) % 37 - 18),
                float(second),
                context_tokens=None,
                on_trial=bool(step % 2),
            )
        if second % 1000 == 999:
            sizes.append(len(pickle.dumps(guard)))
    assert max(sizes) < 1.2 * min(sizes)


def test_history_is_bounded() -> None:
    guard = Guard(CONFIG, 1)
    for second in range(1000):
        guard.by_hand(Level(0), SHUT if second % 2 else OPEN, float(second))
    assert len(guard.history) == 64


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"budgets": CONFIG.budgets * 2}, "one budget per signal"),
        ({"window_s": 1.0}, "window_s of the guard must be 5 seconds"),
        ({"cooldown_s": math.nan}, "cooldown_s"),
        ({"max_cooldown_s": 10.0}, "must not be less"),
        ({"min_samples": 5}, "min_samples"),
        ({"trial_shares": (0.5, 0.1)}, "must rise"),
        ({"trial_shares": (0.5, 1.0)}, "between 0 and 1"),
        ({"trial_shares": ()}, "must rise"),
    ],
)
def test_rules_that_can_not_hold_are_refused(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        replace(CONFIG, **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "limits",
    [(), (Limit(None, 0.0),), (Limit(None, math.inf),), (Limit(9, 1.0), Limit(9, 2.0))],
)
def test_budgets_that_can_not_hold_are_refused(limits: tuple[Limit, ...]) -> None:
    with pytest.raises(ConfigError):
        Budget(Signal.FIRST_TOKEN, limits)


def test_one_call_for_many_samples_is_as_good_as_many_calls() -> None:
    one, many = Guard(CONFIG, 2), Guard(CONFIG, 2)
    for second in range(120):
        value_s = 2.0 if second % 3 else 0.5
        one.observe(
            Signal.FIRST_TOKEN,
            value_s,
            float(second),
            context_tokens=None,
            on_trial=False,
            count=20,
        )
        for _ in range(20):
            many.observe(
                Signal.FIRST_TOKEN, value_s, float(second), context_tokens=None, on_trial=False
            )
        assert one.decide(float(second)) == many.decide(float(second))
    assert len(one.history) == 1
    assert one.as_facts() == many.as_facts()


def feed(guard: Guard, now_s: float, *, good: int, bad: int) -> None:
    for value_s, count in ((0.5, good), (9.0, bad)):
        guard.observe(
            Signal.FIRST_TOKEN, value_s, now_s, context_tokens=None, on_trial=False, count=count
        )


def test_what_was_seen_before_a_change_counts_no_more() -> None:
    """Though it lies in the same slice of time as the change."""
    guard = Guard(CONFIG, 2)
    for second in range(62):
        feed(guard, float(second), good=5, bad=0)
        assert guard.decide(float(second)) == []
    feed(guard, 61.5, good=0, bad=100_000)
    guard.by_hand(DISK, OPEN, 62.0)
    for second in range(62, 123):
        feed(guard, float(second), good=5, bad=int(second % 10 == 0))
        assert guard.decide(float(second)) == []


def waits_for_trials(server: GuardedServer) -> list[int]:
    """How long the disk was out before each of its trials."""
    out_s, waits = 0.0, []
    for change in server.guard.history:
        if change.level == DISK and change.gate.load_share == 0.0:
            out_s = change.at_s
        elif change.level == DISK and change.gate.load_share == CONFIG.trial_shares[0]:
            waits.append(round(change.at_s - out_s))
    return waits


def test_failures_are_forgiven_after_a_long_time_in_use() -> None:
    server = GuardedServer(slow_disk)
    server.run_until(lambda: waits_for_trials(server) == [300, 600, 1200])
    server.first_token = lambda _now, _loads: 0.5
    server.run_until(lambda: server.guard.gate(DISK) == OPEN)
    for in_use_s, wait_s in ((CONFIG.max_cooldown_s + 10, 300), (100, 600)):
        server.run(in_use_s)
        server.first_token = slow_disk
        server.run_until(lambda: server.guard.gate(DISK) == LOADS_OUT)
        server.first_token = lambda _now, _loads: 0.5
        server.run_until(lambda: server.guard.gate(DISK) == OPEN)
        assert waits_for_trials(server)[-1] == wait_s


def test_failures_are_forgiven_when_the_tiers_are_not_the_cause() -> None:
    server = GuardedServer(slow_disk)
    server.run_until(lambda: waits_for_trials(server) == [300, 600, 1200])
    server.first_token = lambda _now, _loads: 2.0
    server.run_until(lambda: server.guard.gate(RAM) == SHUT)
    shut_s = server.now_s
    server.run_until(lambda: server.guard.stage(RAM) is Stage.ON_TRIAL)
    assert server.now_s - shut_s == pytest.approx(CONFIG.cooldown_s, abs=2)
    server.run_until(lambda: server.guard.stage(DISK) is Stage.ON_TRIAL)
    # The disk, out for longer than its time by then, follows a window after RAM is back.
    assert server.changes[-1].at_s - server.changes[-2].at_s == pytest.approx(WINDOW_S, abs=2)
    assert server.now_s - shut_s < 1200


def test_failures_are_forgiven_by_hand() -> None:
    server = GuardedServer(slow_disk)
    server.run_until(lambda: waits_for_trials(server) == [300, 600, 1200])
    server.guard.by_hand(DISK, OPEN, server.now_s)
    server.gates.set(DISK, OPEN)
    server.run_until(lambda: len(waits_for_trials(server)) == 4)
    assert waits_for_trials(server)[-1] == 300
