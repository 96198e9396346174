"""The arena: host RAM in fixed slots, shared by the scheduler, every worker and the keeper.

    one memfd, no name in any file system
    ┌──────────────────────────────┬─────────────────────────────────────────┐
    │ headers: one per slot, 128 B │ rows: one per slot, page-aligned        │
    └──────────────────────────────┴─────────────────────────────────────────┘
      key, parent, state,            payload: rank 0's part, rank 1's part, …
      generation, tick  ← manager       written by the workers (store) and
      checksum, sealed,                 by the keeper (promotion)
      identity          ← keeper

A row is worth reading only while its header says READY. `checksum` is valid for the generation in
`sealed`; a restarted engine may take a slot over only if both agree and the row still matches.
`identity` is the checksum of what the header names and seals, so that a damaged key is no other's.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from emberkv.domain.types import MAX_KEY_BYTES, ChunkKey, Entry, Slot
from emberkv.errors import KeeperError

PAGE_BYTES: Final = 4096

FREE: Final = 0
WRITING: Final = 1
READY: Final = 2

HEADER: Final = np.dtype(
    [
        ("state", "<u1"),
        ("key_bytes", "<u1"),
        ("parent_bytes", "<u1"),
        ("reserved", "<u1", (5,)),
        ("key", "<u1", (MAX_KEY_BYTES,)),
        ("parent", "<u1", (MAX_KEY_BYTES,)),
        ("generation", "<u8"),
        ("tick", "<u8"),
        ("checksum", "<u8"),
        ("sealed", "<u8"),
        ("identity", "<u8"),
    ]
)
assert HEADER.itemsize == 128


def round_up(size_bytes: int, unit_bytes: int) -> int:
    """The smallest multiple of a unit that holds a size."""
    return -(-size_bytes // unit_bytes) * unit_bytes


@dataclass(frozen=True, slots=True)
class ArenaGeometry:
    """How many slots of how many payload bytes; all ranks of a chunk share one row."""

    slot_count: int
    chunk_bytes: int

    @property
    def row_bytes(self) -> int:
        return round_up(self.chunk_bytes, PAGE_BYTES)

    @property
    def header_bytes(self) -> int:
        return round_up(self.slot_count * HEADER.itemsize, PAGE_BYTES)

    @property
    def total_bytes(self) -> int:
        return self.header_bytes + self.slot_count * self.row_bytes

    @classmethod
    def within(cls, size_bytes: int, chunk_bytes: int) -> ArenaGeometry:
        """As many slots as fit into `size_bytes`, headers included; may be none."""
        per_slot = round_up(chunk_bytes, PAGE_BYTES) + HEADER.itemsize
        geometry = cls(max(0, size_bytes // per_slot), chunk_bytes)
        while geometry.slot_count and geometry.total_bytes > size_bytes:
            geometry = cls(geometry.slot_count - 1, chunk_bytes)
        return geometry


def create_memory(geometry: ArenaGeometry) -> int:
    """A new memfd of the geometry's size, unpopulated; the caller owns the descriptor.

    Nobody can change its size: no process that shares it can make another's access fault.
    """
    fd = os.memfd_create("emberkv-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, geometry.total_bytes)
        fcntl.fcntl(
            fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        )
    except OSError as error:
        os.close(fd)
        raise KeeperError(f"no memory for an arena of {geometry.total_bytes} bytes") from error
    return fd


class Arena:
    """A mapping of the arena's memory in this process. `close` unmaps; it does not free.

    The descriptor is duplicated, the caller's own stays the caller's. An arena that is forgotten
    gives its own back too.
    """

    def __init__(self, fd: int, geometry: ArenaGeometry) -> None:
        if os.fstat(fd).st_size != geometry.total_bytes:
            raise KeeperError("the arena's memory has another size than its geometry")
        self.geometry = geometry
        self.fd = os.dup(fd)
        self._close_fd = weakref.finalize(self, os.close, self.fd)
        self._map = mmap.mmap(self.fd, geometry.total_bytes)
        self._view = memoryview(self._map)
        self.headers: npt.NDArray[np.void] = np.frombuffer(
            self._map, dtype=HEADER, count=geometry.slot_count
        )
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)

    @property
    def rows_address(self) -> int:
        """Address of slot 0's row in this process."""
        return int(self.bytes.ctypes.data) + self.geometry.header_bytes

    def row(self, slot: Slot) -> memoryview:
        """A slot's payload, `chunk_bytes` long, writable; no copy."""
        start = self.geometry.header_bytes + slot * self.geometry.row_bytes
        return self._view[start : start + self.geometry.chunk_bytes]

    # ── headers; called by the manager only ──────────────────────────────────────────────────

    def mark_writing(
        self, slots: Sequence[Slot], keys: Sequence[ChunkKey], parents: Sequence[ChunkKey | None]
    ) -> None:
        """Name what will be written into slots; their old content is gone."""
        at = _indices(slots)
        headers = self.headers
        headers["state"][at] = WRITING
        headers["generation"][at] += 1
        headers["key_bytes"][at] = [len(key) for key in keys]
        headers["parent_bytes"][at] = [len(parent or b"") for parent in parents]
        headers["key"][at] = _padded(keys)
        headers["parent"][at] = _padded([parent or b"" for parent in parents])

    def mark_ready(self, slots: Sequence[Slot], tick: int) -> None:
        """Say that the bytes named by `mark_writing` are all there."""
        at = _indices(slots)
        self.headers["tick"][at] = tick + np.arange(len(slots), dtype=np.uint64)
        self.headers["state"][at] = READY

    def mark_used(self, slots: Sequence[Slot], tick: int) -> None:
        """Remember a use, for the order of eviction after a takeover."""
        self.headers["tick"][_indices(slots)] = tick + np.arange(len(slots), dtype=np.uint64)

    def mark_free(self, slots: Sequence[Slot]) -> None:
        """Say that slots hold nothing."""
        self.headers["state"][_indices(slots)] = FREE

    def entry(self, slot: Slot) -> Entry:
        """What a header names."""
        header = self.headers[slot]
        key = header["key"].tobytes()[: int(header["key_bytes"])]
        parent = header["parent"].tobytes()[: int(header["parent_bytes"])]
        return Entry(ChunkKey(key), ChunkKey(parent) if parent else None, slot)

    def discard(self) -> None:
        """Give the memory back to the kernel now, whoever still maps it; they read zeros."""
        self._map.madvise(mmap.MADV_REMOVE)
        self._close_fd()

    def close(self) -> None:
        """Unmap; every row and header view given out must be gone."""
        del self.headers, self.bytes
        self._view.release()
        self._map.close()
        self._close_fd()


def _indices(slots: Sequence[Slot]) -> npt.NDArray[np.int64]:
    return np.asarray(slots, dtype=np.int64)  # also where there are none


def _padded(keys: Sequence[bytes]) -> npt.NDArray[np.uint8]:
    joined = b"".join(key.ljust(MAX_KEY_BYTES, b"\0") for key in keys)
    return np.frombuffer(joined, dtype=np.uint8).reshape(len(keys), MAX_KEY_BYTES)
