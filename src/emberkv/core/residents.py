"""Which chunks sit in one tier: the only place that counts slots, pins and children."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from emberkv.domain.hints import DEFAULT_PRIORITY, MAX_PRIORITY
from emberkv.domain.types import ChunkKey, Entry, Slot, TenantName, VisitId
from emberkv.errors import InvariantError
from emberkv.policy.eviction.base import EvictionPolicy


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
        leaving: list[Resident] = []
        orphaned: dict[ChunkKey, int] = {}  # children that leave in this very call
        passed_over: dict[ChunkKey, Resident] = {}  # kept so far only by their children
        spared = _Shares(self, tenant) if self.protected else None
        entries, children = self.entries, self.children
        for key in self._order():
            resident = entries[key]
            if resident.pins or resident.state is not READY or resident.visit == visit:
                continue
            if key in children and children[key] > orphaned.get(key, 0):
                passed_over[key] = resident
                continue
            follower: Resident | None = resident
            while follower is not None and len(leaving) < missing:
                if spared is not None and not spared.take(follower):
                    break
                leaving.append(follower)
                parent = follower.parent
                follower = None
                if parent is not None:
                    orphaned[parent] = orphaned.get(parent, 0) + 1
                    if parent in passed_over and children[parent] == orphaned[parent]:
                        follower = passed_over[parent]  # its last child has just left
            if len(leaving) == missing:
                break
        for resident in leaving:
            self._evict(resident)
        return leaving

    def _order(self) -> Iterator[ChunkKey]:
        """Who leaves first: low priorities, then the policy's order, then high priorities."""
        ranked = self.ranked
        if not ranked:
            yield from self.policy.victims()
            return
        ranks = sorted(rank for rank in ranked if rank < PINNED)
        for rank in ranks:
            if rank < DEFAULT_PRIORITY:
                yield from list(ranked[rank])
        entries = self.entries
        for key in self.policy.victims():
            if entries[key].priority == DEFAULT_PRIORITY:
                yield key
        for rank in ranks:
            if rank > DEFAULT_PRIORITY:
                yield from list(ranked[rank])

    def evict_all(self) -> list[Resident]:
        """Evict all that may leave, whosever share it is; returns who left."""
        protected, self.protected = self.protected, {}
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
        if resident.tenant is not None:
            self.by_tenant[resident.tenant] -= 1

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


class _Shares:
    """What one call of `make_room` may still take from each tenant."""

    def __init__(self, tier: Residents, asking: TenantName | None) -> None:
        self._asking = asking
        self._left = {
            tenant: tier.by_tenant[tenant] - slots for tenant, slots in tier.protected.items()
        }

    def take(self, resident: Resident) -> bool:
        """Whether a chunk may leave; counts it."""
        tenant = resident.tenant
        if tenant is None or tenant == self._asking or tenant not in self._left:
            return True
        self._left[tenant] -= 1
        return self._left[tenant] >= 0
