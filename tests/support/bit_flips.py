"""Flips single bits of everything emberkv reads back, and looks at what is then served.

A flip is *detected* if what it hit is refused or missed, *harmless* if exactly what was there is
served all the same, and *wrong* if anything else is. All bits of small classes are flipped, a
sample of large ones.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from emberkv.domain.types import ChunkKey, Entry, Outcome, Slot
from emberkv.errors import StorageError
from emberkv.live.arena import HEADER as ARENA_HEADER
from emberkv.live.arena import Arena, ArenaGeometry, create_memory
from emberkv.live.keeper.seals import Seals
from emberkv.testing.storage import chunk_key, payload_of, put, record_for
from emberkv.tiers.format import (
    DATA_FILE,
    HEADER_BYTES,
    INDEX_FILE,
    LOCK_FILE,
    NAMESPACE_FILE,
    RECORD_BYTES,
    SlabGeometry,
    StoredNamespace,
)
from emberkv.tiers.slab import Slab
from emberkv.tiers.slab_directory import SlabDirectory

PAYLOAD_BYTES = 5000
SLOTS = 8
HELD = range(6)  # slots with a chunk of the present epoch
FORGOTTEN = 6  # with a chunk of an earlier epoch
EMPTY = 7
VICTIM = 2
SAMPLED_BYTES = 64
GEOMETRY = SlabGeometry(SLOTS, PAYLOAD_BYTES)
NAMESPACE = StoredNamespace(bytes(range(16)), {"model": "tiny", "chunk_tokens": 32})

INDEX_FIELDS = {
    "magic": (0, 8),
    "format version": (8, 12),
    "digest length": (12, 16),
    "digest": (16, 48),
    "slot count": (48, 56),
    "payload bytes": (56, 64),
    "epoch": (64, 72),
    "checksum": (72, 80),
    "zeros": (80, HEADER_BYTES),
}
RECORD_FIELDS = {
    "magic": (0, 4),
    "flags": (4, 6),
    "key length": (6, 7),
    "parent length": (7, 8),
    "key": (8, 48),
    "parent": (48, 88),
    "epoch": (88, 96),
    "sequence": (96, 104),
    "payload checksum": (104, 112),
    "slot": (112, 120),
    "checksum": (120, 128),
}
Served = tuple[tuple[ChunkKey, ChunkKey | None, int, bytes], ...]
"""What a tier offers: key, parent, slot and the bytes that a read of it gives."""


@dataclass
class FlipClass:
    """One class of byte positions. `why_harmless` must be given if a flip may be."""

    name: str
    why_harmless: str = ""
    flips: int = 0
    detected: int = 0
    harmless: int = 0
    wrong: list[str] = field(default_factory=list)

    def count(self, where: str, before: Served, after: Served | None, hit: set[int]) -> None:
        """Count one flip: what was served before and after it, and the slots it was to hit.

        None: nothing is served at all. What else was served before must still be.
        """
        self.flips += 1
        if after is None:
            self.detected += 1
        elif set(after) == set(before):
            self.harmless += 1
            if not self.why_harmless:
                self.wrong.append(f"{where}: not noticed")
        elif set(after) < set(before) and {each[2] for each in set(before) - set(after)} <= hit:
            self.detected += 1
        else:
            self.wrong.append(f"{where}: {len(after)} served, of {len(before)}, others among them")


# ── slab ─────────────────────────────────────────────────────────────────────────────────────────


def open_flipped(root_dir: Path) -> Slab:
    return SlabDirectory(root_dir, GEOMETRY.total_bytes).open_slab(NAMESPACE, PAYLOAD_BYTES)


def fill(root_dir: Path) -> Path:
    """Make the slab that is flipped; its directory."""
    slab = open_flipped(root_dir)
    for slot in range(EMPTY):
        assert put(slab, 100 + slot, slot) is Outcome.OK
    slab.reset()
    for slot in HELD:
        assert put(slab, slot, slot, parent=slot - 1 if slot else None) is Outcome.OK
    slab.close()
    return root_dir / NAMESPACE.directory_name


def served_by(slab: Slab) -> Served:
    """Everything a slab can be made to serve: what it names, and what was ever written into it."""
    parents = {(entry.slot, entry.key): entry.parent for entry in slab.entries()}
    asked = set(parents) | {
        (Slot(slot), chunk_key(number)) for slot in range(SLOTS) for number in (slot, 100 + slot)
    }
    rooms = {each: bytearray(PAYLOAD_BYTES) for each in asked}
    found = []
    for (slot, key), room in rooms.items():
        record = record_for(0, slot)
        wanted = type(record)(key, None, slot)
        if slab.read([wanted], [memoryview(room)])[0] is Outcome.OK:
            found.append((key, parents.get((slot, key)), int(slot), bytes(room)))
    return tuple(sorted(found))


def flipped_bits(path: Path, offset: int, bits: Sequence[int]) -> Iterator[int]:
    """Flip bits of a file from `offset` on, one at a time; each is flipped back afterwards."""
    with path.open("r+b", buffering=0) as file:
        for bit in bits:
            at = offset + bit // 8
            file.seek(at)
            (value,) = file.read(1)
            for now in (value ^ 1 << bit % 8, value):
                file.seek(at)
                file.write(bytes([now]))
                if now != value:
                    yield bit


def bits_of(count: int, chance: random.Random) -> Sequence[int]:
    """All bits of a few bytes; of many bytes those of the first, the last and a sample."""
    if count <= 2 * SAMPLED_BYTES:
        return range(8 * count)
    inner = chance.sample(range(8, 8 * (count - 1)), 8 * SAMPLED_BYTES)
    return [*range(8), *sorted(inner), *range(8 * (count - 1), 8 * count)]


class SlabFlips:
    """Flips bits of a slab, looking through a slab that is open or by opening it again."""

    def __init__(self, root_dir: Path, chance: random.Random) -> None:
        self._root_dir = root_dir
        self._chance = chance
        self._directory = fill(root_dir)
        self.classes: list[FlipClass] = []
        slab = open_flipped(root_dir)
        self._before = served_by(slab)
        slab.close()
        assert [each[2] for each in self._before] == list(HELD)
        assert all(each[3] == payload_of(each[2], PAYLOAD_BYTES) for each in self._before)

    def flip(
        self,
        found: FlipClass,
        name: str,
        where: tuple[int, int],
        hit: set[int],
        look: Callable[[], Served | None],
    ) -> None:
        """Flip bits of one class from `where` to `where`, and count what `look` is served."""
        start, end = where
        bits = bits_of(end - start, self._chance)
        self.classes.append(found)
        for bit in flipped_bits(self._directory / name, start, bits):
            named = f"{found.name}, bit {bit % 8} of byte {bit // 8}"
            found.count(named, self._before, look(), hit)

    def reopened(self) -> Served | None:
        """What is served by a slab that is opened now; None if it is refused."""
        try:
            slab = open_flipped(self._root_dir)
        except StorageError:
            return None
        try:
            return served_by(slab)
        finally:
            slab.close()

    def all(self) -> list[FlipClass]:
        """Flip everything."""
        for name, (start, end) in INDEX_FIELDS.items():
            why = "nothing is read there" if name == "zeros" else ""
            found = FlipClass(f"index header: {name}", why)
            self.flip(found, INDEX_FILE, (start, end), set(), self.reopened)
        self._small_files()
        slab = open_flipped(self._root_dir)
        self._records(slab)
        self._payloads(slab)
        slab.close()
        assert self.reopened() == self._before, "every flip was flipped back"
        return self.classes

    def _small_files(self) -> None:
        size = (self._directory / NAMESPACE_FILE).stat().st_size
        found = FlipClass(
            "namespace.json", "it still says the same: white space, or an escape of the same letter"
        )
        self.classes.append(found)
        for bit in flipped_bits(self._directory / NAMESPACE_FILE, 0, range(8 * size)):
            where = f"namespace.json, bit {bit % 8} of byte {bit // 8}"
            found.count(where, self._before, self.reopened(), set())
        found = FlipClass("lock", "only a message names the process in it")
        self.flip(found, LOCK_FILE, (0, 1), set(), self.reopened)

    def _records(self, slab: Slab) -> None:
        kinds = (
            ("record", VICTIM, ""),
            ("record of an earlier epoch", FORGOTTEN, "the slot stays a miss"),
            ("record of an empty slot", EMPTY, "the slot stays a miss"),
        )
        for kind, slot, why in kinds:
            for name, (start, end) in RECORD_FIELDS.items():
                record = HEADER_BYTES + slot * RECORD_BYTES
                where = (record + start, record + end)
                found = FlipClass(f"{kind}: {name}", why)
                self.flip(found, INDEX_FILE, where, {slot}, lambda: served_by(slab))

    def _payloads(self, slab: Slab) -> None:
        first = VICTIM * GEOMETRY.stride_bytes
        empty = EMPTY * GEOMETRY.stride_bytes
        rest = GEOMETRY.stride_bytes - PAYLOAD_BYTES
        for name, offset, count, why in (
            ("payload: first bytes", first, 8, ""),
            ("payload: between", first, PAYLOAD_BYTES, ""),
            ("payload: last bytes", first + PAYLOAD_BYTES - 8, 8, ""),
            ("padding behind a payload", first + PAYLOAD_BYTES, rest, "nothing is served of it"),
            ("payload of an empty slot", empty, PAYLOAD_BYTES, "nothing is served of it"),
        ):
            found = FlipClass(name, why)
            self.flip(found, DATA_FILE, (offset, offset + count), {VICTIM}, lambda: served_by(slab))


# ── arena ────────────────────────────────────────────────────────────────────────────────────────

TICK_WHY = "it orders chunks by their last use, and says nothing of bytes"
FREED_WHY = "a freed row that nobody has overwritten still holds its own chunk"
ARENA_KINDS = {
    "sealed": 0,
    "freed": 3,
    "being rewritten": 4,
    "not sealed": 5,
    "never used": 6,
    "reset": 7,
}


class ArenaFlips:
    """Flips bits of an arena, and takes it over after each as a restarted engine would."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._geometry = ArenaGeometry(SLOTS, PAYLOAD_BYTES)
        memory = create_memory(self._geometry)
        self._arena = Arena(memory, self._geometry)
        os.close(memory)
        self._seals = Seals(self._arena)
        self.classes: list[FlipClass] = []
        self._fill()
        self._before = self.taken_over()
        assert [each[2] for each in self._before] == [0, 1, 2]
        headers = self._geometry.slot_count * ARENA_HEADER.itemsize
        self._headers = self._arena.bytes[:headers].reshape(SLOTS, ARENA_HEADER.itemsize)

    def _fill(self) -> None:
        self._store([7], 107)
        self._seals.invalidate()
        self._store([0, 1, 2, 3, 4, 5], 20)
        self._store([0, 1, 2, 3, 4, 5], 0)
        arena = self._arena
        arena.mark_free([Slot(3)])
        arena.mark_writing([Slot(4)], [chunk_key(14)], [None])
        arena.mark_writing([Slot(5)], [chunk_key(15)], [None])
        arena.row(Slot(5))[:] = payload_of(15, PAYLOAD_BYTES)
        arena.mark_ready([Slot(5)], 9)

    def _store(self, slots: list[int], first_number: int) -> None:
        """Make sealed chunks."""
        at = [Slot(slot) for slot in slots]
        keys = [chunk_key(first_number + slot) for slot in slots]
        self._arena.mark_writing(at, keys, [None, *keys[:-1]])
        for slot in at:
            self._arena.row(slot)[:] = payload_of(first_number + slot, PAYLOAD_BYTES)
        self._arena.mark_ready(at, 1)
        self._seals.request(np.asarray(slots))
        self.taken_over()  # after the seals

    def taken_over(self) -> Served:
        """What a restarted engine is given."""
        found: list[Entry] = []
        ended = threading.Event()

        def take(entries: list[Entry], last: bool) -> None:
            found.extend(entries)
            if last:
                ended.set()

        self._seals.verify(take)
        assert ended.wait(60), "the takeover ends"
        rows = [
            (each.key, each.parent, int(each.slot), bytes(self._arena.row(each.slot)))
            for each in found
        ]
        return tuple(sorted(rows, key=lambda row: row[2]))

    def _flip(self, found: FlipClass, target: np.ndarray, bits: Sequence[int], hit: int) -> None:
        self.classes.append(found)
        for bit in bits:
            target[bit // 8] ^= np.uint8(1 << bit % 8)
            after = tuple(each for each in self.taken_over() if not self._is_freed_chunk(each))
            where = f"{found.name}, bit {bit % 8} of byte {bit // 8}"
            found.count(where, self._before, after, {hit})
            target[bit // 8] ^= np.uint8(1 << bit % 8)

    @staticmethod
    def _is_freed_chunk(row: tuple[ChunkKey, ChunkKey | None, int, bytes]) -> bool:
        """Whether this is the chunk that was freed, with its own bytes: nothing wrong."""
        return row == (chunk_key(3), chunk_key(2), 3, payload_of(3, PAYLOAD_BYTES))

    def all(self) -> list[FlipClass]:
        """Flip everything."""
        fields = ARENA_HEADER.fields
        assert fields is not None
        for kind, slot in ARENA_KINDS.items():
            for name, (dtype, offset, *_) in fields.items():
                why = "the row stays a miss"
                if kind == "sealed":
                    why = TICK_WHY if name == "tick" else ""
                elif kind == "freed" and name == "state":
                    why = FREED_WHY
                found = FlipClass(f"arena header of a row {kind}: {name}", why)
                target = self._headers[slot, offset : offset + dtype.itemsize]
                self._flip(found, target, range(8 * dtype.itemsize), slot)
        row = self._geometry.row_bytes
        start = self._geometry.header_bytes
        whole = self._arena.bytes[start : start + row]
        for name, target, why in (
            ("arena row", whole[:PAYLOAD_BYTES], ""),
            ("padding behind an arena row", whole[PAYLOAD_BYTES:], "nothing is served of it"),
        ):
            self._flip(FlipClass(name, why), target, bits_of(len(target), self._chance), 0)
        assert self.taken_over() == self._before, "every flip was flipped back"
        return self.classes

    def close(self) -> None:
        self._seals.stop()


def flip_everything(root_dir: Path, seed: int) -> list[FlipClass]:
    """Flip bits of every class of the slab's files and of the arena."""
    chance = random.Random(seed)
    found = SlabFlips(root_dir, chance).all()
    arena = ArenaFlips(chance)
    try:
        return found + arena.all()
    finally:
        arena.close()
