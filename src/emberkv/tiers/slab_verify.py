"""Read every payload of a slab and compare it with its checksum, while its owner serves."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import xxhash

from emberkv.errors import StorageError
from emberkv.tiers.block_io import read_at
from emberkv.tiers.format import (
    DATA_FILE,
    HEADER_BYTES,
    INDEX_FILE,
    RECORD_BYTES,
    SlotRecord,
    damaged_slots,
    decode_record,
)
from emberkv.tiers.slab import index_stretches, scan_records
from emberkv.tiers.slab_files import (
    check_sizes,
    open_slab_file,
    opened_directory,
    read_header,
    storage_errors,
)


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """How the chunks of a slab fared; `changed` ones were rewritten meanwhile and not judged."""

    sound: int
    changed: int
    corrupt_slots: tuple[int, ...]
    unreadable_slots: tuple[int, ...]
    damaged_records: tuple[int, ...]

    @property
    def is_sound(self) -> bool:
        return not (self.corrupt_slots or self.unreadable_slots or self.damaged_records)


def verify_slab(directory: Path, progress: Callable[[int, int], None]) -> VerifyReport:
    """Check every chunk of the present epoch; `progress` gets chunks checked and chunks in all.

    Needs no lock and disturbs no owner: a payload that does not match is counted only if its
    record is the same afterwards, and an owner clears the record before it touches the payload.
    Raises `StorageError` if the slab can't be read at all.
    """
    with (
        opened_directory(directory) as directory_fd,
        storage_errors("verify", directory),
        contextlib.ExitStack() as files,
    ):
        index_fd = open_slab_file(directory, directory_fd, INDEX_FILE, os.O_RDONLY)
        files.callback(os.close, index_fd)
        header = read_header(directory, index_fd)
        try:
            data_fd = open_slab_file(directory, directory_fd, DATA_FILE, os.O_RDONLY | os.O_DIRECT)
        except OSError:
            data_fd = open_slab_file(directory, directory_fd, DATA_FILE, os.O_RDONLY)
        files.callback(os.close, data_fd)
        check_sizes(directory, data_fd, index_fd, header.geometry)
        records = scan_records(index_fd, header.geometry.slot_count, header.epoch)
        stride_bytes = header.geometry.stride_bytes
        block = files.enter_context(mmap.mmap(-1, stride_bytes))
        view = files.enter_context(memoryview(block))
        payload = files.enter_context(view[: header.geometry.payload_bytes])
        sound = changed = 0
        corrupt: list[int] = []
        unreadable: list[int] = []
        for done, record in enumerate(records, start=1):
            try:
                got = read_at(data_fd, [view], record.slot * stride_bytes)
                matches = (
                    got == stride_bytes
                    and xxhash.xxh3_64_intdigest(payload) == record.payload_checksum
                )
                failed = None
            except OSError:
                matches, failed = False, unreadable
            if matches:
                sound += 1
            elif _still_there(index_fd, record):
                (corrupt if failed is None else failed).append(record.slot)
            else:
                changed += 1
            progress(done, len(records))
        return VerifyReport(
            sound,
            changed,
            tuple(corrupt),
            tuple(unreadable),
            _damaged_records(index_fd, header.geometry.slot_count),
        )


def _damaged_records(index_fd: int, slot_count: int) -> tuple[int, ...]:
    """Slots with a record that is neither empty nor sound, and still is not at a second look.

    An owner may be writing a record that was read in two halves.
    """
    return tuple(
        slot
        for first_slot, raw in index_stretches(index_fd, slot_count)
        for slot in damaged_slots(raw, first_slot)
        if damaged_slots(_raw_record(index_fd, slot), slot)
    )


def _raw_record(index_fd: int, slot: int) -> bytes:
    return os.pread(index_fd, RECORD_BYTES, HEADER_BYTES + slot * RECORD_BYTES)


def _still_there(index_fd: int, record: SlotRecord) -> bool:
    """Whether the index still says the same of the slot."""
    try:
        return decode_record(_raw_record(index_fd, record.slot), record.slot) == record
    except StorageError:
        return False
