"""The protocol of a storage with fixed slots, and the record it keeps beside a payload."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from emberkv.domain.types import ChunkKey, Entry, Outcome, Slot


@dataclass(frozen=True, slots=True)
class Record:
    """What a storage is told about one chunk that it writes or reads.

    `checksum` is the xxh3-64 of the payload; a reader passes 0, the storage compares with its own.
    """

    key: ChunkKey
    parent: ChunkKey | None
    slot: Slot
    checksum: int = 0


class SlotStorage(Protocol):
    """A place with `slot_count` slots of `payload_bytes` each, addressed by slot.

    Calls block and may be made from several threads at once, never two for the same slot. No call
    raises for a fault of the device: the fault is an `Outcome` per chunk, in the order given.
    """

    @property
    def slot_count(self) -> int: ...

    @property
    def payload_bytes(self) -> int: ...

    def write(
        self, records: Sequence[Record], payloads: Sequence[memoryview], /
    ) -> Sequence[Outcome]:
        """Store one payload per record. A failed write leaves the slot empty, never half valid."""
        ...

    def read(
        self, records: Sequence[Record], payloads: Sequence[memoryview], /
    ) -> Sequence[Outcome]:
        """Fill one payload per record and verify it: OK means these are the bytes of that key."""
        ...

    def entries(self) -> Iterator[Entry]:
        """Everything the storage's own records name, least recently written first."""
        ...

    def reset(self, *, passing: bool = False) -> None:
        """Forget everything, durably, before returning. Raises `StorageError` if it can't.

        What is stored after a `passing` reset is forgotten when the storage is opened again.
        """
        ...

    def close(self) -> None: ...
