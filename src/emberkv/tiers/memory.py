"""The reference storage: slots in this process's memory, for tests and as the plain statement.

What `SlotStorage` promises can be read here in full; the slab and others are held to it by one
conformance suite.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import xxhash

from emberkv.domain.types import Entry, Outcome, Slot
from emberkv.errors import ConfigError
from emberkv.tiers.base import Record


@dataclass(frozen=True, slots=True)
class _Held:
    record: Record
    payload: bytes


class MemoryStorage:
    """`slot_count` slots of `payload_bytes` in a dictionary; implements `SlotStorage`."""

    def __init__(self, slot_count: int, payload_bytes: int) -> None:
        if slot_count <= 0 or payload_bytes <= 0:
            raise ConfigError("a storage needs at least one slot of at least one byte")
        self._slot_count = slot_count
        self._payload_bytes = payload_bytes
        self._held: dict[Slot, _Held] = {}  # in the order of writing
        self._lock = threading.Lock()
        self._closed = False

    @property
    def slot_count(self) -> int:
        return self._slot_count

    @property
    def payload_bytes(self) -> int:
        return self._payload_bytes

    def write(
        self, records: Sequence[Record], payloads: Sequence[memoryview], /
    ) -> Sequence[Outcome]:
        """Keep a copy of each payload."""
        if self._closed:
            return [Outcome.SHED] * len(records)
        for record, payload in zip(records, payloads, strict=True):
            held = _Held(record, bytes(payload))
            with self._lock:
                self._held.pop(record.slot, None)
                self._held[record.slot] = held
        return [Outcome.OK] * len(records)

    def read(
        self, records: Sequence[Record], payloads: Sequence[memoryview], /
    ) -> Sequence[Outcome]:
        """Copy each payload out and compare its checksum with the record it was written with."""
        if self._closed:
            return [Outcome.SHED] * len(records)
        return [
            self._read_one(record, payload)
            for record, payload in zip(records, payloads, strict=True)
        ]

    def _read_one(self, record: Record, payload: memoryview) -> Outcome:
        with self._lock:
            held = self._held.get(record.slot)
        if held is None or held.record.key != record.key:
            return Outcome.ABSENT
        if xxhash.xxh3_64_intdigest(held.payload) != held.record.checksum:
            return Outcome.CORRUPT
        payload.cast("B")[:] = held.payload
        return Outcome.OK

    def entries(self) -> Iterator[Entry]:
        with self._lock:
            newest: dict[bytes, Entry] = {}
            for held in self._held.values():
                newest.pop(held.record.key, None)
                newest[held.record.key] = Entry(
                    held.record.key, held.record.parent, held.record.slot
                )
        yield from newest.values()

    def reset(self, *, passing: bool = False) -> None:
        with self._lock:
            self._held.clear()

    def close(self) -> None:
        self._closed = True
