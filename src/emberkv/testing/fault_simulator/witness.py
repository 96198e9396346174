"""A tier stack under observation: every call on it is held against naive books of its own.

The books are `emberkv.testing.toy_tiers.ToyTiers`, which know the rules and not the core's code.
Decisions go into a digest, so that two runs can be compared, and the last of them are remembered
in words, for whoever looks for a fault.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import Final

import xxhash

from emberkv.core.economy import Terms
from emberkv.core.gates import Gate
from emberkv.core.limits import Limits
from emberkv.core.residents import Resident, Residents
from emberkv.core.retention import Quotas
from emberkv.core.stack import TierStack
from emberkv.domain.types import (
    RAM,
    ChunkKey,
    Drop,
    Effect,
    Entry,
    Level,
    Outcome,
    RequestId,
    Slot,
    TransferId,
)
from emberkv.policy.eviction.base import EvictionPolicy
from emberkv.testing.fault_simulator.setting import Seen
from emberkv.testing.toy_requests import every_key, parent_of
from emberkv.testing.toy_tiers import ToyTiers

TAIL_LINES: Final = 40


class DecisionLog:
    """What was called and decided: a digest of all of it, and the last lines."""

    def __init__(self) -> None:
        self._digest = xxhash.xxh3_64()
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)

    def note(self, line: str) -> None:
        self._digest.update(line.encode())
        self.tail.append(line)

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()


class WitnessedStack(TierStack):
    """A tier stack that raises an `AssertionError` when it contradicts its own books."""

    log: DecisionLog
    seen: Seen

    def __init__(
        self,
        tiers: Sequence[Residents],
        limits: Limits,
        terms: Terms | None = None,
        quotas: Quotas | None = None,
    ) -> None:
        super().__init__(tiers, limits, terms, quotas)
        parents = {key: parent_of(key) for key in every_key()}
        self.toy = ToyTiers([tier.slot_count for tier in tiers], parents, limits.max_stall_s)
        self.changes = 0
        self._untaken = False
        self._admitted: list[Resident] = []
        self._taken_at_s = 0.0

    # ── calls ────────────────────────────────────────────────────────────────────────────────

    def promote(
        self,
        request: RequestId,
        keys: Sequence[ChunkKey],
        now_s: float,
        first_token: int = 0,
        step: int | None = None,
    ) -> None:
        self._begin(f"promote {request} {_names(keys)}", now_s)
        super().promote(request, keys, now_s, first_token, step)

    def look_ahead(
        self, request: RequestId, keys: Sequence[ChunkKey], now_s: float, first_token: int = 0
    ) -> None:
        self._begin(f"look ahead {request} {_names(keys)}", now_s)
        super().look_ahead(request, keys, now_s, first_token)

    def probe(self, request: RequestId, keys: Sequence[ChunkKey], now_s: float) -> None:
        self._begin(f"probe {request} {_names(keys)}", now_s)
        super().probe(request, keys, now_s)

    def waiting(self, request: RequestId, step: int, now_s: float) -> bool:
        goes_on = super().waiting(request, step, now_s)
        self._begin(f"waiting {request} {step}: {goes_on}", now_s)
        return goes_on

    def settle(self, now_s: float) -> None:
        self._begin("settle", now_s)
        super().settle(now_s)

    def offload(
        self,
        request: RequestId,
        keys: Sequence[ChunkKey],
        parent: ChunkKey | None,
        now_s: float,
        first_token: int = 0,
    ) -> list[Resident]:
        assert not self._admitted, "an admission whose effects nobody has taken"
        admitted = super().offload(request, keys, parent, now_s, first_token)
        self._begin(f"offload {request} {_names(keys)}: {_places(admitted)}", now_s)
        self._admitted += admitted
        return admitted

    def stored(
        self, request: RequestId, keys: Collection[ChunkKey], now_s: float
    ) -> list[Resident]:
        pending = set(self.pending_stores().get(request, ()))
        published = super().stored(request, keys, now_s)
        self._begin(f"stored {request}: {_places(published)}", now_s)
        assert {resident.key for resident in published} == pending.intersection(keys)
        for resident in published:
            self.toy.engine_wrote(resident.key)
        return published

    def load(
        self,
        request: RequestId,
        keys: Sequence[ChunkKey],
        now_s: float,
        first_token: int = 0,
    ) -> list[Resident]:
        residents = super().load(request, keys, now_s, first_token)
        self._begin(f"load {request}: {_places(residents)}", now_s)
        assert [resident.key for resident in residents] == list(keys)
        for resident in residents:
            self.toy.engine_reads(resident.key, resident.slot)
        return residents

    def loaded(self, request: RequestId, now_s: float) -> None:
        read, _ = self._loads.get(request, ([], now_s))
        super().loaded(request, now_s)
        self._begin(f"loaded {request}", now_s)
        for resident in read:
            self.toy.engine_has_read(resident.key, resident.slot)

    def scheduled(self, request: RequestId) -> None:
        self._begin(f"scheduled {request}")
        super().scheduled(request)

    def end(self, request: RequestId) -> None:
        self._begin(f"end {request}")
        super().end(request)

    def empty(self, level: Level) -> None:
        self._begin(f"empty {level}")
        super().empty(level)
        self._untaken = True

    def set_gate(self, level: Level, gate: Gate) -> None:
        self._begin(f"gate {level} {gate}")
        super().set_gate(level, gate)

    def set_policy(self, level: Level, policy: EvictionPolicy) -> None:
        self._begin(f"policy {level} {type(policy).__name__}")
        super().set_policy(level, policy)

    def take_effects(self) -> list[Effect]:
        effects = super().take_effects()
        self._untaken = False
        if effects:
            self.log.note(";".join(map(_effect, effects)))
        drops = [effect for effect in effects if isinstance(effect, Drop)]
        self.toy.carry_out(drops, self._taken_at_s)
        for resident in self._admitted:
            self.toy.engine_writes(resident.key, resident.slot)
        self._admitted.clear()
        self.toy.carry_out(effects[len(drops) :], self._taken_at_s)
        return effects

    def done(
        self, transfer: TransferId, results: Sequence[tuple[int, Outcome]], now_s: float
    ) -> list[Resident]:
        arrived = super().done(transfer, results, now_s)
        self._begin(f"done {transfer} {[(at, o.value) for at, o in results]}", now_s)
        if transfer in self.toy.transfers:  # else it was withdrawn before anyone had taken it
            for index, outcome in results:
                self.seen.note(outcome)
                assert self.toy.finish(transfer, index, outcome, now_s) is outcome
        for resident in arrived:
            assert self.toy.books[RAM][resident.key].ready
        return arrived

    def adopt(self, level: Level, entries: Sequence[Entry]) -> None:
        self._begin(f"adopt {level} {_names([entry.key for entry in entries])}")
        super().adopt(level, entries)
        for entry in entries:
            held = self.tiers[level].entries.get(entry.key)
            if held is not None and held.slot == entry.slot:
                self.toy.found(level, entry)

    def lose_tier(self, level: Level, hold: Sequence[Slot], now_s: float) -> None:
        self._begin(f"lose tier {level}", now_s)
        super().lose_tier(level, hold, now_s)
        self.toy.lose_tier(level)

    def reset(self) -> None:
        self._begin("reset")
        super().reset()
        self._admitted.clear()
        self.toy.reset(set(self.toy.transfers))

    def unfence(self) -> None:
        self._begin("unfence")
        self.toy.unfence()
        super().unfence()

    # ── what always holds ────────────────────────────────────────────────────────────────────

    def agrees(self, now_s: float) -> None:
        """Every chunk is where all that happened says it must be, once effects are taken."""
        if self._untaken:
            return
        present = {key for books in self.toy.books for key in books}
        present.update(key for tier in self.tiers for key in tier.entries)
        for key in present:
            says = TierStack.residence(self, key, now_s)
            should = self.toy.residence(key, now_s)
            assert says == should, f"{key!r} is in {should}, the stack says {says}"

    def _begin(self, line: str, now_s: float | None = None) -> None:
        self.changes += 1
        if now_s is not None:
            self._taken_at_s = now_s
        self.log.note(line)


def _names(keys: Sequence[ChunkKey]) -> str:
    return " ".join(key.hex() for key in keys)


def _places(residents: Sequence[Resident]) -> str:
    return " ".join(f"{resident.key.hex()}@{resident.slot}" for resident in residents)


def _effect(effect: Effect) -> str:
    if isinstance(effect, Drop):
        return f"drop {effect.level} {_names(effect.keys)} {effect.slots}"
    return (
        f"copy {effect.transfer} {effect.source}>{effect.target} {_names(effect.keys)} "
        f"{effect.source_slots} {effect.target_slots}"
    )
