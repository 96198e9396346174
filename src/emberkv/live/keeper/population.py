"""Gets the arena's memory from the kernel, piece by piece, before anyone touches it.

Memory that is only promised would be found missing by a signal in the middle of a copy. So a slot
is handed out only after its pages are there; the first piece is waited for at start, the rest
comes in the background while the server already works with what there is.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable
from typing import Final

import numpy as np

from emberkv.live.arena import PAGE_BYTES, Arena

PIECE_BYTES: Final = 64 << 20
_MADV_POPULATE_WRITE: Final = 23
_UNKNOWN_TO_KERNEL: Final = errno.EINVAL

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Population:
    """Populates slots in order, on a thread of its own, from `first_slot` on.

    `on_piece(first_slot, slot_count)` and `on_end(reason)` are called on that thread; a reason
    means that no more memory is to be had. `populated_slots` counts what may be used.
    """

    def __init__(
        self,
        arena: Arena,
        first_slot: int,
        on_piece: Callable[[int, int], None],
        on_end: Callable[[str | None], None],
    ) -> None:
        self._arena = arena
        self.populated_slots = first_slot
        self._on_piece = on_piece
        self._on_end = on_end
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="populate", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ask for no more; returns when the present piece is done."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        arena, geometry = self._arena, self._arena.geometry
        address = int(arena.bytes.ctypes.data)
        # Helps where the kernel gives shared memory huge pages on advice; an error changes nothing.
        _libc.madvise(address, geometry.total_bytes, mmap.MADV_HUGEPAGE)
        per_piece = max(1, PIECE_BYTES // geometry.row_bytes)
        start = 0
        while self.populated_slots < geometry.slot_count and not self._stopped.is_set():
            first = self.populated_slots
            count = min(per_piece, geometry.slot_count - first)
            end = geometry.header_bytes + (first + count) * geometry.row_bytes
            if start:
                start = geometry.header_bytes + first * geometry.row_bytes
            try:
                populate(arena, start, end)
            except OSError as error:
                self._on_end(error.strerror or str(error))
                return
            start = end
            self.populated_slots = first + count
            self._on_piece(first, count)
        self._on_end(None)


def populate(arena: Arena, start: int, end: int) -> None:
    """Have the pages of a stretch of the arena backed by memory. Raises `OSError`."""
    address = int(arena.bytes.ctypes.data) + start
    while _libc.madvise(address, end - start, _MADV_POPULATE_WRITE):
        code = ctypes.get_errno()
        if code == _UNKNOWN_TO_KERNEL:
            os.posix_fallocate(arena.fd, start, end - start)
            touched = arena.bytes[start:end:PAGE_BYTES]
            np.bitwise_or(touched, 0, out=touched)
            return
        if code not in (errno.EINTR, errno.EAGAIN):
            raise OSError(code, os.strerror(code))
