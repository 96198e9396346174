"""Between core and driver: effects are carried down, reports up, and the arena's headers kept."""

from __future__ import annotations

from collections.abc import Sequence

from emberkv.core.residents import Resident
from emberkv.core.stack import TierStack
from emberkv.domain.types import RAM, ChunkKey, Copy, Drop, Slot
from emberkv.live.driver import Driver
from emberkv.live.intake import Intake
from emberkv.observe.tally import Tally


class Carrier:
    """Hands the core's effects to a driver, and what the driver has done to the core."""

    def __init__(self, stack: TierStack, driver: Driver, tally: Tally) -> None:
        self._stack = stack
        self._driver = driver
        self._intake = Intake(stack, driver.arena, tally)
        self._tick = 0

    def drain(self, now_s: float) -> None:
        """Take note of everything the driver has done."""
        for report in self._driver.poll():
            arrived = self._intake.take(report, now_s)
            if arrived:
                self.mark_ready([resident.slot for resident in arrived])

    def carry_out(self) -> set[Slot]:
        """Hand the core's effects to the driver; returns the RAM slots being written behind."""
        copies: list[Copy] = []
        written: set[Slot] = set()
        arena = self._driver.arena
        for effect in self._stack.take_effects():
            if isinstance(effect, Drop):
                if effect.level == RAM:
                    arena.mark_free(effect.slots)
                continue
            copies.append(effect)
            if effect.target == RAM:
                arena.mark_writing(effect.target_slots, effect.keys, effect.parents)
            elif effect.source == RAM:
                written.update(effect.source_slots)
        if copies:
            self._driver.submit(copies)
        return written

    def forget(self) -> None:
        """Everything was reset: what the core left to do is not done, and all of RAM is free."""
        self._intake.reset()
        self._stack.take_effects()

    def free_all(self) -> None:
        """Say in the arena that no slot holds anything."""
        slots = range(self._stack.tiers[RAM].slot_count)
        self._driver.arena.mark_free([Slot(slot) for slot in slots])

    def mark_writing(self, residents: Sequence[Resident]) -> None:
        """The engine is about to write these."""
        if residents:
            self._driver.arena.mark_writing(*_columns(residents))

    def mark_ready(self, slots: Sequence[Slot]) -> None:
        """These hold what their headers say."""
        self._driver.arena.mark_ready(slots, self._ticks(len(slots)))

    def mark_used(self, slots: Sequence[Slot]) -> None:
        """The engine loads these."""
        self._driver.arena.mark_used(slots, self._ticks(len(slots)))

    def _ticks(self, count: int) -> int:
        """The first of `count` numbers that grow with time."""
        first = self._tick
        self._tick += count
        return first


def _columns(
    residents: Sequence[Resident],
) -> tuple[list[Slot], list[ChunkKey], list[ChunkKey | None]]:
    return (
        [resident.slot for resident in residents],
        [resident.key for resident in residents],
        [resident.parent for resident in residents],
    )
