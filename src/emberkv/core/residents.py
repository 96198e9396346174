"""Which chunks sit in one tier: the only place that counts slots, pins and children."""

from __future__ import annotations

import enum
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from emberkv.domain.hints import DEFAULT_PRIORITY, MAX_PRIORITY
from emberkv.domain.types import ChunkKey, Entry, Slot, TenantName, VisitId
from emberkv.errors import InvariantError
from emberkv.policy.eviction.base import EvictionPolicy

PASSED_PER_LISTED: Final = 16
"""A walk past so many chunks that are kept takes down one more of those that are not."""

PASSED_PER_REST: Final = 256
"""After a walk past so many that found too little, one call goes without."""


class State(enum.Enum):
    """Where a resident's bytes stand: `WRITING → READY`, and `LOST` until the last pin is gone."""

    WRITING = "writing"
    READY = "ready"
    LOST = "lost"


READY: Final = State.READY
"""The state that is asked for once per chunk and look-up."""

PINNED: Final = MAX_PRIORITY + 1
"""The priority of what a hint has pinned: it does not leave to make room."""


class Resident:
    """One chunk's entry in one tier."""

    __slots__ = (
        "key",
        "parent",
        "pins",
        "priority",
        "slot",
        "state",
        "tenant",
        "unused",
        "visit",
    )

    def __init__(self, key: ChunkKey, parent: ChunkKey | None, slot: Slot, visit: VisitId) -> None:
        self.key = key
        self.parent = parent
        self.slot = slot
        self.visit = visit
        self.state = State.WRITING
        self.pins = 0
        self.priority = DEFAULT_PRIORITY
        self.tenant: TenantName | None = None
        self.unused = False  # promoted, and not loaded since

    def __repr__(self) -> str:
        name = self.key.hex()[:12]
        return f"Resident({name}, slot={self.slot}, {self.state.value}, pins={self.pins})"


