"""Pages of the arena: backed by memory, and mapped, before anyone's copy has to wait for that.

A copy into a page that is not mapped in its process runs at a quarter of the speed; one into a
page that memory can't be found for ends the process with a signal.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from typing import Final

import numpy as np

from emberkv.live.arena import PAGE_BYTES, Arena

MAP_STEP_BYTES: Final = 16 << 20
"""Other threads of the process that map or unmap something wait for no more than this."""

_MADV_POPULATE_READ: Final = 22
_MADV_POPULATE_WRITE: Final = 23

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def prefer_huge_pages(arena: Arena) -> None:
    """Ask for huge pages; changes nothing where the kernel gives shared memory none."""
    _libc.madvise(_address(arena), arena.geometry.total_bytes, mmap.MADV_HUGEPAGE)


def back_with_memory(arena: Arena, start: int, end: int) -> None:
    """Have a stretch of the arena, by offsets, backed by memory and mapped in this process.

    Raises `OSError` if there is no memory. Nobody may use the stretch yet.
    """
    while _libc.madvise(_address(arena) + start, end - start, _MADV_POPULATE_WRITE):
        code = ctypes.get_errno()
        if code == errno.EINVAL:  # older than Linux 5.14
            os.posix_fallocate(arena.fd, start, end - start)
            touched = arena.bytes[start:end:PAGE_BYTES]
            np.bitwise_or(touched, 0, out=touched)
            return
        if code not in (errno.EINTR, errno.EAGAIN):
            raise OSError(code, os.strerror(code))


def map_slots(arena: Arena, first_slot: int, slot_count: int) -> None:
    """Have slots that are backed mapped in this process too, contents untouched.

    About 0.2 s per GiB without the interpreter lock; does nothing before Linux 5.14.
    """
    geometry = arena.geometry
    start = geometry.header_bytes + first_slot * geometry.row_bytes
    end = start + slot_count * geometry.row_bytes
    for at in range(start, end, MAP_STEP_BYTES):
        length = min(MAP_STEP_BYTES, end - at)
        if _libc.madvise(_address(arena) + at, length, _MADV_POPULATE_READ):
            return


def _address(arena: Arena) -> int:
    return arena.rows_address - arena.geometry.header_bytes
