"""A disk tier's storage: fixed slots in one preallocated file, one record per slot beside it.

Writing a slot takes three steps: its record is cleared, the payload is written, the new record is
written. None of them waits for the device. A crash between them leaves the slot empty; a power
loss may keep any of the three, and then the payload does not match the checksum in the record.
Reading therefore always compares, and what does not match is never handed out.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import xxhash

from emberkv.domain.types import ChunkKey, Entry, Outcome, Slot
from emberkv.errors import InvariantError, StorageError
from emberkv.tiers.base import Record
from emberkv.tiers.block_io import NO_SPACE, read_at, write_at
from emberkv.tiers.format import (
    EMPTY_RECORD,
    HEADER_BYTES,
    MAX_SEQUENCE,
    RECORD_BYTES,
    SlabHeader,
    SlotRecord,
    decode_records,
    find_payload_checksum,
)
from emberkv.tiers.payload_file import PayloadFile
from emberkv.tiers.slab_files import SlabFiles, storage_errors, write_header

SCAN_RECORDS: Final = 1 << 16
SPACE_CHECK_S: Final = 1.0


class Slab:
    """The slots of one namespace on local disk; implements `SlotStorage`.

    Owns `files` until `close`. Any number of threads may call; nothing but counters is locked.
    After a read that is not OK the payload's content is undefined.
    """

    def __init__(
        self,
        files: SlabFiles,
        *,
        reserve_bytes: int = 0,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take over `files`.

        Where the file system could not preallocate, writes end as FULL while it has less than
        `reserve_bytes` free. Reads the whole index once: about a second per million slots. Raises
        `StorageError`.
        """
        self._files = files
        self._geometry = files.header.geometry
        self._slot_count = self._geometry.slot_count
        self._payload_bytes = self._geometry.payload_bytes
        self._payloads = PayloadFile(files.data_fd, self._geometry, files.direct_io)
        self._epoch = files.header.epoch
        self._space = _FreeSpace(files, reserve_bytes, monotonic_s)
        self._lock = threading.Lock()
        self._reset_lock = threading.Lock()
        self._calls_inside = 0
        self._closed = False
        self._sealed = False
        if self._epoch % 2:  # what follows a passing reset has passed
            self._epoch += 1
            self._write_epoch()
        with storage_errors("read the index of", files.directory):
            records = scan_records(files.index_fd, self.slot_count, self._epoch)
            self._next_sequence = 1 + max((record.sequence for record in records), default=0)

    @property
    def slot_count(self) -> int:
        return self._slot_count

    @property
    def payload_bytes(self) -> int:
        return self._payload_bytes

    @property
    def direct_io(self) -> bool:
        """Whether payloads bypass the page cache."""
        return self._files.direct_io

    @property
    def preallocated(self) -> bool:
        """Whether every slot has its disk blocks, so that no write can run out of space."""
        return self._files.preallocated

    def write(
        self, records: Sequence[Record], payloads: Sequence[memoryview], /
    ) -> Sequence[Outcome]:
        """Store one payload per record; `checksum` of a record must be that of its payload.

        FULL: no space; FAILED: another error of the device; SHED: closed, or a reset failed. The
        slot of a chunk that is not OK is empty.
        """
        outcomes = [Outcome.SHED] * len(records)
        self._require_fitting(records, payloads)
        if not self._enter():
            return outcomes
        try:
            with self._lock:
                epoch, sequence = self._epoch, self._next_sequence
                self._next_sequence += len(records)
                sealed = self._sealed
            if sealed:
                return outcomes
            if self._space.is_low():
                return [Outcome.FULL] * len(records)
            for first_slot, run in self._runs(records):
                rows = [
                    SlotRecord(
                        records[at].key,
                        records[at].parent,
                        records[at].slot,
                        epoch,
                        min(sequence + at, MAX_SEQUENCE),
                        records[at].checksum,
                    ).encode()
                    for at in run
                ]
                written = self._write_run(first_slot, rows, [payloads[at] for at in run])
                for at, outcome in zip(run, written, strict=True):
                    outcomes[at] = outcome
            return outcomes
        finally:
            self._leave()

    def read(
        self, records: Sequence[Record], payloads: Sequence[memoryview], /
    ) -> Sequence[Outcome]:
        """Fill one payload per record and compare its checksum with the slot's own record.

        ABSENT: the slot is empty, holds another key or is of an epoch before a reset; CORRUPT:
        record or payload is not what was written; FAILED: the device returned an error.
        """
        outcomes = [Outcome.SHED] * len(records)
        self._require_fitting(records, payloads)
        if not self._enter():
            return outcomes
        try:
            epoch = self._epoch
            for first_slot, run in self._runs(records):
                wanted = [records[at].key for at in run]
                rooms = [payloads[at] for at in run]
                found = self._read_run(first_slot, wanted, rooms, epoch)
                for at, outcome in zip(run, found, strict=True):
                    outcomes[at] = outcome
            # What was reset while it was being read must not come back as a hit.
            return outcomes if epoch == self._epoch else [Outcome.ABSENT] * len(records)
        finally:
            self._leave()

    def entries(self) -> Iterator[Entry]:
        """Every chunk of the present epoch, least recently written first, each key once.

        Reads the whole index, about a second per million slots. Raises `StorageError`.
        """
        if not self._enter():
            raise StorageError(f"{self._files.directory}: the slab is closed")
        try:
            with storage_errors("read the index of", self._files.directory):
                found = scan_records(self._files.index_fd, self.slot_count, self._epoch)
        finally:
            self._leave()
        for record in newest_of_each_key(found):
            yield Entry(record.key, record.parent, Slot(record.slot))

    def reset(self, *, passing: bool = False) -> None:
        """Forget everything by raising the epoch, on the device before this returns.

        To an odd one if it is `passing`: who opens the slab again then raises it once more.

        Writes under way end in the old epoch, those that begin meanwhile are SHED. Raises
        `StorageError` if the epoch can't be made durable; until a later reset can, reads find
        nothing and writes are SHED.
        """
        if not self._enter():
            raise StorageError(f"{self._files.directory}: the slab is closed")
        try:
            # Other calls never wait for this lock, so none hangs with a device that hangs here.
            with self._reset_lock:
                with self._lock:
                    self._epoch += 1 if self._epoch % 2 != passing else 2
                    self._sealed = True
                self._write_epoch()
                self._sealed = False
        finally:
            self._leave()

    def _write_epoch(self) -> None:
        header = SlabHeader(self._geometry, self._epoch, self._files.header.digest)
        with storage_errors("reset", self._files.directory):
            write_header(self._files.index_fd, header)

    def close(self) -> None:
        """Take no more calls; the files are closed and the lock is freed with the last call inside.

        Waits for nothing, so it returns even if the device hangs.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            idle = self._calls_inside == 0
        if idle:
            self._files.close()

    def _enter(self) -> bool:
        with self._lock:
            if self._closed:
                return False
            self._calls_inside += 1
            return True

    def _leave(self) -> None:
        with self._lock:
            self._calls_inside -= 1
            last = self._closed and self._calls_inside == 0
        if last:
            self._files.close()

    def _require_fitting(self, records: Sequence[Record], payloads: Sequence[memoryview]) -> None:
        if len(records) != len(payloads):
            raise InvariantError(f"{len(records)} records with {len(payloads)} payloads")
        slot_count, payload_bytes = self._slot_count, self._payload_bytes
        for record, payload in zip(records, payloads, strict=True):
            if not 0 <= record.slot < slot_count:
                raise InvariantError(f"slot {record.slot} of {slot_count}")
            if payload.nbytes != payload_bytes:
                raise InvariantError(f"{payload.nbytes} bytes for {payload_bytes}")

    def _runs(self, records: Sequence[Record]) -> Iterator[tuple[int, list[int]]]:
        """Runs of consecutive slots: the first slot, and the positions in `records` in order."""
        slots = [record.slot for record in records]
        limit = self._payloads.run_slots
        run: list[int] = []
        for at in sorted(range(len(slots)), key=slots.__getitem__):
            if run and (slots[at] != slots[run[-1]] + 1 or len(run) == limit):
                yield slots[run[0]], run
                run = []
            run.append(at)
        if run:
            yield slots[run[0]], run

    def _write_run(
        self, first_slot: int, rows: Sequence[bytes], payloads: Sequence[memoryview]
    ) -> list[Outcome]:
        """Write consecutive slots; if the device refuses them together, one by one."""
        index_fd = self._files.index_fd
        offset = HEADER_BYTES + first_slot * RECORD_BYTES
        try:
            write_at(index_fd, [memoryview(EMPTY_RECORD * len(rows))], offset)
            self._payloads.write(first_slot, payloads)
            write_at(index_fd, [memoryview(b"".join(rows))], offset)
        except OSError as error:
            if len(rows) > 1:
                return [
                    self._write_run(first_slot + at, [row], [payload])[0]
                    for at, (row, payload) in enumerate(zip(rows, payloads, strict=True))
                ]
            return [Outcome.FULL if error.errno in NO_SPACE else Outcome.FAILED]
        return [Outcome.OK] * len(rows)

    def _read_run(
        self,
        first_slot: int,
        keys: Sequence[ChunkKey],
        payloads: Sequence[memoryview],
        epoch: int,
    ) -> list[Outcome]:
        """Read and verify the consecutive slots that hold the keys asked for."""
        offset = HEADER_BYTES + first_slot * RECORD_BYTES
        try:
            rows = os.pread(self._files.index_fd, len(keys) * RECORD_BYTES, offset)
        except OSError:
            return [Outcome.FAILED] * len(keys)
        outcomes: list[Outcome] = []
        checksums: list[int] = []
        for at, key in enumerate(keys):
            row = rows[at * RECORD_BYTES : (at + 1) * RECORD_BYTES]
            try:
                checksum = find_payload_checksum(row, first_slot + at, key, epoch)
            except StorageError:
                outcome, checksum = Outcome.CORRUPT, None
            else:
                outcome = Outcome.ABSENT if checksum is None else Outcome.OK
            outcomes.append(outcome)
            checksums.append(checksum or 0)
        start = 0
        for is_there, group in itertools.groupby(outcomes, lambda it: it is Outcome.OK):
            end = start + len(list(group))
            if is_there:
                outcomes[start:end] = self._read_verified(
                    first_slot + start, payloads[start:end], checksums[start:end]
                )
            start = end
        return outcomes

    def _read_verified(
        self, first_slot: int, payloads: Sequence[memoryview], checksums: Sequence[int]
    ) -> list[Outcome]:
        """Read and verify consecutive slots; if the device refuses them together, one by one."""
        try:
            self._payloads.read(first_slot, payloads)
        except OSError:
            if len(payloads) == 1:
                return [Outcome.FAILED]
            return [
                self._read_verified(first_slot + at, [payload], [checksum])[0]
                for at, (payload, checksum) in enumerate(zip(payloads, checksums, strict=True))
            ]
        return [
            Outcome.OK if xxhash.xxh3_64_intdigest(payload) == checksum else Outcome.CORRUPT
            for payload, checksum in zip(payloads, checksums, strict=True)
        ]


class _FreeSpace:
    """Whether a file system that could not preallocate runs low; asks it once a second at most."""

    def __init__(
        self, files: SlabFiles, reserve_bytes: int, monotonic_s: Callable[[], float]
    ) -> None:
        self._fd = files.index_fd
        self._reserve_bytes = 0 if files.preallocated else reserve_bytes
        self._monotonic_s = monotonic_s
        self._next_check_s = float("-inf")
        self._low = False

    def is_low(self) -> bool:
        if not self._reserve_bytes:
            return False
        now_s = self._monotonic_s()
        if now_s >= self._next_check_s:
            self._next_check_s = now_s + SPACE_CHECK_S
            try:
                status = os.fstatvfs(self._fd)
                self._low = status.f_bavail * status.f_frsize < self._reserve_bytes
            except OSError:
                self._low = True
        return self._low


def scan_records(index_fd: int, slot_count: int, epoch: int) -> list[SlotRecord]:
    """Every sound record of `epoch` in an index, in the order of slots. Raises `OSError`."""
    found: list[SlotRecord] = []
    for first_slot, raw in index_stretches(index_fd, slot_count):
        found.extend(decode_records(raw, first_slot, epoch))
    return found


def index_stretches(index_fd: int, slot_count: int) -> Iterator[tuple[int, bytes]]:
    """The records of an index as they stand, with the first slot of each. Raises `OSError`.

    Ends with the file, however many slots there should be.
    """
    for first_slot in range(0, slot_count, SCAN_RECORDS):
        count = min(SCAN_RECORDS, slot_count - first_slot)
        raw = bytearray(count * RECORD_BYTES)
        with memoryview(raw) as view:
            got = read_at(index_fd, [view], HEADER_BYTES + first_slot * RECORD_BYTES)
        if not got:
            return
        yield first_slot, bytes(raw[:got])


def newest_of_each_key(records: Sequence[SlotRecord]) -> list[SlotRecord]:
    """The newest record of each key, least recently written first."""
    newest: dict[ChunkKey, SlotRecord] = {}
    for record in sorted(records, key=lambda record: record.sequence):
        newest.pop(record.key, None)
        newest[record.key] = record
    return list(newest.values())
