"""A driver in the caller's own process: copies run when polled, in order, on real storages."""

from __future__ import annotations

import os
from collections.abc import Sequence

import xxhash

from emberkv.domain.types import RAM, Copy, Level, Outcome, Slot
from emberkv.live.arena import Arena, ArenaGeometry, create_memory
from emberkv.live.driver import CopyProgress, Found, Populated, Report
from emberkv.tiers.base import Record, SlotStorage


class InlineDriver:
    """Implements `Driver` without a keeper: for tests and measurements without an engine.

    `hold_back` keeps copies from running until it is set to False.
    """

    def __init__(self, geometry: ArenaGeometry, below: Sequence[SlotStorage] = ()) -> None:
        fd = create_memory(geometry)
        self._arena = Arena(fd, geometry)
        os.close(fd)
        self._below = tuple(below)
        self._copies: list[Copy] = []
        self.hold_back = False
        self._reports: list[Report] = [
            Populated(0, geometry.slot_count),
            Found(RAM, (), last=True),
        ]
        for level, storage in enumerate(self._below, start=1):
            self._reports.append(Found(Level(level), tuple(storage.entries()), last=True))

    @property
    def arena(self) -> Arena:
        return self._arena

    @property
    def slot_counts(self) -> tuple[int, ...]:
        below = [storage.slot_count for storage in self._below]
        return (self._arena.geometry.slot_count, *below)

    def submit(self, copies: Sequence[Copy]) -> None:
        self._copies += copies

    def seal(self, slots: Sequence[Slot]) -> None:
        """Nothing outlives this process."""

    def poll(self) -> list[Report]:
        reports, self._reports = self._reports, []
        if not self.hold_back:
            copies, self._copies = self._copies, []
            reports += [self._carry_out(copy) for copy in copies]
        return reports

    def reset(self) -> bool:
        self._empty(passing=True)
        return True

    def begin_reset(self) -> None:
        self._empty(passing=False)

    def _empty(self, *, passing: bool) -> None:
        for copy in self._copies:
            shed = tuple((index, Outcome.SHED) for index in range(len(copy.keys)))
            self._reports.append(CopyProgress(copy.transfer, shed, 0.0))
        self._copies = []
        for storage in self._below:
            storage.reset(passing=passing)

    @property
    def reset_is_owed(self) -> bool:
        return False

    def close(self, *, clean: bool) -> None:
        for storage in self._below:
            storage.close()

    def _carry_out(self, copy: Copy) -> CopyProgress:
        upward = copy.target == RAM
        storage = self._below[(copy.source if upward else copy.target) - 1]
        outer_slots = copy.source_slots if upward else copy.target_slots
        ram_slots = copy.target_slots if upward else copy.source_slots
        rows = [self._arena.row(slot) for slot in ram_slots]
        records = [
            Record(key, parent, slot, 0 if upward else xxhash.xxh3_64_intdigest(row))
            for key, parent, slot, row in zip(
                copy.keys, copy.parents, outer_slots, rows, strict=True
            )
        ]
        outcomes = storage.read(records, rows) if upward else storage.write(records, rows)
        return CopyProgress(copy.transfer, tuple(enumerate(outcomes)), 0.0)
