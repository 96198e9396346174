"""A disk in memory: slots with a header and a payload, either of which may be wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import xxhash

from emberkv.domain.types import ChunkKey, Entry, Outcome, Slot
from emberkv.errors import StorageError
from emberkv.testing.fault_simulator.setting import CHUNK_BYTES, Fault, Setting
from emberkv.tiers.base import Record

SCAN_FAILURE: Final = "the disk can't be read"


@dataclass(slots=True)
class _Cell:
    """One slot as it is on the disk."""

    record: Record
    payload: bytes
    generation: int


class DiskModel:
    """What outlives every process."""

    def __init__(self, setting: Setting, slot_count: int) -> None:
        self.setting = setting
        self.slot_count = slot_count
        self.cells: dict[Slot, _Cell] = {}  # in the order of writing
        self.generation = 0
        self.epoch = 0
        self.owes_reset = False

    def damage(self) -> None:
        """Have something of what is stored go bad."""
        chance = self.setting.chance
        if self.setting.quiet or not self.cells:
            return
        slot = chance.choice(list(self.cells))
        cell = self.cells[slot]
        fault = chance.choice(
            (
                Fault.DISK_BITS_FLIP,
                Fault.DISK_SLOT_GONE,
                Fault.DISK_SLOT_GONE,
                Fault.DISK_SLOT_SWAPPED,
            )
        )
        if fault is Fault.DISK_BITS_FLIP:
            cell.payload = flipped(cell.payload, chance.randrange(8 * CHUNK_BYTES))
        elif fault is Fault.DISK_SLOT_GONE:
            del self.cells[slot]
        else:
            other = self.cells[chance.choice(list(self.cells))]
            cell.payload, other.payload = other.payload, cell.payload
        self.setting.seen.note(fault)


class OpenDisk:
    """One process's hold on the disk; implements `SlotStorage`.

    What it is told after `crash` has no effect: that process is gone.
    """

    def __init__(self, model: DiskModel) -> None:
        self._model = model
        self._closed = False
        self._writing: dict[Slot, int] = {}
        self._useless = False

    @property
    def slot_count(self) -> int:
        return self._model.slot_count

    @property
    def payload_bytes(self) -> int:
        return CHUNK_BYTES

    def begin_write(self, slots: Sequence[Slot]) -> None:
        """The header of a slot is void from the moment that its payload is being written."""
        if not self._closed:
            for slot in slots:
                self._model.cells.pop(slot, None)
                self._writing[slot] = self._model.epoch

    def write(
        self, records: Sequence[Record], payloads: Sequence[memoryview], /
    ) -> Sequence[Outcome]:
        if self._closed or self._useless:
            return [Outcome.SHED] * len(records)
        return [self._write(*each) for each in zip(records, payloads, strict=True)]

    def _write(self, record: Record, payload: memoryview) -> Outcome:
        model, setting = self._model, self._model.setting
        epoch = self._writing.pop(record.slot, model.epoch)
        model.cells.pop(record.slot, None)
        if setting.strikes(Fault.WRITE_FAILS, 0.03):
            return Outcome.FAILED
        if setting.strikes(Fault.DISK_FULL, 0.03):
            return Outcome.FULL
        if epoch != model.epoch:
            return Outcome.OK  # of an epoch that a reset has ended: nobody will find it
        model.generation += 1
        model.cells[record.slot] = _Cell(record, bytes(payload), model.generation)
        return Outcome.OK

    def read(
        self, records: Sequence[Record], payloads: Sequence[memoryview], /
    ) -> Sequence[Outcome]:
        if self._closed:
            return [Outcome.SHED] * len(records)
        if self._useless:
            return [Outcome.ABSENT] * len(records)
        return [self._read(*each) for each in zip(records, payloads, strict=True)]

    def _read(self, record: Record, payload: memoryview) -> Outcome:
        setting = self._model.setting
        payload[: CHUNK_BYTES // 2] = bytes(CHUNK_BYTES // 2)  # whatever comes of it
        if setting.strikes(Fault.READ_FAILS, 0.1):
            return Outcome.FAILED
        cell = self._model.cells.get(record.slot)
        if cell is None or cell.record.key != record.key:
            return Outcome.ABSENT
        payload[:] = cell.payload
        if xxhash.xxh3_64_intdigest(cell.payload) != cell.record.checksum:
            return Outcome.CORRUPT
        return Outcome.OK

    def entries(self) -> Iterator[Entry]:
        newest: dict[ChunkKey, Entry] = {}
        if self._useless:
            return
        for cell in self._model.cells.values():
            key = cell.record.key
            newest.pop(key, None)
            newest[key] = Entry(key, cell.record.parent, cell.record.slot)
        if self._model.setting.strikes(Fault.DISK_SCAN_FAILS, 0.08):
            raise StorageError(SCAN_FAILURE)
        yield from newest.values()

    def reset(self, *, passing: bool = False) -> None:
        self._useless = True  # until what must be forgotten is
        if self._model.setting.strikes(Fault.RESET_FAILS, 0.2):
            raise StorageError("the disk can't be written")
        self._model.epoch += 1
        self._model.cells.clear()
        self._model.owes_reset = False
        self._useless = False

    def close(self) -> None:
        self._closed = True

    def crash(self) -> None:
        """The process is gone in the middle of whatever it did."""
        self.close()
        if self._writing:
            self._model.setting.seen.note(Fault.DISK_WRITE_TORN, len(self._writing))


def flipped(payload: bytes, bit: int) -> bytes:
    """The payload with one bit changed."""
    changed = bytearray(payload)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)
