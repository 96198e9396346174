"""Arrivals: chunks of copies that have ended, well or badly, and chunks found at a start."""

from __future__ import annotations

from collections.abc import Sequence

from emberkv.core.counts import Event, Journal
from emberkv.core.evictions import Evictions
from emberkv.core.promotions import Promotions
from emberkv.core.residents import Resident, State
from emberkv.core.transfers import Transfers
from emberkv.core.visits import Visits, descends
from emberkv.core.write_behind import WriteBehind
from emberkv.domain.types import RAM, ChunkKey, Copy, Drop, Entry, Level, Outcome, TransferId


class Arrivals:
    """Accounts for what a driver reports."""

    def __init__(
        self,
        transfers: Transfers,
        promotions: Promotions,
        write_behind: WriteBehind,
        evictions: Evictions,
        journal: Journal,
    ) -> None:
        self._tiers = transfers.tiers
        self._transfers = transfers
        self._promotions = promotions
        self._write_behind = write_behind
        self._evictions = evictions
        self._journal = journal

    def done(
        self, transfer: TransferId, results: Sequence[tuple[int, Outcome]], ended_s: float
    ) -> list[Resident]:
        """Some chunks of a copy have ended; returns those now in RAM."""
        copy, stale = self._transfers.finish(transfer, results, ended_s)
        if stale:
            indices = [index for index, _ in results]
            self._tiers[copy.target].free_held([copy.target_slots[index] for index in indices])
            self._tiers[copy.source].free_held([copy.source_slots[index] for index in indices])
            return []
        arrived: list[Resident] = []
        for index, outcome in results:
            self._end_chunk(copy, index, outcome, arrived)
        if copy.target == RAM:
            return arrived
        self._write_behind.arrived(copy.target, arrived)
        return []

    def adopt(self, level: Level, entries: Sequence[Entry], visits: Visits) -> None:
        """Take in chunks that a tier still holds from an earlier run, oldest first."""
        run: list[Entry] = []
        coming: set[ChunkKey] = set()
        tier = self._tiers[level]
        for entry in entries:
            if run and entry.parent != run[-1].key:
                tier.adopt(run, visits.fresh_id())
                run = []
                coming.clear()
            above = run[0].parent if run else entry.parent
            known = entry.key in tier.entries or entry.key in coming
            if known or descends(tier, above, entry.key):
                self._evictions.add(Drop(level, (entry.key,), (entry.slot,)))
                tier.free_held((entry.slot,))
                continue
            run.append(entry)
            coming.add(entry.key)
        if run:
            tier.adopt(run, visits.fresh_id())

    def _end_chunk(self, copy: Copy, index: int, outcome: Outcome, arrived: list[Resident]) -> None:
        """Account for one ended chunk of a copy, whichever way it went."""
        key = copy.keys[index]
        source, target = self._tiers[copy.source], self._tiers[copy.target]
        resident = target.entries[key]
        upward = copy.target < copy.source
        if outcome is Outcome.OK:
            resident.state = State.READY
            event = Event.PROMOTED if upward else Event.WRITTEN_BEHIND
            self._journal.note(event, copy.target, (key,))
            arrived.append(resident)
        else:
            event = Event.PROMOTION_FAILED if upward else Event.WRITE_BEHIND_FAILED
            self._journal.note(event, copy.source if upward else copy.target, (key,))
            if upward:
                self._promotions.failed(key)
            self._evictions.drop(copy.target, [resident])
            target.lose(resident)
        origin = source.entries[key]
        if outcome in (Outcome.CORRUPT, Outcome.ABSENT) and origin.state is not State.LOST:
            self._journal.note(Event.LOST, copy.source, (key,))
            self._evictions.drop(copy.source, [origin])
            if copy.source == RAM:
                self._promotions.lost(key)
            source.lose(origin)
        source.unpin(origin)
        if outcome is not Outcome.OK:
            self._evictions.forget((key,))
