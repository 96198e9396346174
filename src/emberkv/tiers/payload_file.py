"""The payloads of a slab: fixed slots in one file, moved past the page cache where that works."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from typing import Final

from emberkv.tiers.block_io import AlignedBuffers, read_at, write_at
from emberkv.tiers.format import SlabGeometry

RUN_BYTES: Final = 1 << 20
"""At most so many bytes, but at least one slot, go to the device in one call.

Enough for its full speed; more only pushes the payload out of the processor's cache before its
checksum is read there.
"""


class PayloadFile:
    """Slots of an open `slab.data`; any thread may call, the caller closes the file.

    Payloads that can go between the caller's memory and the device as they are do so; the others,
    because of their size or of where they lie in memory, pass through an aligned buffer.
    """

    def __init__(self, fd: int, geometry: SlabGeometry, direct_io: bool) -> None:
        self._fd = fd
        self._direct_io = direct_io
        self._stride_bytes = geometry.stride_bytes
        self._whole_strides = geometry.stride_bytes == geometry.payload_bytes
        self.run_slots = max(1, RUN_BYTES // self._stride_bytes)
        """How many slots one call may name."""
        self._buffers = AlignedBuffers(self.run_slots * self._stride_bytes)

    def write(self, first_slot: int, payloads: Sequence[memoryview]) -> None:
        """Write consecutive slots. Raises `OSError`; some of them may then be written."""
        offset = first_slot * self._stride_bytes
        if self._whole_strides:
            try:
                write_at(self._fd, payloads, offset)
            except OSError as error:
                self._require_misaligned(error)
            else:
                self._drop_cached(offset, len(payloads))
                return
        self._write_through_buffer(payloads, offset)
        self._drop_cached(offset, len(payloads))

    def read(self, first_slot: int, payloads: Sequence[memoryview]) -> None:
        """Fill `payloads` from consecutive slots. Raises `OSError`.

        A payload that lies beyond the file's end is undefined, as its checksum will tell.
        """
        offset = first_slot * self._stride_bytes
        if self._whole_strides:
            try:
                read_at(self._fd, payloads, offset)
            except OSError as error:
                self._require_misaligned(error)
            else:
                self._drop_cached(offset, len(payloads))
                return
        self._read_through_buffer(payloads, offset)
        self._drop_cached(offset, len(payloads))

    def _require_misaligned(self, error: OSError) -> None:
        """Go on only after what the kernel says to direct I/O from memory that is not aligned."""
        if not self._direct_io or error.errno != errno.EINVAL:
            raise error

    def _write_through_buffer(self, payloads: Sequence[memoryview], offset: int) -> None:
        stride = self._stride_bytes
        buffer = self._buffers.take()
        with memoryview(buffer) as view, view[: len(payloads) * stride] as used:
            for at, payload in enumerate(payloads):
                used[at * stride : at * stride + payload.nbytes] = payload.cast("B")
            write_at(self._fd, [used], offset)
        self._buffers.give_back(buffer)

    def _read_through_buffer(self, payloads: Sequence[memoryview], offset: int) -> None:
        stride = self._stride_bytes
        buffer = self._buffers.take()
        with memoryview(buffer) as view, view[: len(payloads) * stride] as used:
            read_at(self._fd, [used], offset)
            for at, payload in enumerate(payloads):
                payload.cast("B")[:] = used[at * stride : at * stride + payload.nbytes]
        self._buffers.give_back(buffer)

    def _drop_cached(self, offset: int, slots: int) -> None:
        """Without direct I/O, keep the page cache from holding a second copy of the tier."""
        if not self._direct_io:
            length = slots * self._stride_bytes
            os.posix_fadvise(self._fd, offset, length, os.POSIX_FADV_DONTNEED)
