"""What the driver reports, told to the core: copies that ended, chunks found, tiers up and down."""

from __future__ import annotations

import logging

from emberkv.core.residents import Resident
from emberkv.core.stack import TierStack
from emberkv.domain.types import RAM, Level, Slot
from emberkv.live.arena import Arena
from emberkv.live.driver import CopyProgress, Found, Populated, Report, TierDown, TierUp
from emberkv.observe.tally import Tally

logger = logging.getLogger(__name__)


class Intake:
    """Keeps slots out of use until their tier has named what it holds and RAM is backed.

    At start every slot of every tier is held: RAM slots once until populated, and each slot once
    until its tier has said whether it holds something from an earlier run.
    """

    def __init__(self, stack: TierStack, arena: Arena, tally: Tally) -> None:
        self._stack = stack
        self._arena = arena
        self._tally = tally
        self._unnamed: list[set[Slot]] = []
        self._stale: set[Level] = set()
        for level, tier in enumerate(stack.tiers):
            slots = [Slot(slot) for slot in range(tier.slot_count)]
            stack.hold(Level(level), slots)
            self._unnamed.append(set(slots))
        stack.hold(RAM, [Slot(slot) for slot in range(stack.tiers[RAM].slot_count)])

    def take(self, report: Report, now_s: float) -> list[Resident]:
        """Tell the core; returns chunks that have just arrived in RAM."""
        match report:
            case CopyProgress():
                copy = self._stack.transfers.copy_of(report.transfer)
                ended_s = now_s - report.age_s
                arrived = self._stack.done(report.transfer, report.results, ended_s)
                outcomes = tuple(outcome for _, outcome in report.results)
                chunk_bytes = self._stack.tiers[RAM].chunk_bytes
                self._tally.copied(copy, outcomes, chunk_bytes, report.busy_s)
                return arrived
            case Found():
                self._found(report)
            case Populated():
                slots = range(report.first_slot, report.first_slot + report.slot_count)
                self._stack.free_held(RAM, [Slot(slot) for slot in slots])
            case TierDown():
                self._down(report, now_s)
            case TierUp():
                logger.info("tier %d is back", report.level)
                self._tally.tier_up(report.level, up=True)
        return []

    def reset(self) -> None:
        """Whatever tiers have yet to name is from before, and not to be taken in."""
        self._stale = {Level(level) for level, slots in enumerate(self._unnamed) if slots}

    def _found(self, report: Found) -> None:
        unnamed = self._unnamed[report.level]
        stale = report.level in self._stale
        named = [] if stale else [entry for entry in report.entries if entry.slot in unnamed]
        unnamed.difference_update(entry.slot for entry in named)
        self._stack.adopt(report.level, named)
        if report.last:
            if report.level == RAM:
                self._arena.mark_free(sorted(unnamed))
            self._stack.free_held(report.level, sorted(unnamed))
            unnamed.clear()
            self._stale.discard(report.level)

    def _down(self, report: TierDown, now_s: float) -> None:
        """Empty a tier and hold all of it; every copy that touches it has been reported."""
        logger.error("tier %d is off: %s", report.level, report.reason)
        self._tally.tier_up(report.level, up=False, reason=report.reason)
        tier = self._stack.tiers[report.level]
        unnamed = self._unnamed[report.level]
        rest = [Slot(slot) for slot in range(tier.slot_count) if Slot(slot) not in unnamed]
        self._stack.lose_tier(report.level, rest, now_s)
        unnamed.update(rest)
