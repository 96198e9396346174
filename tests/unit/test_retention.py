"""Priorities, pins, sessions and tenants: who leaves first, and who never."""

from __future__ import annotations

import pytest
from hinted_stack import TOKENS, Play, always, chain

from emberkv.core.counts import Event
from emberkv.core.gates import DRAINING, OPEN, SHUT, Gate
from emberkv.core.residents import PINNED
from emberkv.core.retention import TOOL_CALL_S, Quotas
from emberkv.domain.hints import Hints, TokenRange
from emberkv.domain.types import (
    DISK,
    RAM,
    RequestId,
    TenantName,
)
from emberkv.errors import ConfigError, UsageError
from emberkv.policy.eviction.lru import Lru


def test_low_priorities_leave_first_and_high_ones_last() -> None:
    play = Play(12)
    play.compute(chain("high", 4), always(90))
    play.compute(chain("plain", 4))
    play.compute(chain("low", 4), always(10))
    play.compute(chain("x", 4))
    assert not play.holds(chain("low", 1))
    assert play.holds(chain("high", 4))
    assert play.holds(chain("plain", 4))
    play.compute(chain("y", 4))
    assert not play.holds(chain("plain", 1))
    assert play.holds(chain("high", 4))


def test_a_priority_lasts_as_long_as_was_asked_for() -> None:
    play = Play(8)
    play.compute(chain("high", 4), always(90, 2.5))
    play.compute(chain("a", 4))
    play.compute(chain("b", 4))  # the third second
    assert play.holds(chain("high", 4))
    play.compute(chain("c", 4))
    assert not play.holds(chain("high", 1))


def test_a_priority_holds_for_the_tokens_it_names() -> None:
    play = Play(8)
    play.compute(chain("p", 4), Hints(priority=(TokenRange(0, 2 * TOKENS, 90),)))
    play.compute(chain("a", 4))
    play.compute(chain("b", 6))
    assert play.holds(chain("p", 2))
    assert not play.holds(chain("p", 3))


def test_low_priorities_are_not_written_down() -> None:
    play = Play(8, 16)
    play.compute(chain("low", 4), always(34))
    play.compute(chain("plain", 4), always(35))
    assert not play.stack.tiers[DISK].entries.keys() & set(chain("low", 4))
    assert play.holds(chain("plain", 4), DISK)
    assert play.counted(Event.REFUSED_BY_HINT, DISK) > 0


def test_a_priority_goes_down_with_its_chunk() -> None:
    play = Play(8, 8)
    play.compute(chain("high", 4), always(90))
    for name in "abcd":
        play.compute(chain(name, 4))
    assert play.holds(chain("high", 4), DISK)


def test_raised_priorities_have_a_quota() -> None:
    play = Play(8, quotas=Quotas(raised_share=0.5))
    play.compute(chain("greedy", 8), always(100))
    assert play.stack.retention.over_quota == 4
    play.compute(chain("x", 4))
    assert play.holds(chain("x", 4))


def test_a_pin_keeps_for_its_time_and_within_its_quota() -> None:
    play = Play(8, quotas=Quotas(pin_share=0.5))
    play.compute(chain("kept", 4), Hints(pin_s=2.5))
    play.compute(chain("more", 4), Hints(pin_s=60.0))
    assert play.stack.retention.over_quota == 4
    assert len(play.stack.tiers[RAM].ranked[PINNED]) == 4
    play.compute(chain("x", 8))
    assert play.holds(chain("kept", 4))
    assert play.holds(chain("x", 4))
    play.compute(chain("y", 8))
    assert not play.holds(chain("kept", 1))


def test_what_only_an_ended_session_has_used_leaves_first() -> None:
    play = Play(12)
    play.compute(chain("shared", 4), Hints(session="one"))
    play.compute(chain("shared", 4), Hints(session="two"))
    play.compute(chain("own", 4), Hints(session="one"))
    play.compute(chain("plain", 3))
    play.compute(chain("own", 4)[:1], Hints(session="one", end_of_session=True))
    play.compute(chain("x", 5))
    assert not play.holds(chain("own", 1))
    assert play.holds(chain("shared", 4))
    assert play.holds(chain("plain", 3))


def test_a_pending_tool_call_keeps_its_conversation() -> None:
    play = Play(8)
    play.compute(chain("agent", 4), Hints(tool_call_pending=True))
    for name in "abcd":
        play.compute(chain(name, 4))
    assert play.holds(chain("agent", 4))
    play.now_s += TOOL_CALL_S
    play.stack.settle(play.now_s)
    play.compute(chain("x", 8))
    assert not play.holds(chain("agent", 1))


def test_no_store_and_no_tiers_keep_nothing() -> None:
    play = Play(8, 8)
    assert play.compute(chain("a", 2), Hints(no_store=True)) == 0
    assert play.compute(chain("b", 2), Hints(tiers=frozenset())) == 0
    assert play.compute(chain("c", 2), Hints(tiers=frozenset({"ram"}))) == 2
    assert play.counted(Event.REFUSED_BY_HINT) == 4
    assert not play.stack.tiers[DISK].entries


