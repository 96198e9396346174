"""Defects planted in core, manager and keeper, one at a time, for the fault simulator to find."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from emberkv.core.arrivals import Arrivals
from emberkv.core.promotions import Promotions
from emberkv.core.residents import Resident, Residents, State
from emberkv.core.stack import TierStack
from emberkv.core.transfers import Transfers
from emberkv.domain.types import RAM, ChunkKey, Copy, Level, Outcome, RequestId, Slot, TransferId
from emberkv.live.arena import Arena
from emberkv.live.carrier import Carrier
from emberkv.live.driver import CopyProgress
from emberkv.live.intake import Intake
from emberkv.live.keeper.client import KeeperClient
from emberkv.live.keeper.disk import DiskTier
from emberkv.live.keeper.messages import OUTCOMES, Progress
from emberkv.live.keeper.seals import Seals
from emberkv.live.keeper.tenancy import Tenancy
from emberkv.live.manager import TierManager

Patch = pytest.MonkeyPatch
Mutation = Callable[[Patch], None]
MUTATIONS: dict[str, Mutation] = {}


def mutant(mutation: Mutation) -> Mutation:
    MUTATIONS[mutation.__name__] = mutation
    return mutation


# ── core ─────────────────────────────────────────────────────────────────────────────────────────


@mutant
def a_copy_does_not_pin_its_source(patch: Patch) -> None:
    patch.setattr(Residents, "pin", lambda self, resident: None)
    patch.setattr(Residents, "unpin", lambda self, resident: False)


@mutant
def a_load_does_not_pin_what_it_reads(patch: Patch) -> None:
    load = TierStack.load

    def loose(self: TierStack, request: RequestId, *args: object) -> list[Resident]:
        found = load(self, request, *args)  # type: ignore[arg-type]
        self.tiers[RAM].unpin_run(found)
        self._loads[request] = [], 0.0
        return found

    patch.setattr(TierStack, "load", loose)


@mutant
def a_pin_is_never_given_back(patch: Patch) -> None:
    patch.setattr(Residents, "unpin_run", lambda self, residents: None)


@mutant
def a_lost_chunk_goes_while_it_is_read(patch: Patch) -> None:
    def lose(self: Residents, resident: Resident) -> None:
        if resident.key in self.entries:
            self.pinned_count -= resident.pins > 0
            self._leave(resident)

    patch.setattr(Residents, "lose", lose)


@mutant
def a_copy_goes_to_its_neighbours_slot(patch: Patch) -> None:
    start = Transfers.start

    def crossed(
        self: Transfers,
        source: Level,
        target: Level,
        run: Sequence[tuple[Resident, Slot]],
        now_s: float,
    ) -> None:
        slots = [slot for _, slot in run]
        turned = slots[1:] + slots[:1]
        pairs = [(resident, slot) for (resident, _), slot in zip(run, turned, strict=True)]
        start(self, source, target, pairs, now_s)

    patch.setattr(Transfers, "start", crossed)


@mutant
def a_promotion_is_started_twice(patch: Patch) -> None:
    start = Transfers.start

    def twice(
        self: Transfers,
        source: Level,
        target: Level,
        run: Sequence[tuple[Resident, Slot]],
        now_s: float,
    ) -> None:
        start(self, source, target, run, now_s)
        if target == RAM:
            start(self, source, target, run, now_s)

    patch.setattr(Transfers, "start", twice)


@mutant
def a_request_waits_until_all_is_there(patch: Patch) -> None:
    waiting = Promotions.waiting

    def stubborn(self: Promotions, request: RequestId, step: int, now_s: float) -> bool:
        lease = self.lease(request)
        keys = () if lease is None else lease.keys
        goes_on = waiting(self, request, step, now_s)
        return goes_on or not all(map(self._tiers[RAM].ready, keys))

    patch.setattr(Promotions, "waiting", stubborn)


@mutant
def a_lease_is_not_cut_when_a_chunk_fails(patch: Patch) -> None:
    patch.setattr(Promotions, "failed", lambda self, key: None)


@mutant
def a_copy_from_before_a_reset_counts(patch: Patch) -> None:
    finish = Transfers.finish

    def fresh(
        self: Transfers,
        transfer: TransferId,
        results: Sequence[tuple[int, Outcome]],
        ended_s: float,
    ) -> tuple[Copy, bool]:
        return finish(self, transfer, results, ended_s)[0], False

    patch.setattr(Transfers, "finish", fresh)


@mutant
def a_reset_does_not_fence_what_the_engine_touches(patch: Patch) -> None:
    reset = TierStack.reset

    def open_handed(self: TierStack) -> None:
        reset(self)
        self.unfence()

    patch.setattr(TierStack, "reset", open_handed)


@mutant
def a_reset_keeps_the_tiers_below(patch: Patch) -> None:
    reset = TierStack.reset

    def forgetful(self: TierStack) -> None:
        tiers, self.tiers = self.tiers, self.tiers[:1]
        reset(self)
        self.tiers = tiers

    patch.setattr(TierStack, "reset", forgetful)


@mutant
def a_failed_copy_counts_as_done(patch: Patch) -> None:
    end_chunk = Arrivals._end_chunk

    def hopeful(
        self: Arrivals, copy: Copy, index: int, outcome: Outcome, arrived: list[Resident]
    ) -> None:
        if outcome in (Outcome.FAILED, Outcome.FULL):
            outcome = Outcome.OK
        end_chunk(self, copy, index, outcome, arrived)

    patch.setattr(Arrivals, "_end_chunk", hopeful)


@mutant
def a_corrupt_source_is_kept(patch: Patch) -> None:
    end_chunk = Arrivals._end_chunk

    def lenient(
        self: Arrivals, copy: Copy, index: int, outcome: Outcome, arrived: list[Resident]
    ) -> None:
        if outcome is Outcome.CORRUPT:
            outcome = Outcome.FAILED
        end_chunk(self, copy, index, outcome, arrived)

    patch.setattr(Arrivals, "_end_chunk", lenient)


@mutant
def a_chunk_is_ready_once_it_is_admitted(patch: Patch) -> None:
    insert = Residents.insert

    def hasty(self: Residents, keys: Sequence[ChunkKey], *rest: object) -> list[Resident]:
        found = insert(self, keys, *rest)  # type: ignore[arg-type]
        for resident in found:
            resident.state = State.READY
        return found

    patch.setattr(Residents, "insert", hasty)


@mutant
def a_tier_that_is_lost_gives_its_slots_out_again(patch: Patch) -> None:
    clear = Residents.clear
    patch.setattr(
        TierStack, "lose_tier", lambda self, level, hold, now_s: clear(self.tiers[level], ())
    )


# ── manager ──────────────────────────────────────────────────────────────────────────────────────


@mutant
def what_a_tier_names_after_a_reset_is_taken_in(patch: Patch) -> None:
    patch.setattr(Intake, "reset", lambda self: None)


@mutant
def slots_are_used_before_their_tier_has_named_them(patch: Patch) -> None:
    init = Intake.__init__

    def hasty(self: Intake, stack: TierStack, arena: Arena, tally: object) -> None:
        init(self, stack, arena, tally)  # type: ignore[arg-type]
        for level in range(1, len(stack.tiers)):
            stack.free_held(Level(level), sorted(self._unnamed[level]))
            self._unnamed[level].clear()

    patch.setattr(Intake, "__init__", hasty)


@mutant
def a_preempted_request_is_answered_at_once(patch: Patch) -> None:
    begin_pass = TierManager._begin_pass

    def rash(self: TierManager, state: object, request: RequestId) -> None:
        state.may_run = False  # type: ignore[attr-defined]
        begin_pass(self, state, request)  # type: ignore[arg-type]

    patch.setattr(TierManager, "_begin_pass", rash)


@mutant
def a_waiting_request_is_told_of_hits(patch: Patch) -> None:
    from emberkv.live.lookup import Lookup

    lookup = TierManager.lookup

    def eager(self: TierManager, request: RequestId, key: ChunkKey) -> Lookup:
        answer = lookup(self, request, key)
        return Lookup.HIT if answer is Lookup.RETRY else answer

    patch.setattr(TierManager, "lookup", eager)


@mutant
def effects_of_a_store_are_left_behind(patch: Patch) -> None:
    carry_out = Carrier.carry_out

    def half(self: Carrier) -> set[Slot]:
        effects = self._stack.take_effects()
        self._stack.take_effects = lambda: effects[:-1]  # type: ignore[method-assign]
        try:
            return carry_out(self)
        finally:
            del self._stack.take_effects  # type: ignore[method-assign]

    patch.setattr(Carrier, "carry_out", half)


# ── keeper ───────────────────────────────────────────────────────────────────────────────────────


@mutant
def a_report_said_twice_counts_twice(patch: Patch) -> None:
    def trusting(self: KeeperClient, message: Progress) -> None:
        results = tuple(enumerate([OUTCOMES[code] for code in message.codes], message.first))
        self._open.pop(TransferId(message.transfer), None)
        self._reports.append(CopyProgress(TransferId(message.transfer), results, 0.0))

    patch.setattr(KeeperClient, "_progress", trusting)


@mutant
def copies_of_a_keeper_that_died_are_forgotten(patch: Patch) -> None:
    lost = KeeperClient._lost

    def silent(self: KeeperClient) -> None:
        self._open.clear()
        lost(self)

    patch.setattr(KeeperClient, "_lost", silent)


def _forget_that_weights_may_be_new(patch: Patch) -> None:
    """Without this the next engine would get nothing anyway."""
    reset = Tenancy.reset

    def forgetful(self: Tenancy, number: int, *, renewed: bool) -> None:
        reset(self, number, renewed=False)

    patch.setattr(Tenancy, "reset", forgetful)


@mutant
def a_reset_leaves_the_disk_as_it_is(patch: Patch) -> None:
    _forget_that_weights_may_be_new(patch)
    patch.setattr(
        DiskTier,
        "_reset_storage",
        lambda self, number, io, session, passing: self._was_reset(number, None, session),
    )


@mutant
def a_reset_leaves_ram_to_the_next_engine(patch: Patch) -> None:
    _forget_that_weights_may_be_new(patch)
    patch.setattr(Seals, "invalidate", lambda self: None)
    patch.setattr(Arena, "mark_free", lambda self, slots: None)


@mutant
def rows_are_taken_over_unverified(patch: Patch) -> None:
    from emberkv.live.keeper import seals

    def verify(self: Seals, on_batch: Callable[..., None]) -> None:
        slots = [Slot(s) for s in range(self._arena.geometry.slot_count)]
        ready = [s for s in slots if self._arena.headers["state"][s] == seals.READY]
        self._jobs.put(lambda: on_batch([self._arena.entry(s) for s in ready], False))
        self._jobs.put(lambda: on_batch([], True))

    patch.setattr(Seals, "verify", verify)
