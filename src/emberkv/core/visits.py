"""Visits: one request's pass over its chain, with all that it has said of itself."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from emberkv.core.residents import Resident, Residents
from emberkv.domain.hints import NO_HINTS, Hints
from emberkv.domain.types import (
    RAM,
    TIER_NAMES,
    ChunkKey,
    Level,
    RequestId,
    TenantName,
    VisitId,
)


@dataclass(slots=True)
class Visit:
    """A request's id in the policies, the last chunk it used per tier, and its hints."""

    id: VisitId
    hints: Hints = NO_HINTS
    tails: dict[Level, ChunkKey] = field(default_factory=dict)

    @property
    def tenant(self) -> TenantName | None:
        return None if self.hints.tenant is None else TenantName(self.hints.tenant)

    def may_use(self, level: Level) -> bool:
        """Whether the request's hints let it use a tier; RAM goes with any other."""
        named = self.hints.tiers
        if named is None:
            return True
        return bool(named) if level == RAM else TIER_NAMES[level] in named


class Visits:
    """The visits of requests that are there, or whose last chunks are still being written."""

    def __init__(self, tiers: Sequence[Residents]) -> None:
        self._tiers = tiers
        self._visits: dict[RequestId, Visit] = {}
        self._next = 0

    def begin(self, request: RequestId, hints: Hints) -> None:
        """A request has come, and says this of itself."""
        self.of(request).hints = hints

    def of(self, request: RequestId) -> Visit:
        """The request's visit, begun if need be."""
        visit = self._visits.get(request)
        if visit is None:
            visit = self._visits[request] = Visit(self.fresh_id())
        return visit

    def find(self, request: RequestId) -> Visit | None:
        return self._visits.get(request)

    def of_resident(self, request: RequestId, resident: Resident) -> Visit:
        """The request's visit, or after its end the one that its chunks were last used by."""
        return self._visits.get(request) or Visit(resident.visit)

    def end(self, request: RequestId) -> None:
        self._visits.pop(request, None)

    def begin_anew(self, ended: Collection[RequestId]) -> None:
        """Every tier is empty; what requests have said of themselves holds until they end."""
        for request in ended:
            self.end(request)
        for visit in self._visits.values():
            visit.tails.clear()

    def requests(self) -> Collection[RequestId]:
        return self._visits.keys()

    def fresh_id(self) -> VisitId:
        self._next += 1
        return VisitId(self._next)

    def touch(self, visit: Visit, keys: Sequence[ChunkKey], parent: ChunkKey | None) -> None:
        """Note in every tier that a visit used `keys` and, the first time, all that leads there."""
        for level, tier in enumerate(self._tiers):
            entries = tier.entries
            used = [resident for resident in map(entries.get, keys) if resident is not None]
            before = parent if parent is not None else (used[0].parent if used else None)
            partly = len(used) != len(keys)
            if before is not None and visit.tails.get(Level(level)) != before:
                partly = True
                used = _ancestors(tier, before, visit.id) + used
            for resident in used:
                resident.visit = visit.id
            if used:
                tier.policy.hit([r.key for r in used] if partly else keys, visit.id)
                visit.tails[Level(level)] = used[-1].key
            else:
                tier.policy.renew(visit.id)


def _ancestors(tier: Residents, key: ChunkKey, visit: VisitId) -> list[Resident]:
    """The resident chunks from `key` up to the chain's head, head first."""
    found: list[Resident] = []
    at: ChunkKey | None = key
    while at is not None:
        resident = tier.entries.get(at)
        if resident is None or resident.visit == visit:
            break
        found.append(resident)
        at = resident.parent
    found.reverse()
    return found


def descends(tier: Residents, key: ChunkKey | None, ancestor: ChunkKey) -> bool:
    """Whether `ancestor` leads to `key`: a record that says so of itself is wrong."""
    if key == ancestor:
        return True
    if ancestor not in tier.children:
        return False
    at = key
    while at is not None and at != ancestor:
        resident = tier.entries.get(at)
        at = resident.parent if resident is not None else None
    return at is not None
