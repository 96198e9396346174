"""Tiers in a toy memory: carries out a stack's effects to the letter and keeps naive books.

It knows the rules, not the core's code: which slot holds which chunk's bytes, who reads and who
writes each slot, and which chunks a tier must have by all that it was told. Whatever contradicts
that is an `AssertionError`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from emberkv.domain.types import (
    RAM,
    ChunkKey,
    Copy,
    Drop,
    Effect,
    Entry,
    Level,
    Outcome,
    Slot,
    TransferId,
)

Place = tuple[Level, Slot]

EMPTY = b"(nothing)"
BROKEN = b"(half written)"
DAMAGED = b"(bits flipped)"


class Kept:
    """One chunk in one tier's books; `origin` is the tier that it is being promoted from."""

    __slots__ = ("origin", "ready", "slot")

    def __init__(self, slot: Slot, *, ready: bool, origin: Level | None = None) -> None:
        self.slot = slot
        self.ready = ready
        self.origin = origin


@dataclass
class Transfer:
    """A copy that was taken; `stale` once a reset has forgotten what it was for."""

    copy: Copy
    unfinished: set[int]
    stale: bool = False


@dataclass
class _Reads:
    """Reads due from one tier, and when one last ended or the first was asked for."""

    due: int = 0
    moved_at_s: float = 0.0


