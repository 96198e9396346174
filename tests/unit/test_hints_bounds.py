"""What hints can't do: fill memory, speak for another tenant, or be forgotten by a reset."""

from __future__ import annotations

import pytest
from hinted_stack import Play, always, chain
from scripted_engine import A, B, Engine

from emberkv.core.residents import DEFAULT_PRIORITY, PINNED
from emberkv.core.retention import MAX_STALE_ENDS, Quotas
from emberkv.domain.hints import Hints, read_hints
from emberkv.domain.types import DISK, RAM, Level, RequestId, TenantName
from emberkv.live.lookup import Lookup


@pytest.mark.parametrize("name", ["pin", "max_wait_ms", "priority"])
def test_a_number_too_large_to_divide_is_only_long(name: str) -> None:
    """JSON has no largest whole number; a hint must not end the engine's step."""
    number = 10**400
    value = {
        "pin": {"duration_ms": number},
        "max_wait_ms": number,
        "priority": {"priority": 50, "duration_ms": number},
    }[name]
    assert read_hints({name: value}).unusable == ()


def test_a_duration_asked_for_again_and_again_takes_no_memory() -> None:
    play = Play(8)
    for at in range(2 * MAX_STALE_ENDS):
        play.compute(chain("a", 4), always(90, 1e9))
        play.compute(chain("b", 2), always(90, 1e9 - 2.0 * at))  # each ends before the last
    assert len(play.stack.retention._ends) <= MAX_STALE_ENDS + 16


def test_a_duration_that_was_renewed_ends_with_the_last() -> None:
    play = Play(8)
    play.compute(chain("a", 2), always(90, 5.0))
    play.compute(chain("a", 2), always(90, 20.0))
    priorities = []
    for _ in range(24):
        priorities.append(play.stack.tiers[RAM].entries[chain("a", 1)[0]].priority)
        play.now_s += 1.0
        play.stack.settle(play.now_s)
    assert priorities[:18] == [90] * 18
    assert priorities[-1] == DEFAULT_PRIORITY


def test_a_session_remembers_nothing_that_was_not_kept() -> None:
    play = Play(8, 16)
    for at in range(50):
        play.compute(chain(f"long-{at}", 40), Hints(session="s"))
    resident = {key for tier in play.stack.tiers for key in tier.entries}
    assert set(play.stack.retention._session_of) <= resident


def test_made_up_tenants_are_forgotten_with_their_chunks() -> None:
    play = Play(8)
    for at in range(50):
        play.compute(chain(f"x-{at}", 8), Hints(tenant=f"tenant-{at}"))
    assert len(play.stack.tiers[RAM].by_tenant) == 1


def priorities(play: Play, name: str, count: int, level: Level = RAM) -> set[int]:
    return {play.stack.tiers[level].entries[key].priority for key in chain(name, count)}


def end_session(play: Play, hints: Hints) -> None:
    play.stack.begin(RequestId("ends"), hints, 16)
    play.stack.end(RequestId("ends"))


def test_nobody_ends_another_tenants_session() -> None:
    play = Play(8)
    play.compute(chain("v", 4), Hints(session="s", tenant="victim"))
    end_session(play, Hints(session="s", end_of_session=True, tenant="other"))
    assert priorities(play, "v", 4) == {DEFAULT_PRIORITY}
    end_session(play, Hints(session="s", end_of_session=True, tenant="victim"))
    assert priorities(play, "v", 4) == {0}


@pytest.mark.parametrize("plain_first", [False, True])
def test_the_end_of_a_session_takes_nothing_that_others_use(plain_first: bool) -> None:
    """A system prompt is in every session, and in requests that are in none."""
    play = Play(12)
    uses = [Hints(), Hints(session="s")]
    for hints in uses if plain_first else reversed(uses):
        play.compute(chain("shared", 4), hints)
    end_session(play, Hints(session="s", end_of_session=True))
    assert priorities(play, "shared", 4) == {DEFAULT_PRIORITY}


def test_no_tier_keeps_more_raised_chunks_than_its_share() -> None:
    """They leave RAM and stay raised below; there too others must find a place."""
    play = Play(8, 32, quotas=Quotas(raised_share=0.5))
    for at in range(16):
        play.compute(chain(f"greedy-{at}", 4), always(100))
        play.compute(chain(f"plain-{at}", 8))
    for tier in play.stack.tiers:
        raised = [r for r in tier.entries.values() if DEFAULT_PRIORITY < r.priority < PINNED]
        assert len(raised) <= tier.slot_count // 2
    assert priorities(play, "greedy-0", 4, DISK) == {100}


def test_what_may_not_be_stored_is_not_stored_after_a_reset_either() -> None:
    """A reset comes while the request runs; what it has said of itself still holds."""
    engine = Engine()
    engine.manager.begin(A, Hints(no_store=True, tenant="t"))
    assert engine.store(A, chain("a", 2)) == []
    engine.manager.reset()
    assert engine.store(A, chain("a", 4)) == []
    visit = engine.manager.stack.visits.of(A)
    assert visit.tenant == TenantName("t")
    engine.manager.finish(A)
    assert not engine.manager.stack.open_visits()


def test_no_more_is_loaded_than_a_hint_allows_after_a_wait_either() -> None:
    """Somebody else has the rest of the chain brought up meanwhile."""
    engine = Engine()
    keys = chain("a", 4)
    engine.on_disk(RequestId("first"), keys)
    engine.manager.begin(A, Hints(max_load_tokens=2))  # the rig's chunks are of one token
    engine.manager.begin(B)
    assert engine.ask(A, keys) == [Lookup.RETRY, Lookup.RETRY, Lookup.MISS]
    assert engine.ask(B, keys) == [Lookup.RETRY] * 4
    engine.step()
    engine.driver.end()
    engine.step()
    assert engine.ask(A, keys) == [Lookup.HIT, Lookup.HIT, Lookup.MISS]
    assert engine.ask(B, keys) == [Lookup.HIT] * 4
