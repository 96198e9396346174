"""Each rule of the core has teeth: a core that breaks it is caught by the suite.

Every mutant below breaks one rule in one place. The machine plays it with the examples of the
`ci` profile, drawn the same way every time, and must find it out.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
from hypothesis import HealthCheck, Phase, Verbosity, settings
from hypothesis.stateful import run_state_machine_as_test

from emberkv.core.arrivals import Arrivals
from emberkv.core.gates import Levels
from emberkv.core.leases import Lease
from emberkv.core.limits import Limits
from emberkv.core.promotions import Promotions
from emberkv.core.residents import Resident, Residents, State
from emberkv.core.stack import TierStack
from emberkv.core.transfers import Transfers
from emberkv.core.visits import Visit
from emberkv.core.write_behind import WriteBehind
from emberkv.domain.types import (
    RAM,
    ChunkKey,
    Copy,
    Level,
    Outcome,
    RequestId,
    Slot,
    TenantName,
    VisitId,
)
from emberkv.errors import EmberError
from emberkv.testing.stack_machine import StackMachine

Patch = pytest.MonkeyPatch
Mutation = Callable[[Patch], None]
MUTATIONS: dict[str, Mutation] = {}


def mutant(rule: int) -> Callable[[Mutation], Mutation]:
    def register(mutation: Mutation) -> Mutation:
        MUTATIONS[f"rule {rule}: {mutation.__name__}"] = mutation
        return mutation

    return register


@mutant(1)
def a_slot_is_not_given_back(patch: Patch) -> None:
    remove = Residents._remove

    def leak(self: Residents, resident: Resident) -> None:
        remove(self, resident)
        self._free.remove(resident.slot)

    patch.setattr(Residents, "_remove", leak)


@mutant(1)
def a_slot_is_given_away_while_an_old_copy_uses_it(patch: Patch) -> None:
    clear = Residents.clear
    patch.setattr(Residents, "clear", lambda self, hold: clear(self, []))
    patch.setattr(Residents, "free_held", lambda self, slots: None)


@mutant(2)
def the_policy_keeps_what_has_left(patch: Patch) -> None:
    patch.setattr(Residents, "_leave", Residents._remove)


@mutant(3)
def a_pinned_chunk_is_evicted(patch: Patch) -> None:
    make_room = Residents.make_room

    def blind(
        self: Residents,
        wanted_slots: int,
        visit: VisitId | None,
        tenant: TenantName | None = None,
    ) -> list[Resident]:
        pins = {resident: resident.pins for resident in self.entries.values()}
        for resident in pins:
            resident.pins = 0
        left = make_room(self, wanted_slots, visit, tenant)
        for resident, count in pins.items():
            resident.pins = count
        return left

    patch.setattr(Residents, "make_room", blind)


@mutant(3)
def a_target_is_ready_before_it_is_written(patch: Patch) -> None:
    start = Transfers.start

    def hasty(
        self: Transfers,
        source: Level,
        target: Level,
        run: Sequence[tuple[Resident, Slot]],
        now_s: float,
    ) -> None:
        start(self, source, target, run, now_s)
        for resident, _ in run:
            self.tiers[target].entries[resident.key].state = State.READY

    patch.setattr(Transfers, "start", hasty)


@mutant(4)
def a_parent_leaves_before_its_children(patch: Patch) -> None:
    make_room = Residents.make_room

    def childless(
        self: Residents,
        wanted_slots: int,
        visit: VisitId | None,
        tenant: TenantName | None = None,
    ) -> list[Resident]:
        children, self.children = self.children, {}
        for resident in self.entries.values():
            if resident.parent is not None:
                self.children[resident.parent] = 0
        left: list[Resident] = []
        patched = Residents._evict
        try:
            Residents._evict = lambda self, resident: None  # type: ignore[method-assign]
            left = make_room(self, wanted_slots, visit, tenant)
        finally:
            Residents._evict = patched  # type: ignore[method-assign]
            self.children = children
        for resident in left:
            self.policy.evict(resident.key)
            self._remove(resident)
        return left

    patch.setattr(Residents, "make_room", childless)


@mutant(5)
def chunks_are_copied_down_when_room_is_needed(patch: Patch) -> None:
    offload = TierStack.offload

    def cascade(
        self: TierStack,
        request: RequestId,
        keys: Sequence[ChunkKey],
        parent: ChunkKey | None,
        *when: float,
    ) -> list[Resident]:
        if len(self.tiers) > 1 and not self.tiers[RAM].free_count:
            for victim in list(self.tiers[RAM].entries.values()):
                if victim.state is State.READY and victim.key not in keys:
                    visit = self.visits.of_resident(RequestId(""), victim)
                    self.write_behind.write_run(visit, Level(1), [victim], when[0])
        return offload(self, request, keys, parent, *when)

    patch.setattr(TierStack, "offload", cascade)


@mutant(6)
def a_chunk_on_its_way_is_offered(patch: Patch) -> None:
    residence = TierStack.residence

    def early(
        self: TierStack, key: ChunkKey, now_s: float, levels: Levels | None = None
    ) -> Level | None:
        return RAM if key in self.tiers[RAM].entries else residence(self, key, now_s, levels)

    patch.setattr(TierStack, "residence", early)


@mutant(6)
def corrupt_bytes_are_published(patch: Patch) -> None:
    end_chunk = Arrivals._end_chunk

    def trusting(
        self: Arrivals, copy: Copy, index: int, outcome: Outcome, arrived: list[Resident]
    ) -> None:
        if outcome is Outcome.CORRUPT:
            outcome = Outcome.OK
        end_chunk(self, copy, index, outcome, arrived)

    patch.setattr(Arrivals, "_end_chunk", trusting)


@mutant(7)
def a_look_up_moves_bytes(patch: Patch) -> None:
    residence = TierStack.residence

    def eager(
        self: TierStack, key: ChunkKey, now_s: float, levels: Levels | None = None
    ) -> Level | None:
        level = residence(self, key, now_s, levels)
        if level is not None and level != RAM:
            self.visits.touch(self.visits.of(RequestId("look-up")), [key], None)
        return level

    patch.setattr(TierStack, "residence", eager)


@mutant(7)
def a_promotion_is_planned_chunk_by_chunk(patch: Patch) -> None:
    choose = Promotions._choose

    def one(
        self: Promotions, lease: Lease, allowed: int, now_s: float
    ) -> tuple[list[tuple[Level, Resident]], int]:
        return choose(self, lease, min(allowed, 1), now_s)

    patch.setattr(Promotions, "_choose", one)


@mutant(7)
def what_was_promised_is_not_pinned_until_it_is_loaded(patch: Patch) -> None:
    answer = Promotions._answer

    def forget(self: Promotions, lease: Lease) -> None:
        answer(self, lease)
        self._cut(lease, 0)

    patch.setattr(Promotions, "_answer", forget)


@mutant(7)
def a_lease_outlives_its_request(patch: Patch) -> None:
    patch.setattr(TierStack, "end", lambda self, request: self.visits.end(request))


@mutant(8)
def waiting_is_not_counted(patch: Patch) -> None:
    patch.setattr(Lease, "asked", lambda self, step, now_s: None)


@mutant(8)
def a_tier_that_has_stopped_is_waited_for(patch: Patch) -> None:
    patch.setattr(Transfers, "stalled", lambda self, level, now_s: False)


@mutant(9)
def writes_behind_are_unlimited(patch: Patch) -> None:
    write_run = WriteBehind.write_run

    def unbounded(
        self: WriteBehind, visit: Visit, level: Level, offered: Sequence[Resident], now_s: float
    ) -> None:
        limits = self._transfers.limits
        self._transfers.limits = Limits(1_000_000, limits.promotion_chunks)
        write_run(self, visit, level, offered, now_s)
        self._transfers.limits = limits

    patch.setattr(WriteBehind, "write_run", unbounded)


@mutant(9)
def promotions_are_unlimited(patch: Patch) -> None:
    plan = Promotions._plan

    def unbounded(self: Promotions, lease: Lease, now_s: float) -> None:
        limits = self._transfers.limits
        self._transfers.limits = Limits(limits.write_behind_chunks, 1_000_000)
        plan(self, lease, now_s)
        self._transfers.limits = limits

    patch.setattr(Promotions, "_plan", unbounded)


@mutant(10)
def slots_are_chosen_by_something_else(patch: Patch) -> None:
    enter = Residents._enter
    draws = itertools.count()

    def moody(
        self: Residents, key: ChunkKey, parent: ChunkKey | None, slot: Slot, visit: VisitId
    ) -> Resident:
        if self._free and next(draws) % 3 == 0:
            slot, self._free[0] = self._free[0], slot
        return enter(self, key, parent, slot, visit)

    patch.setattr(Residents, "_enter", moody)


@pytest.mark.parametrize("name", sorted(MUTATIONS))
def test_the_suite_catches(name: str, monkeypatch: Patch) -> None:
    MUTATIONS[name](monkeypatch)
    ci = settings(
        settings.get_profile("ci"),
        stateful_step_count=20,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        verbosity=Verbosity.quiet,
        print_blob=False,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    with pytest.raises((AssertionError, EmberError)):
        run_state_machine_as_test(StackMachine, settings=ci)


def test_every_rule_has_a_mutant() -> None:
    assert {int(name.split(":")[0].removeprefix("rule ")) for name in MUTATIONS} == {*range(1, 11)}
