"""What can be asked of a running manager, with the manager and its core in this process."""

from __future__ import annotations

import math
import threading

import pytest
from operated_engine import CHUNK_TOKENS, operations_on, prompt, serve
from scripted_engine import (
    CHUNK_BYTES,
    DISK_SLOTS,
    RAM_SLOTS,
    A,
    B,
    C,
    Engine,
    chain,
)

from emberkv.app import stories
from emberkv.domain.types import DISK, RAM, TenantName
from emberkv.errors import ConfigError, UsageError
from emberkv.live.control.messages import (
    PurgeScope,
    StatusRequest,
)
from emberkv.live.driver import TierDown, TierUp
from emberkv.live.lookup import Lookup

HIT, RETRY, MISS = Lookup.HIT, Lookup.RETRY, Lookup.MISS


# ── status ───────────────────────────────────────────────────────────────────────────────────────


def test_status_tells_what_is_where_and_what_was_done() -> None:
    engine = Engine()
    operations = operations_on(engine)
    operations.facts["guard"] = lambda: {"state": "watching"}
    serve(engine, A, chain("x", 3))
    serve(engine, B, chain("x", 3))
    status = operations.answer(StatusRequest())
    ram, disk = status.tiers  # type: ignore[union-attr]
    assert (ram.name, ram.chunks, ram.used_bytes) == ("ram", 3, 3 * CHUNK_BYTES)
    assert (disk.name, disk.chunks, disk.capacity_bytes) == ("disk", 3, DISK_SLOTS * CHUNK_BYTES)
    assert (ram.gate, ram.up, ram.eviction_policy, ram.why_down) == ("on", True, "lru", None)
    assert operations.status().tokens_by_source == {"ram": 30, "computed": 36}
    assert operations.status().requests_by_reason == {"not_stored": 1, "whole": 1}
    assert operations.status().chunks_by_event["disk"]["written_behind"] == 3
    assert operations.status().copied_bytes == {"ram_to_disk": 3 * CHUNK_BYTES}
    assert operations.status().facts["guard"] == {"state": "watching"}
    assert "compute_s_per_1000_tokens" in operations.status().facts["costs"]
    nothing_asked = {"chunks_with_priority": 0, "sessions": 0, "over_quota": 0}
    assert operations.status().facts["retention"] == nothing_asked
    assert operations.status().limits["max_wait_s"] == 30.0
    assert operations.status().occurrences[0].event == "written_behind"


def test_totals_go_on_when_the_metrics_are_exported() -> None:
    engine = Engine()
    operations = operations_on(engine)
    for request in (A, B, C):
        serve(engine, request, chain("x", 3))
        engine.now_s += 2.0
        assert engine.manager.samples()
    assert operations.status().tokens_by_source == {"ram": 60, "computed": 39}


def test_status_shows_copies_under_way_and_who_waits() -> None:
    engine = Engine()
    operations = operations_on(engine)
    engine.on_disk(A, chain("x", 5))
    engine.manager.begin(B)
    engine.ask(B, chain("x", 5))
    engine.step()
    status = operations.status()
    assert (status.requests_here, status.requests_waiting) == (1, 1)
    assert (status.tiers[RAM].arriving_chunks, status.tiers[DISK].leaving_chunks) == (5, 5)
    engine.driver.end()
    engine.step()
    engine.ask(B, chain("x", 5))
    status = operations.status()
    assert (status.requests_waiting, status.waits.count) == (0, 1)
    assert status.waits.p50_s == status.waits.p99_s == status.waits.max_s
    assert status.waits.p50_s is not None
    assert status.waits.p50_s > 0


def test_a_tier_that_is_down_says_why() -> None:
    engine = Engine()
    operations = operations_on(engine)
    engine.say(TierDown(DISK, "the device is gone"))
    engine.step()
    assert operations.status().tiers[DISK].why_down == "the device is gone"
    engine.say(TierUp(DISK))
    engine.step()
    assert operations.status().tiers[DISK].up


# ── changing ─────────────────────────────────────────────────────────────────────────────────────


def test_purging_everything_waits_for_the_disk_and_leaves_nothing() -> None:
    engine = Engine()
    operations = operations_on(engine)
    serve(engine, A, chain("x", 3))
    polled = engine.driver.poll

    def confirm() -> list[object]:
        engine.driver.reset_is_owed = False
        return polled()  # type: ignore[return-value]

    engine.driver.poll = confirm  # type: ignore[method-assign,assignment]
    done = operations.purge(PurgeScope.ALL)
    assert done.undone is None
    assert engine.driver.resets == 1
    assert serve(engine, B, chain("x", 3)) == [MISS]


def test_a_purge_that_the_disk_does_not_confirm_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("emberkv.live.operations.DURABLE_S", 0.02)
    engine = Engine()
    operations = operations_on(engine)
    serve(engine, A, chain("x", 3))
    for scope in (PurgeScope.ALL, PurgeScope.DISK):
        assert "crash" in (operations.purge(scope).undone or "")


