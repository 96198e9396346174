"""Admission: which newly computed chunks are given a place in RAM."""

from __future__ import annotations

from collections.abc import Sequence

from emberkv.core.counts import Event, Journal
from emberkv.core.evictions import Evictions
from emberkv.core.gates import Gates
from emberkv.core.residents import Resident, Residents
from emberkv.core.visits import Visit
from emberkv.domain.types import RAM, ChunkKey


class Admission:
    """Makes room in RAM and takes chunks in, head first, as far as they fit and may."""

    def __init__(
        self, tiers: Sequence[Residents], journal: Journal, evictions: Evictions, gates: Gates
    ) -> None:
        self._tiers = tiers
        self._journal = journal
        self._evictions = evictions
        self._gates = gates

    def admit(
        self, visit: Visit, keys: Sequence[ChunkKey], parent: ChunkKey | None
    ) -> list[Resident]:
        """Consecutive chunks, of which some may be there; returns the new ones, to be written."""
        ram = self._tiers[RAM]
        missing = [key for key in keys if key not in ram.entries]
        refused = self._refusal(visit, parent)
        if refused is not None:
            self._journal.note(refused, RAM, missing)
            return []
        self._evictions.left(RAM, ram.make_room(len(missing), visit.id, visit.tenant))
        fresh: list[ChunkKey] = []
        parents: list[ChunkKey | None] = []
        for key in keys:
            if key not in ram.entries:
                if len(fresh) == ram.free_count:
                    break
                fresh.append(key)
                parents.append(parent)
            parent = key
        if len(fresh) < len(missing):
            left_out = [key for key in keys if key not in ram.entries][len(fresh) :]
            crowded = Event.REFUSED_BY_QUOTA if ram.protected else Event.REFUSED_NO_ROOM
            self._journal.note(crowded, RAM, left_out)
        admitted = ram.insert(fresh, parents, visit.id)
        for resident in admitted:
            ram.own(resident, visit.tenant)
        if admitted:
            visit.tails[RAM] = fresh[-1]
            self._journal.note(Event.ADMITTED, RAM, fresh)
        return admitted

    def _refusal(self, visit: Visit, parent: ChunkKey | None) -> Event | None:
        """Why nothing of what a visit offers may be kept, if so."""
        if visit.hints.no_store or not visit.may_use(RAM):
            return Event.REFUSED_BY_HINT
        if not self._gates.stores(RAM):
            return Event.REFUSED_BY_GATE
        if parent is not None and not any(parent in tier.entries for tier in self._tiers):
            return Event.REFUSED_UNREACHABLE
        return None
