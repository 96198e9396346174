"""Whole reads and writes at an offset, direct I/O, and preallocation, for local files.

Files are never mapped: a truncated or failing file must be an error code, not a signal.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from emberkv.tiers.format import ALIGNMENT_BYTES, PROBE_FILE

IOV_MAX: Final = os.sysconf("SC_IOV_MAX")
NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT)
_NOT_SUPPORTED: Final = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_libc.fallocate.restype = ctypes.c_int


def read_at(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Fill `buffers` from `offset` on; the bytes read, fewer than asked only at the file's end."""
    wanted = sum([buffer.nbytes for buffer in buffers])
    done = 0
    while done < wanted:
        left = _after(buffers, done) if done else buffers
        got = os.preadv(fd, left[:IOV_MAX], offset + done)
        if got == 0:
            break
        done += got
    return done


def write_at(fd: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Write all of `buffers` from `offset` on. Raises `OSError`; a part may then be written."""
    wanted = sum([buffer.nbytes for buffer in buffers])
    done = 0
    while done < wanted:
        left = _after(buffers, done) if done else buffers
        put = os.pwritev(fd, left[:IOV_MAX], offset + done)
        if put == 0:
            raise OSError(errno.EIO, "the device took no bytes")
        done += put


def _after(buffers: Sequence[memoryview], count: int) -> list[memoryview]:
    """What is left of `buffers` once `count` bytes are done."""
    for position, buffer in enumerate(buffers):
        if count < buffer.nbytes:
            rest = list(buffers[position:])
            rest[0] = buffer[count:]
            return rest
        count -= buffer.nbytes
    return []


class AlignedBuffers:
    """A pool of page-aligned buffers of one size; any thread may take and give back."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._idle: deque[mmap.mmap] = deque()

    def take(self) -> mmap.mmap:
        try:
            return self._idle.pop()
        except IndexError:
            return mmap.mmap(-1, self._size_bytes)

    def give_back(self, buffer: mmap.mmap) -> None:
        self._idle.append(buffer)


def preallocate(fd: int, size_bytes: int) -> bool:
    """Give the file blocks up to `size_bytes`; False where the file system can't (then sparse).

    Raises `OSError`, with `ENOSPC` if there is no room.
    """
    while _libc.fallocate(fd, 0, 0, size_bytes) != 0:
        code = ctypes.get_errno()
        if code in _NOT_SUPPORTED:
            os.ftruncate(fd, max(size_bytes, os.fstat(fd).st_size))
            return False
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
    return True


def is_allocated(fd: int, size_bytes: int) -> bool:
    """Whether the file owns blocks for all of `size_bytes`, so that writing takes no new space."""
    return os.fstat(fd).st_blocks * 512 >= size_bytes


def supports_direct_io(directory_fd: int) -> bool:
    """Whether a real aligned write and read with `O_DIRECT` work in this directory."""
    with suppress(FileNotFoundError):
        os.unlink(PROBE_FILE, dir_fd=directory_fd)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_DIRECT
    try:
        fd = os.open(PROBE_FILE, flags, 0o600, dir_fd=directory_fd)
    except OSError:
        _unlink_probe(directory_fd)
        return False
    try:
        with mmap.mmap(-1, ALIGNMENT_BYTES) as block, memoryview(block) as view:
            block.write(b"\x5a" * ALIGNMENT_BYTES)
            write_at(fd, [view], 0)
            view[:] = bytes(ALIGNMENT_BYTES)
            got = read_at(fd, [view], 0)
            return got == ALIGNMENT_BYTES and view[0] == 0x5A and view[-1] == 0x5A
    except OSError as error:
        # A full file system took the open itself with O_DIRECT; the slab has its blocks already.
        return error.errno in NO_SPACE
    finally:
        os.close(fd)
        _unlink_probe(directory_fd)


def _unlink_probe(directory_fd: int) -> None:
    # Some file systems create the file and then refuse to open it with O_DIRECT.
    with suppress(OSError):
        os.unlink(PROBE_FILE, dir_fd=directory_fd)