def test_purging_ram_leaves_the_disk() -> None:
    engine = Engine()
    operations = operations_on(engine)
    serve(engine, A, chain("x", 3))
    assert operations.purge(PurgeScope.RAM).what == "RAM is empty"
    assert serve(engine, B, chain("x", 3)) == [HIT] * 3
    assert engine.ended[-1].disk_tokens == 3 * CHUNK_TOKENS


def test_purging_ram_leaves_what_is_in_use() -> None:
    engine = Engine()
    operations = operations_on(engine)
    serve(engine, A, chain("x", 3))
    engine.manager.begin(B)
    engine.ask(B, chain("x", 3))
    engine.manager.prepare_load(B, chain("x", 2))
    engine.step()
    assert "2 chunks in use stay" in operations.purge(PurgeScope.RAM).what
    engine.manager.complete_load(B)


def test_purging_the_disk_leaves_ram_and_seals_it_again() -> None:
    engine = Engine()
    operations = operations_on(engine)
    serve(engine, A, chain("x", 3))
    engine.driver.sealed.clear()
    engine.driver.begin_reset = lambda: None  # type: ignore[method-assign]
    operations.purge(PurgeScope.DISK)
    assert operations.status().tiers[DISK].chunks == 0
    assert len(engine.driver.sealed) == 3
    assert serve(engine, B, chain("x", 3)) == [HIT] * 3


def test_nothing_that_was_answered_as_a_hit_goes_before_it_is_loaded() -> None:
    """A purge in the middle of a pass happens at its end."""
    engine = Engine()
    operations = operations_on(engine)
    keys = chain("x", 3)
    serve(engine, A, keys)
    engine.driver.begin_reset = lambda: None  # type: ignore[method-assign]
    engine.manager.begin(B)
    assert engine.ask(B, keys) == [HIT] * 3
    said: list[object] = []
    purging = threading.Thread(target=lambda: said.append(operations.purge(PurgeScope.ALL)))
    purging.start()
    while not engine.manager.turns._waiting:
        threading.Event().wait(0.001)
    assert len(engine.manager.prepare_load(B, keys)) == 3
    engine.step()
    purging.join()
    assert said
    engine.manager.complete_load(B)
    engine.manager.finish(B)
    assert serve(engine, C, keys) == [MISS]


def test_another_policy_keeps_what_is_there_in_its_order() -> None:
    engine = Engine()
    operations = operations_on(engine)
    serve(engine, A, chain("x", 4))
    serve(engine, B, chain("y", 4))
    before = list(engine.manager.stack.tiers[RAM].policy.victims())
    operations.set_policy("ram", "arc")
    assert list(engine.manager.stack.tiers[RAM].policy.victims()) == before
    assert operations.status().tiers[RAM].eviction_policy == "arc"
    serve(engine, C, chain("z", 4))
    explanation = operations.why_prompt(prompt("x", 4), None)
    assert "evicted from RAM by arc" in "".join(
        line for s in explanation.stretches for line in stories.history(s)
    )


def test_budgets_are_put_in_force_together_or_not_at_all() -> None:
    engine = Engine()
    operations = operations_on(engine)
    operations.set_budget({"max_wait_s": 0.03, "promotion_chunks": 100})
    assert operations.status().limits["max_wait_s"] == 0.03
    endless = ({"promotion_chunks": each} for each in (math.inf, math.nan))
    for wrong in ({"max_wait_s": 5.0, "nonsense": 1.0}, {"promotion_chunks": 1.5}, *endless):
        with pytest.raises(UsageError):
            operations.set_budget(wrong)
    for limit in (-1.0, math.inf, math.nan):
        with pytest.raises(ConfigError):
            operations.set_budget({"max_wait_s": 5.0, "max_stall_s": limit})
    assert operations.status().limits["max_wait_s"] == 0.03
    keys = chain("x", 3)
    engine.on_disk(A, keys)
    engine.manager.begin(B)
    engine.ask(B, keys)
    engine.step()
    passes = 0
    while engine.ask(B, keys)[0] is RETRY:
        engine.step()
        passes += 1
    assert 2 <= passes <= 6  # of 10 ms each; 30 s were in force before


@pytest.mark.parametrize("call", ["set_policy", "set_gate"])
def test_tiers_and_policies_that_are_not_there_are_named(call: str) -> None:
    operations = operations_on(Engine())
    with pytest.raises(UsageError, match="there are: ram, disk"):
        getattr(operations, call)("tape", "lru")
    with pytest.raises(UsageError, match="there are: lru, arc"):
        operations.set_policy("ram", "fifo")


def test_a_purge_spares_no_tenants_share() -> None:
    engine = Engine()
    operations = operations_on(engine)
    serve(engine, A, chain("x", 3))
    ram = engine.manager.stack.tiers[RAM]
    tenant = TenantName("a")
    for resident in ram.entries.values():
        ram.own(resident, tenant)
    ram.protected = {tenant: 3}
    assert ram.make_room(RAM_SLOTS, None) == []
    assert operations.purge(PurgeScope.RAM).what == "RAM is empty"
    assert ram.protected == {tenant: 3}