def test_a_protected_share_is_pushed_out_by_nobody_else() -> None:
    a, b = TenantName("a"), TenantName("b")
    play = Play(16, quotas=Quotas(tenants=((a, 0.5), (b, 0.25))))
    play.compute(chain("a", 8), Hints(tenant="a"))
    for name in "uvwxyz":
        play.compute(chain(name, 8), Hints(tenant="b", priority=always(100).priority))
    assert play.holds(chain("a", 8))
    play.compute(chain("other", 8))
    assert play.holds(chain("a", 8))
    play.compute(chain("a2", 8), Hints(tenant="a"))
    assert not play.holds(chain("a", 1))


def test_what_is_beyond_a_share_can_be_pushed_out() -> None:
    play = Play(16, quotas=Quotas(tenants=((TenantName("a"), 0.25),)))
    play.compute(chain("a", 12), Hints(tenant="a"))
    assert play.compute(chain("x", 12)) == 12
    assert play.holds(chain("a", 4))


def test_nobody_orders_the_chunks_of_another_tenant() -> None:
    play = Play(8)
    play.compute(chain("a", 4), Hints(tenant="a"))
    play.compute(chain("a", 4), Hints(tenant="b", priority=always(0).priority))
    play.compute(chain("plain", 2))
    play.compute(chain("x", 2))
    assert play.holds(chain("a", 4))


@pytest.mark.parametrize(
    "quotas",
    [
        {"pin_share": 1.0},
        {"raised_share": -0.1},
        {"offload_min_priority": 101},
        {"tenants": (("a", 0.5), ("b", 0.5))},
        {"tenants": (("a", -0.5),)},
    ],
)
def test_quotas_that_leave_nothing_are_refused(quotas: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        Quotas(**quotas)  # type: ignore[arg-type]


def test_a_draining_tier_serves_and_takes_nothing_in() -> None:
    play = Play(4, 16)
    play.compute(chain("a", 4))
    play.stack.set_gate(DISK, DRAINING)
    play.compute(chain("b", 4))
    assert not play.stack.tiers[DISK].entries.keys() & set(chain("b", 4))
    key = chain("a", 1)[0]
    levels = play.stack.open_levels(RequestId("q"))
    assert play.stack.residence(key, play.now_s, levels) == DISK
    play.stack.set_gate(DISK, SHUT)
    levels = play.stack.open_levels(RequestId("q2"))
    assert play.stack.residence(key, play.now_s, levels) is None
    play.stack.set_gate(DISK, OPEN)
    assert play.stack.open_levels(RequestId("q3")) is None


def test_a_shut_ram_shuts_everything() -> None:
    play = Play(4, 16)
    play.compute(chain("a", 4))
    play.stack.set_gate(RAM, SHUT)
    assert play.stack.open_levels(RequestId("q")) == frozenset()
    assert play.compute(chain("b", 4)) == 0
    assert play.counted(Event.REFUSED_BY_GATE) == 4


@pytest.mark.parametrize("share", [0.05, 0.25, 0.5, 0.75])
def test_a_share_of_requests_is_let_in_evenly_and_for_good(share: float) -> None:
    play = Play(4, 16)
    play.stack.set_gate(DISK, Gate(load_share=share))
    let_in = []
    for at in range(400):
        request = RequestId(f"q{at}")
        levels = play.stack.open_levels(request)
        assert levels == play.stack.open_levels(request)
        let_in.append(levels is not None and DISK in levels)
        play.stack.end(request)
    assert sum(let_in) == pytest.approx(400 * share, abs=1)
    longest = max(map(len, "".join("10"[not each] for each in let_in).split("1")))
    assert longest <= 1 / share + 1


def test_a_share_that_is_none_is_refused() -> None:
    with pytest.raises(UsageError):
        Gate(load_share=1.5)


def test_emptying_a_tier_leaves_what_is_in_use() -> None:
    play = Play(8, 16)
    play.compute(chain("a", 4))
    request = RequestId("loading")
    play.stack.load(request, chain("a", 2), play.now_s)
    play.stack.empty(RAM)
    assert play.holds(chain("a", 2))
    assert not play.holds(chain("a", 3))
    play.stack.loaded(request, play.now_s)
    play.stack.empty(RAM)
    assert not play.stack.tiers[RAM].entries
    assert play.holds(chain("a", 4), DISK)


def test_another_policy_takes_the_order_over() -> None:
    play = Play(8)
    play.compute(chain("a", 4))
    play.compute(chain("b", 4))
    before = list(play.stack.tiers[RAM].policy.victims())
    play.stack.set_policy(RAM, Lru(8))
    assert list(play.stack.tiers[RAM].policy.victims()) == before
    play.compute(chain("c", 4))
    assert not play.holds(chain("a", 1))
    assert play.holds(chain("b", 4))
