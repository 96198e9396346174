"""Retention: what requests have said of how long chunks matter, within what they may say.

Priorities are TensorRT-LLM's: 0 to 100, 35 where nothing is said and again when a duration is
over. What is below `offload_min_priority` is not written down a tier: it goes straight to
eviction. A pin keeps a chunk in RAM for a limited time. Both are bounded by quotas, and a chunk
that belongs to a tenant takes orders only from requests of that tenant.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from emberkv.core.residents import PINNED, Resident, Residents
from emberkv.domain.hints import DEFAULT_PRIORITY, MAX_PRIORITY, Hints
from emberkv.domain.types import RAM, ChunkKey, Level, TenantName
from emberkv.errors import ConfigError

TOOL_CALL_PRIORITY: Final = 80
TOOL_CALL_S: Final = 120.0
MAX_SESSIONS: Final = 10_000
MAX_STALE_ENDS: Final = 1024
"""Ends that were put off or forgotten, and not yet cleared away."""

SessionId = tuple[TenantName | None, str]
"""Each tenant has sessions of its own, by whatever name."""

SHARED: Final[SessionId] = (None, "")
"""The session of a chunk that others have used too; no session may be named so."""


@dataclass(frozen=True, slots=True)
class Quotas:
    """How much of each tier hints may keep from others.

    `tenants` name the share of each tier that nobody else can push out.
    """

    pin_share: float = 0.25
    raised_share: float = 0.5
    offload_min_priority: int = DEFAULT_PRIORITY
    tenants: tuple[tuple[TenantName, float], ...] = ()

    def __post_init__(self) -> None:
        for name, share in (("pin_share", self.pin_share), ("raised_share", self.raised_share)):
            if not 0.0 <= share <= 0.9:
                raise ConfigError(f"{name} must be from 0 to 0.9, got {share}")
        if not 0 <= self.offload_min_priority <= MAX_PRIORITY:
            raise ConfigError(f"offload_min_priority must be from 0 to {MAX_PRIORITY}")
        if any(share < 0 for _, share in self.tenants):
            raise ConfigError("a tenant's protected share must not be negative")
        if sum(share for _, share in self.tenants) > 0.9:
            raise ConfigError("the tenants' protected shares must not exceed 0.9 together")


@dataclass(slots=True)
class _Keep:
    """What holds for one chunk beyond the default, and until when; None is for good."""

    priority: int = DEFAULT_PRIORITY
    until_s: float | None = None
    pinned_until_s: float = 0.0
    due_s: float | None = None  # the next end that is waited for

    def next_end_s(self) -> float | None:
        ends = [each for each in (self.until_s, self.pinned_until_s) if each]
        return min(ends, default=None)


@dataclass(slots=True)
class _Session:
    keys: dict[ChunkKey, None] = field(default_factory=dict)


class Retention:
    """What is kept for longer or shorter than the policy would; orders the tiers' residents."""

    def __init__(self, tiers: Sequence[Residents], quotas: Quotas) -> None:
        self._tiers = tiers
        self.quotas = quotas
        self._keeps: dict[ChunkKey, _Keep] = {}
        self._ends: list[tuple[float, int, ChunkKey]] = []
        self._order = count()
        self._session_of: dict[ChunkKey, SessionId] = {}
        self._sessions: OrderedDict[SessionId, _Session] = OrderedDict()
        self.over_quota = 0
        for tier in tiers:
            tier.protected = {
                name: int(share * tier.slot_count) for name, share in quotas.tenants if share
            }

    def apply(
        self,
        hints: Hints,
        keys: Sequence[ChunkKey],
        ends: range,
        now_s: float,
        fresh: Collection[ChunkKey] = (),
    ) -> None:
        """A request with these hints has used chunks that end at these tokens, and made `fresh`."""
        tenant = None if hints.tenant is None else TenantName(hints.tenant)
        session = None if hints.session is None else (tenant, hints.session)
        if session is not None or self._session_of:
            self._note_session(session, keys, fresh)
        tool_call = hints.tool_call_pending
        if not hints.priority and hints.pin_s is None and not tool_call:
            return
        for key, end in zip(keys, ends, strict=True):
            if not self._may_order(key, tenant):
                continue
            wish = _wish(hints, end - ends.step, end)
            if wish is not None:
                until_s = None if wish[1] is None else now_s + wish[1]
                self._set(key, wish[0], until_s)
            if hints.pin_s is not None:
                self._pin(key, now_s + hints.pin_s)

    def dress(self, level: Level, pairs: Iterable[tuple[Resident, Resident]]) -> None:
        """Chunks have entered a tier as copies: (new, what it was copied from)."""
        tier = self._tiers[level]
        for fresh, source in pairs:
            if source.tenant is not None:
                tier.own(fresh, source.tenant)
            if fresh.key in self._keeps:
                self._rank(level, fresh)

    def descends(self, resident: Resident) -> bool:
        """Whether a chunk is worth a place below RAM."""
        return resident.priority >= self.quotas.offload_min_priority

    def expire(self, now_s: float) -> None:
        """Give up what has lasted as long as was asked for. O(what ends)."""
        while self._ends and self._ends[0][0] <= now_s:
            at_s, _, key = heapq.heappop(self._ends)
            keep = self._keeps.get(key)
            if keep is None or keep.due_s != at_s:
                continue
            keep.due_s = None
            if keep.until_s is not None and keep.until_s <= now_s:
                keep.priority, keep.until_s = DEFAULT_PRIORITY, None
            if keep.pinned_until_s <= now_s:
                keep.pinned_until_s = 0.0
            if keep.priority == DEFAULT_PRIORITY and not keep.pinned_until_s:
                del self._keeps[key]
            else:
                self._await_end(key, keep)
            self._rank_everywhere(key)

    def end_session(self, tenant: TenantName | None, name: str) -> None:
        """A tenant's session is over: what only it has used leaves first."""
        session = (tenant, name)
        ended = self._sessions.pop(session, None)
        if ended is None:
            return
        for key in ended.keys:
            if self._session_of.pop(key, None) == session:
                self._set(key, 0, None)

    def forget(self, keys: Iterable[ChunkKey]) -> None:
        """Chunks have left a tier: what was said of those that are nowhere now is forgotten."""
        if not self._keeps and not self._session_of:
            return
        for key in keys:
            if any(key in tier.entries for tier in self._tiers):
                continue
            self._keeps.pop(key, None)
            session = self._session_of.pop(key, None)
            if session is not None and session in self._sessions:
                self._sessions[session].keys.pop(key, None)

    def clear(self) -> None:
        """Every tier has been emptied."""
        self._keeps.clear()
        self._ends.clear()
        self._session_of.clear()
        self._sessions.clear()

    def facts(self) -> Mapping[str, int]:
        """What hints keep, and how often a quota refused them a higher priority or a pin."""
        return {
            "chunks_with_priority": len(self._keeps),
            "sessions": len(self._sessions),
            "over_quota": self.over_quota,
        }

    # ── inner ────────────────────────────────────────────────────────────────────────────────

    def _may_order(self, key: ChunkKey, tenant: TenantName | None) -> bool:
        resident = self._tiers[RAM].entries.get(key)
        return resident is not None and resident.tenant in (None, tenant)

    def _set(self, key: ChunkKey, priority: int, until_s: float | None) -> None:
        if priority > DEFAULT_PRIORITY and not self._fits_raised(key):
            self.over_quota += 1
            return
        keep = self._keeps.setdefault(key, _Keep())
        keep.priority, keep.until_s = priority, until_s
        self._await_end(key, keep)
        if priority == DEFAULT_PRIORITY and not keep.pinned_until_s:
            del self._keeps[key]
        self._rank_everywhere(key)

    def _pin(self, key: ChunkKey, until_s: float) -> None:
        ram = self._tiers[RAM]
        pinned = ram.ranked.get(PINNED, {})
        if key not in pinned and len(pinned) >= int(self.quotas.pin_share * ram.slot_count):
            self.over_quota += 1
            return
        keep = self._keeps.setdefault(key, _Keep())
        keep.pinned_until_s = max(keep.pinned_until_s, until_s)
        self._await_end(key, keep)
        self._rank_everywhere(key)

    def _await_end(self, key: ChunkKey, keep: _Keep) -> None:
        """See to it that `expire` comes to a chunk when something of it ends."""
        end_s = keep.next_end_s()
        if end_s is None or (keep.due_s is not None and keep.due_s <= end_s):
            return
        keep.due_s = end_s
        heapq.heappush(self._ends, (end_s, next(self._order), key))
        if len(self._ends) > 2 * len(self._keeps) + MAX_STALE_ENDS:
            self._ends = [
                (each.due_s, next(self._order), name)
                for name, each in self._keeps.items()
                if each.due_s is not None
            ]
            heapq.heapify(self._ends)

    def _fits_raised(self, key: ChunkKey) -> bool:
        ram = self._tiers[RAM]
        resident = ram.entries.get(key)
        return resident is None or self._may_raise(ram, resident)

    def _may_raise(self, tier: Residents, resident: Resident) -> bool:
        """Whether a chunk is among those of a tier that are kept for longer, or may become one."""
        if DEFAULT_PRIORITY < resident.priority < PINNED:
            return True
        raised = sum(
            len(same) for rank, same in tier.ranked.items() if DEFAULT_PRIORITY < rank < PINNED
        )
        return raised < int(self.quotas.raised_share * tier.slot_count)

    def _rank_everywhere(self, key: ChunkKey) -> None:
        for level, tier in enumerate(self._tiers):
            resident = tier.entries.get(key)
            if resident is not None:
                self._rank(Level(level), resident)

    def _rank(self, level: Level, resident: Resident) -> None:
        keep = self._keeps.get(resident.key)
        if keep is None:
            priority = DEFAULT_PRIORITY
        elif keep.pinned_until_s:
            priority = PINNED if level == RAM else MAX_PRIORITY
        else:
            priority = keep.priority
        tier = self._tiers[level]
        if DEFAULT_PRIORITY < priority < PINNED and not self._may_raise(tier, resident):
            priority = DEFAULT_PRIORITY  # it has come to a tier that keeps enough already
        tier.rank(resident, priority)

    def _note_session(
        self, session: SessionId | None, keys: Sequence[ChunkKey], fresh: Collection[ChunkKey]
    ) -> None:
        """Chunks that a session computed are its own until anybody else uses them."""
        for key in keys:
            owner = self._session_of.get(key)
            if owner is not None and owner != session:
                self._session_of[key] = SHARED
        if session is None:
            return
        known = self._sessions.setdefault(session, _Session())
        self._sessions.move_to_end(session)
        for key in fresh:
            if key not in self._session_of:
                self._session_of[key] = session
                known.keys[key] = None
        while len(self._sessions) > MAX_SESSIONS:
            name, oldest = self._sessions.popitem(last=False)
            for key in oldest.keys:
                if self._session_of.get(key) == name:
                    del self._session_of[key]


def _wish(hints: Hints, first: int, end: int) -> tuple[int, float | None] | None:
    """The priority and its duration that a request asks for a chunk; the highest of its tokens."""
    found: tuple[int, float | None] | None = None
    for each in hints.priority:
        overlaps = each.first < end and (each.end is None or first < each.end)
        if overlaps and (found is None or each.priority > found[0]):
            found = each.priority, each.duration_s
    if hints.tool_call_pending and (found is None or found[0] < TOOL_CALL_PRIORITY):
        return TOOL_CALL_PRIORITY, TOOL_CALL_S
    return found