class Residents:
    """The chunks of one tier of `slot_count` slots.

    A slot is free, held (its bytes may still be touched by someone outside), or taken by one
    resident. The policy's keys are exactly the residents' keys.
    """

    def __init__(self, slot_count: int, chunk_bytes: int, policy: EvictionPolicy) -> None:
        self.slot_count = slot_count
        self.chunk_bytes = chunk_bytes
        self.policy = policy
        self.entries: dict[ChunkKey, Resident] = {}
        self.children: dict[ChunkKey, int] = {}
        self.held: dict[Slot, int] = {}
        self.pinned_count = 0
        self.entered_count = 0
        self.protected: Mapping[TenantName, int] = {}
        self.by_tenant: Counter[TenantName] = Counter()
        self.ranked: dict[int, dict[ChunkKey, None]] = {}
        self._shortlists: dict[TenantName | None, _Shortlist] = {}
        self._free: list[Slot] = [Slot(slot) for slot in range(slot_count - 1, -1, -1)]

    @property
    def capacity_bytes(self) -> int:
        return self.slot_count * self.chunk_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of slots that can't be given out: taken and held."""
        return (self.slot_count - len(self._free)) * self.chunk_bytes

    @property
    def free_count(self) -> int:
        return len(self._free)

    def ready(self, key: ChunkKey) -> bool:
        resident = self.entries.get(key)
        return resident is not None and resident.state is READY

    def insert(
        self, keys: Sequence[ChunkKey], parents: Sequence[ChunkKey | None], visit: VisitId
    ) -> list[Resident]:
        """Give chunks, head first, a free slot each; they start as WRITING."""
        inserted = [
            self._enter(key, parent, self._free.pop(), visit)
            for key, parent in zip(keys, parents, strict=True)
        ]
        if inserted:
            self.policy.insert(keys, visit)
        return inserted

    def adopt(self, entries: Sequence[Entry], visit: VisitId) -> None:
        """Take in chunks found in held slots at start; they are READY."""
        for entry in entries:
            if not self._unhold(entry.slot):
                raise InvariantError(f"slot {entry.slot} of an adopted chunk is held twice")
            self._enter(entry.key, entry.parent, entry.slot, visit).state = State.READY
        self.policy.insert([entry.key for entry in entries], visit)

    def pin(self, resident: Resident) -> None:
        if not resident.pins:
            self.pinned_count += 1
        resident.pins += 1

    def pin_run(self, residents: Iterable[Resident]) -> None:
        """Pin many chunks; the same as `pin` for each, without its cost."""
        newly = 0
        for resident in residents:
            newly += not resident.pins
            resident.pins += 1
        self.pinned_count += newly

    def unpin_run(self, residents: Iterable[Resident]) -> None:
        """Give one pin back on each of many chunks."""
        freed = 0
        for resident in residents:
            if resident.pins == 1 and resident.state is READY:
                resident.pins = 0
                freed += 1
            else:
                self.unpin(resident)
        self.pinned_count -= freed

    def unpin(self, resident: Resident) -> bool:
        """Give a pin back; True if that let a LOST chunk go."""
        if resident.pins <= 0:
            raise InvariantError(f"unpin of an unpinned chunk: {resident!r}")
        resident.pins -= 1
        if resident.pins:
            return False
        self.pinned_count -= 1
        if resident.state is State.LOST:
            self._leave(resident)
            return True
        return False

    def lose(self, resident: Resident) -> None:
        """Forget a chunk whose bytes are not what they should be; its pins keep the slot."""
        if resident.state is not State.LOST:
            resident.state = State.LOST
            if not resident.pins:
                self._leave(resident)

    def rank(self, resident: Resident, priority: int) -> None:
        """Give a chunk another priority: lower ones leave first, `PINNED` ones not at all."""
        self._unrank(resident)
        resident.priority = priority
        if priority != DEFAULT_PRIORITY:
            self.ranked.setdefault(priority, {})[resident.key] = None

    def own(self, resident: Resident, tenant: TenantName | None) -> None:
        """Count a chunk to a tenant's share."""
        self._disown(resident)
        resident.tenant = tenant
        if tenant is not None:
            self.by_tenant[tenant] += 1

    def make_room(
        self, wanted_slots: int, visit: VisitId | None, tenant: TenantName | None = None
    ) -> list[Resident]:
        """Evict until `wanted_slots` are free, as far as that is possible; returns who left.

        Only READY, unpinned chunks without resident children leave, never a chunk of `visit`, and
        of another tenant than `tenant` only what is beyond its protected share.
        """
        missing = wanted_slots - len(self._free)
        if missing <= 0:
            return []
        leaving = _Leaving(self, missing, visit, tenant)
        ranks = sorted(rank for rank in self.ranked if rank < PINNED)
        for rank in ranks:
            if rank < DEFAULT_PRIORITY:
                leaving.offer_all(self.ranked[rank])
        if self.ranked or self.protected:
            asking = tenant if tenant in self.protected else None
            self._shortlists.setdefault(asking, _Shortlist()).offer_to(leaving)
        else:
            leaving.offer_all(self.policy.victims())
        for rank in ranks:
            if rank > DEFAULT_PRIORITY:
                leaving.offer_all(self.ranked[rank])
        for resident in leaving.found:
            self._evict(resident)
        return leaving.found

    def evict_all(self) -> list[Resident]:
        """Evict all that may leave, whosever share it is; returns who left."""
        protected, self.protected = self.protected, {}
        self._shortlists.clear()
        leaving = self.make_room(self.slot_count, None)
        self.protected = protected
        return leaving

    def give_up(self, resident: Resident) -> bool:
        """Evict one chunk, if it may leave."""
        if resident.pins or resident.priority == PINNED or resident.key in self.children:
            return False
        if resident.state is not State.READY:
            return False
        self._evict(resident)
        return True

    def hold(self, slots: Iterable[Slot]) -> None:
        """Take free slots out of use."""
        for slot in slots:
            self.held[slot] = self.held.get(slot, 0) + 1
        self._free = [slot for slot in self._free if slot not in self.held]

    def reserve(self, count: int) -> list[Slot]:
        """Take up to `count` free slots out of use, held once each."""
        taken = [self._free.pop() for _ in range(min(count, len(self._free)))]
        self.held.update((slot, 1) for slot in taken)
        return taken

    def free_held(self, slots: Iterable[Slot]) -> None:
        """Give one hold on each slot back; a slot is free when its last hold is gone."""
        for slot in slots:
            if self._unhold(slot):
                self._free.append(slot)

    def clear(self, hold: Iterable[Slot]) -> None:
        """Forget every chunk; slots that someone still touches are held, once per mention."""
        for slot in hold:
            self.held[slot] = self.held.get(slot, 0) + 1
        for key in self.entries:
            self.policy.discard(key)
        self.entries.clear()
        self.children.clear()
        self.ranked.clear()
        self.by_tenant.clear()
        self._shortlists.clear()
        self.pinned_count = 0
        self._free = [
            Slot(slot) for slot in range(self.slot_count - 1, -1, -1) if Slot(slot) not in self.held
        ]

    def free_slots(self) -> frozenset[Slot]:
        """For checks: O(slots)."""
        return frozenset(self._free)

    def _enter(
        self, key: ChunkKey, parent: ChunkKey | None, slot: Slot, visit: VisitId
    ) -> Resident:
        resident = Resident(key, parent, slot, visit)
        self.entries[key] = resident
        self.entered_count += 1
        if parent is not None:
            self.children[parent] = self.children.get(parent, 0) + 1
        return resident

    def _unhold(self, slot: Slot) -> bool:
        """Give one hold back; True if it was the last."""
        holds = self.held.get(slot, 0) - 1
        if holds < 0:
            raise InvariantError(f"slot {slot} is given back but not held")
        if holds:
            self.held[slot] = holds
            return False
        del self.held[slot]
        return True

    def _evict(self, resident: Resident) -> None:
        if self.children.get(resident.key):
            raise InvariantError(f"a chunk left before its children: {resident!r}")
        self.policy.evict(resident.key)
        self._remove(resident)

    def _leave(self, resident: Resident) -> None:
        self.policy.discard(resident.key)
        self._remove(resident)

    def _unrank(self, resident: Resident) -> None:
        if resident.priority != DEFAULT_PRIORITY:
            same = self.ranked[resident.priority]
            del same[resident.key]
            if not same:
                del self.ranked[resident.priority]

    def _disown(self, resident: Resident) -> None:
        tenant = resident.tenant
        if tenant is not None:
            self.by_tenant[tenant] -= 1
            if not self.by_tenant[tenant]:
                del self.by_tenant[tenant]  # anybody may make up names

    def _remove(self, resident: Resident) -> None:
        self._unrank(resident)
        self._disown(resident)
        del self.entries[resident.key]
        self._free.append(resident.slot)
        parent = resident.parent
        if parent is not None:
            left = self.children[parent] - 1
            if left:
                self.children[parent] = left
            else:
                del self.children[parent]