@dataclass
class ToyTiers:
    """`slot_counts[level]` slots per tier; `parents` names the chunk before each chunk."""

    slot_counts: Sequence[int]
    parents: dict[ChunkKey, ChunkKey | None]
    max_stall_s: float
    transfers: dict[TransferId, Transfer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.memory: dict[Place, bytes] = {
            (Level(level), Slot(slot)): EMPTY
            for level, count in enumerate(self.slot_counts)
            for slot in range(count)
        }
        self.books: list[dict[ChunkKey, Kept]] = [{} for _ in self.slot_counts]
        self.readers: Counter[Place] = Counter()
        self.writers: dict[Place, ChunkKey] = {}
        self.touched: Counter[Place] = Counter()  # by copies and engine jobs from before a reset
        self.engine_touches: list[Place] = []
        self.lost: set[tuple[Level, ChunkKey]] = set()
        self.reads = [_Reads() for _ in self.slot_counts]

    # ── what a stack must say ────────────────────────────────────────────────────────────────

    def residence(self, key: ChunkKey, now_s: float) -> Level | None:
        """Where a stack must say that a chunk is."""
        kept = self.books[RAM].get(key)
        if kept is not None:
            if kept.ready:
                return RAM
            if kept.origin is None or self.stalled(kept.origin, now_s):
                return None
            return kept.origin
        if (RAM, key) in self.lost:
            return None
        for number in range(1, len(self.slot_counts)):
            level = Level(number)
            below = self.books[level].get(key)
            if below is not None and below.ready and not self.stalled(level, now_s):
                return level
        return None

    def stalled(self, level: Level, now_s: float) -> bool:
        reads = self.reads[level]
        return reads.due > 0 and now_s - reads.moved_at_s > self.max_stall_s

    # ── effects ──────────────────────────────────────────────────────────────────────────────

    def carry_out(self, effects: Sequence[Effect], now_s: float) -> None:
        """Take effects in order; a copy's chunks end later, by `finish`."""
        for effect in effects:
            if isinstance(effect, Drop):
                self._drop(effect)
            else:
                self._take(effect, now_s)

    def _drop(self, drop: Drop) -> None:
        books = self.books[drop.level]
        evicted: set[ChunkKey] = set()
        for key, slot in zip(drop.keys, drop.slots, strict=True):
            kept = books.get(key)
            place = (drop.level, slot)
            if kept is None or kept.slot != slot:
                continue  # a copy to it has failed, or it was lost: the books know already
            assert not self.readers[place], f"{key!r} dropped from {place} while being read"
            assert place not in self.writers, f"{key!r} dropped from {place} while being written"
            del books[key]
            if drop.level == RAM:  # below, bytes stay until something is written over them
                self.memory[place] = EMPTY
            evicted.add(key)
        for key in books:
            assert self.parents[key] not in evicted, f"{key!r} outlives its parent: {drop}"

    def _take(self, copy: Copy, now_s: float) -> None:
        assert copy.transfer not in self.transfers
        upward = copy.target < copy.source
        columns = zip(copy.keys, copy.parents, copy.source_slots, copy.target_slots, strict=True)
        for key, parent, source_slot, target_slot in columns:
            source, target = (copy.source, source_slot), (copy.target, target_slot)
            kept = self.books[copy.source].get(key)
            assert parent == self.parents[key]
            assert kept is not None, f"{copy} reads {key!r}, which is not there"
            assert kept.ready, f"{copy} reads {key!r}, which is still being written"
            assert kept.slot == source_slot, f"{copy} reads {key!r} from the wrong slot"
            assert key not in self.books[copy.target], f"{copy} brings {key!r} a second time"
            self._begin_write(target, key)
            self.readers[source] += 1
            self.books[copy.target][key] = Kept(
                target_slot, ready=False, origin=copy.source if upward else None
            )
        if upward:
            reads = self.reads[copy.source]
            if not reads.due:
                reads.moved_at_s = now_s
            reads.due += len(copy.keys)
        self.transfers[copy.transfer] = Transfer(copy, set(range(len(copy.keys))))

    def finish(self, transfer: TransferId, index: int, wish: Outcome, now_s: float) -> Outcome:
        """End one chunk of a copy, as wished where the bytes allow it."""
        under_way = self.transfers[transfer]
        copy = under_way.copy
        under_way.unfinished.remove(index)
        if not under_way.unfinished:
            del self.transfers[transfer]
        key = copy.keys[index]
        source = (copy.source, copy.source_slots[index])
        target = (copy.target, copy.target_slots[index])
        if copy.target < copy.source:
            self.reads[copy.source].due -= 1
            reads = self.reads[copy.source]
            reads.moved_at_s = max(reads.moved_at_s, now_s)
        if under_way.stale:
            self.touched.subtract((source, target))
            self.memory[target] = key
            return wish
        self.readers[source] -= 1
        del self.writers[target]
        return self._settle(copy, index, wish)

    def _settle(self, copy: Copy, index: int, wish: Outcome) -> Outcome:
        key = copy.keys[index]
        source = (copy.source, copy.source_slots[index])
        found = self.memory[source]
        lost = (copy.source, key) in self.lost
        if found == DAMAGED:
            wish = Outcome.CORRUPT
        elif lost and found != key:
            wish = Outcome.ABSENT
        else:
            assert found == key, f"{copy} finds {found!r} where {key!r} should be"
        if wish is Outcome.OK:
            self.memory[copy.target, copy.target_slots[index]] = key
            self.books[copy.target][key].ready = True
        else:
            self.memory[copy.target, copy.target_slots[index]] = BROKEN
            del self.books[copy.target][key]
        if wish in (Outcome.CORRUPT, Outcome.ABSENT):
            self.lose(copy.source, key)
        if lost and not self.readers[source]:
            self.lost.discard((copy.source, key))
        return wish

    def found(self, level: Level, entry: Entry) -> None:
        """A tier has named a chunk from an earlier run; one slot per chunk counts."""
        place = (level, entry.slot)
        used = self.readers[place] > 0 or place in self.writers or self.touched[place] > 0
        assert not used, f"{entry} is taken in while its slot is being used"
        taken = [key for key, kept in self.books[level].items() if kept.slot == entry.slot]
        assert not taken, f"{entry} is taken in and its slot holds {taken}"
        self.memory[level, entry.slot] = entry.key
        if entry.key not in self.books[level]:
            self.books[level][entry.key] = Kept(entry.slot, ready=True)

    def lose(self, level: Level, key: ChunkKey) -> None:
        """A chunk turned out bad: it is forgotten now, its slot is kept by those who read it."""
        kept = self.books[level].pop(key, None)
        if kept is not None and self.readers[level, kept.slot]:
            self.lost.add((level, key))

    # ── the engine ───────────────────────────────────────────────────────────────────────────

    def engine_writes(self, key: ChunkKey, slot: Slot) -> None:
        assert key not in self.books[RAM], f"{key!r} is admitted a second time"
        self._begin_write((RAM, slot), key)
        self.books[RAM][key] = Kept(slot, ready=False)

    def engine_wrote(self, key: ChunkKey) -> None:
        kept = self.books[RAM][key]
        del self.writers[RAM, kept.slot]
        self.memory[RAM, kept.slot] = key
        kept.ready = True

    def engine_reads(self, key: ChunkKey, slot: Slot) -> None:
        assert self.memory[RAM, slot] == key, f"the engine is given {self.memory[RAM, slot]!r}"
        assert (RAM, slot) not in self.writers
        self.readers[RAM, slot] += 1

    def engine_has_read(self, key: ChunkKey, slot: Slot) -> None:
        self.readers[RAM, slot] -= 1
        if not self.readers[RAM, slot]:
            self.lost.discard((RAM, key))

    # ── trouble ──────────────────────────────────────────────────────────────────────────────

    def damage(self, level: Level, key: ChunkKey) -> None:
        """Flip bits of a chunk below RAM."""
        kept = self.books[level][key]
        assert level != RAM
        assert kept.ready
        self.memory[level, kept.slot] = DAMAGED

    def lose_tier(self, level: Level) -> None:
        """A tier below RAM is gone, once its copies have ended."""
        self.books[level].clear()

    def reset(self, taken: Collection[TransferId]) -> None:
        """Everything is forgotten; who still reads or writes goes on doing so."""
        assert set(taken) == set(self.transfers)
        copying: Counter[Place] = Counter()
        for transfer in self.transfers.values():
            if transfer.stale:
                continue
            transfer.stale = True
            copy = transfer.copy
            for index in transfer.unfinished:
                copying[copy.source, copy.source_slots[index]] += 1
                copying[copy.target, copy.target_slots[index]] += 1
        everyone = Counter({place: n for place, n in self.readers.items() if n > 0})
        everyone.update(self.writers.keys())
        engine = everyone - copying
        self.engine_touches += engine.elements()
        self.touched.update(everyone)
        self.readers.clear()
        self.writers.clear()
        self.lost.clear()
        for books in self.books:
            books.clear()

    def unfence(self) -> None:
        """The engine has finished what it began before the last reset."""
        self.touched.subtract(self.engine_touches)
        for place in self.engine_touches:
            self.memory[place] = BROKEN
        self.engine_touches.clear()

    def _begin_write(self, place: Place, key: ChunkKey) -> None:
        level, slot = place
        taken = [other for other, kept in self.books[level].items() if kept.slot == slot]
        assert not taken, f"{place} is given to {key!r} and holds {taken}"
        assert not self.readers[place], f"{place} is given to {key!r} while being read"
        assert place not in self.writers, f"{place} is written twice at once"
        assert self.touched[place] <= 0, f"{place} is given away; an old copy still uses it"
        self.writers[place] = key
        self.memory[place] = BROKEN