class _Leaving:
    """Who leaves in one call of `make_room`, out of those it is offered, first to leave first."""

    def __init__(
        self, tier: Residents, missing: int, visit: VisitId | None, tenant: TenantName | None
    ) -> None:
        self.tier = tier
        self.found: list[Resident] = []
        self._taken: set[ChunkKey] = set()
        self._missing = missing
        self._visit = visit
        self._orphaned: dict[ChunkKey, int] = {}  # children that leave in this very call
        self._passed_over: dict[ChunkKey, Resident] = {}  # kept so far only by their children
        self._asking = tenant
        self._spare = {name: tier.by_tenant[name] - slots for name, slots in tier.protected.items()}

    def is_full(self) -> bool:
        return len(self.found) == self._missing

    def offer_all(self, keys: Iterable[ChunkKey]) -> None:
        """Take of these until there are enough."""
        if self.is_full():
            return
        entries = self.tier.entries
        for key in keys:
            self.offer(entries[key])
            if self.is_full():
                return

    def is_kept(self, resident: Resident) -> bool:
        """Whether it is kept by a priority, or by its tenant's share as far as that is known."""
        if resident.priority != DEFAULT_PRIORITY:
            return True
        tenant = resident.tenant
        return tenant is not None and tenant != self._asking and self._spare.get(tenant, 1) <= 0

    def offer(self, resident: Resident) -> None:
        """Take a chunk, and its ancestors that only it has kept, if it may leave."""
        children = self.tier.children
        if resident.pins or resident.state is not READY or resident.visit == self._visit:
            return
        key = resident.key
        if key in self._taken:
            return
        if key in children and children[key] > self._orphaned.get(key, 0):
            self._passed_over[key] = resident
            return
        follower: Resident | None = resident
        while follower is not None and not self.is_full() and self._may_take(follower):
            self.found.append(follower)
            self._taken.add(follower.key)
            parent = follower.parent
            follower = None
            if parent is not None:
                self._orphaned[parent] = self._orphaned.get(parent, 0) + 1
                if parent in self._passed_over and children[parent] == self._orphaned[parent]:
                    follower = self._passed_over[parent]  # its last child has just left

    def _may_take(self, resident: Resident) -> bool:
        """Whether the share of the chunk's tenant lets it go; counts it."""
        tenant = resident.tenant
        if tenant is None or tenant == self._asking or tenant not in self._spare:
            return True
        self._spare[tenant] -= 1
        return self._spare[tenant] >= 0


class _Shortlist:
    """Who leaves next where many are kept: the policy's order without them, a stretch at a time.

    What is kept grows old, and stands at the front of the policy's order for ever: a walk past it
    in every call would cost the engine's thread milliseconds. So a walk takes down more than is
    wanted now, in proportion to what it passed; whoever was used since is struck off when its turn
    comes. After a walk that found too little the next calls do without one.
    """

    def __init__(self) -> None:
        self._next: deque[tuple[ChunkKey, VisitId]] = deque()
        self._rest_calls = 0

    def offer_to(self, leaving: _Leaving) -> None:
        entries = leaving.tier.entries
        while self._next and not leaving.is_full():
            key, visit = self._next.popleft()
            resident = entries.get(key)
            if resident is not None and resident.visit == visit and not leaving.is_kept(resident):
                leaving.offer(resident)
        if leaving.is_full():
            return
        if self._rest_calls:
            self._rest_calls -= 1
            return
        self._walk(leaving)

    def _walk(self, leaving: _Leaving) -> None:
        entries = leaving.tier.entries
        passed = last = 0
        wanted: int | None = None
        for looked_at, key in enumerate(leaving.tier.policy.victims(), start=1):
            resident = entries[key]
            if leaving.is_kept(resident):
                passed += 1
            elif wanted is None:
                leaving.offer(resident)
            else:
                self._next.append((key, resident.visit))
            if wanted is None and leaving.is_full():
                wanted, last = passed // PASSED_PER_LISTED, looked_at + passed
            if wanted is not None and (len(self._next) >= wanted or looked_at >= last):
                return
        if not leaving.is_full():
            self._rest_calls = passed // PASSED_PER_REST
