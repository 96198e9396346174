"""The files of one slab: made, opened, checked, resized, locked and removed.

Every file is opened relative to its directory and no symbolic link is followed. A slab has one
owner at a time, the holder of `lock`; looking at it (`emberkv inspect`, `emberkv verify`) needs
no lock.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from emberkv.errors import StorageError
from emberkv.tiers.block_io import (
    is_allocated,
    preallocate,
    read_at,
    supports_direct_io,
    write_at,
)
from emberkv.tiers.format import (
    DATA_FILE,
    HEADER_BYTES,
    INDEX_FILE,
    LOCK_FILE,
    MAX_NAMESPACE_FILE_BYTES,
    NAMESPACE_FILE,
    OUR_FILES,
    START_AFRESH,
    SlabGeometry,
    SlabHeader,
    StoredNamespace,
    decode_header,
    decode_namespace,
    encode_namespace,
    has_index_magic,
)

LOCK_WAIT_S: Final = 0.5
_LOCK_PAUSE_S: Final = 0.02

_REASONS: Final = {
    errno.EACCES: "permission denied; give this user read and write access",
    errno.EPERM: "not permitted; give this user ownership of the directory",
    errno.EROFS: "the file system is read-only; remount it or use another directory",
    errno.ENOSPC: "the file system is full; free some space or use a smaller tier",
    errno.EDQUOT: "the disk quota is used up; free some space or use a smaller tier",
    errno.EFBIG: "the file would be larger than the limit of this file system or process",
    errno.ELOOP: "a symbolic link stands where a file of the slab should be; remove it",
}


@contextlib.contextmanager
def storage_errors(doing: str, place: Path) -> Iterator[None]:
    """Turn an `OSError` into a `StorageError` that says what was being done, where and why not."""
    try:
        yield
    except OSError as error:
        reason = _REASONS.get(error.errno or 0, error.strerror or str(error))
        raise StorageError(f"can't {doing} {place}: {reason}") from error


@dataclass(frozen=True, slots=True)
class SlabFiles:
    """The open files of a slab, held by its owner until `close`."""

    directory: Path
    data_fd: int
    index_fd: int
    lock_fd: int
    header: SlabHeader
    direct_io: bool
    preallocated: bool

    def close(self) -> None:
        """Close the files and give up the lock."""
        with contextlib.suppress(OSError):
            os.utime(self.lock_fd)
        for fd in (self.data_fd, self.index_fd, self.lock_fd):
            os.close(fd)


@contextlib.contextmanager
def opened_directory(directory: Path) -> Iterator[int]:
    """A descriptor of `directory`, which must be a real directory and no link."""
    with storage_errors("open", directory):
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def open_file(directory_fd: int, name: str, flags: int) -> int:
    """Open a regular file of a slab by name. Raises `OSError`; `EINVAL` if it is something else."""
    # O_NONBLOCK: a FIFO put in place of a file must not hang the opener.
    every = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    fd = os.open(name, flags | every, 0o600, dir_fd=directory_fd)
    if os.fstat(fd).st_mode & 0o170000 != 0o100000:
        os.close(fd)
        raise OSError(errno.EINVAL, f"{name} is not a regular file")
    return fd


def try_lock(directory_fd: int) -> int | None:
    """The descriptor that owns the slab's lock, or None if another process owns it."""
    while True:
        fd = open_file(directory_fd, LOCK_FILE, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        # The file may have been removed, with its slab, between opening and locking it.
        with contextlib.suppress(FileNotFoundError):
            now = os.stat(LOCK_FILE, dir_fd=directory_fd, follow_symlinks=False)
            if now.st_ino == os.fstat(fd).st_ino:
                return fd
        os.close(fd)


def lock_slab(directory: Path, directory_fd: int) -> int:
    """Own the slab's lock. Raises `StorageError` if another process does.

    Waits up to `LOCK_WAIT_S`, since a process that is just being killed or that only looks at the
    slab holds the lock for a moment.
    """
    deadline_s = time.monotonic() + LOCK_WAIT_S
    while True:
        fd = try_lock(directory_fd)
        if fd is not None:
            break
        if time.monotonic() >= deadline_s:
            raise StorageError(
                f"{directory}: the slab is in use by another engine{_owner(directory_fd)}; stop it "
                "or give this one a directory of its own"
            )
        time.sleep(_LOCK_PAUSE_S)
    with contextlib.suppress(OSError):  # who owns it is told as a courtesy
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def _first_bytes(directory_fd: int, name: str, count: int) -> bytes:
    """The beginning of a file in a slab's directory. Raises `OSError`."""
    fd = open_file(directory_fd, name, os.O_RDONLY)
    try:
        return os.pread(fd, count, 0)
    finally:
        os.close(fd)


def _owner(directory_fd: int) -> str:
    with contextlib.suppress(OSError):
        pid = _first_bytes(directory_fd, LOCK_FILE, 20).strip().decode(errors="replace")
        if pid.isdigit():
            return f" (process {pid})"
    return ""


def is_locked(directory_fd: int) -> bool:
    """Whether a process owns the slab now."""
    try:
        fd = open_file(directory_fd, LOCK_FILE, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def is_slab(directory: Path) -> bool:
    """Whether this is a slab directory of emberkv: a real directory with a file of ours in it.

    Its index says so, or where that is damaged, `namespace.json`.
    """
    try:
        with opened_directory(directory) as directory_fd:
            return _has_our_index(directory_fd) or _has_our_namespace(directory, directory_fd)
    except (StorageError, OSError):
        return False


def _has_our_index(directory_fd: int) -> bool:
    try:
        return has_index_magic(_first_bytes(directory_fd, INDEX_FILE, HEADER_BYTES))
    except OSError:
        return False


def _has_our_namespace(directory: Path, directory_fd: int) -> bool:
    try:
        stored = read_namespace(directory, directory_fd)
    except StorageError:
        return False
    return stored.directory_name == directory.name


def create_slab(directory: Path, namespace: StoredNamespace, geometry: SlabGeometry) -> None:
    """Make the files of an empty slab in the new directory `directory`, durably.

    Raises `StorageError`; what was made until then stays for the caller to remove.
    """
    with storage_errors("create a slab in", directory):
        os.mkdir(directory, 0o700)
    with opened_directory(directory) as directory_fd, storage_errors("create", directory):
        made = os.O_RDWR | os.O_CREAT | os.O_EXCL
        for name, size_bytes, content in (
            (DATA_FILE, geometry.data_bytes, b""),
            (NAMESPACE_FILE, 0, encode_namespace(namespace)),
            (INDEX_FILE, geometry.index_bytes, SlabHeader(geometry, 1, namespace.digest).encode()),
        ):
            fd = open_file(directory_fd, name, made)
            try:
                if size_bytes:
                    preallocate(fd, size_bytes)
                if content:
                    write_at(fd, [memoryview(content)], 0)
                os.fsync(fd)
            finally:
                os.close(fd)
        os.fsync(directory_fd)


def open_slab(directory: Path, namespace: StoredNamespace, payload_bytes: int) -> SlabFiles:
    """Own and open an existing slab.

    Raises `StorageError` if the slab is in use, is another namespace's, has another chunk size, is
    damaged or truncated, or can't be opened.
    """
    with (
        storage_errors("open", directory),
        opened_directory(directory) as directory_fd,
        contextlib.ExitStack() as unless_open,
    ):
        _make_private(directory, directory_fd)
        lock_fd = lock_slab(directory, directory_fd)
        unless_open.callback(os.close, lock_fd)
        index_fd = open_slab_file(directory, directory_fd, INDEX_FILE, os.O_RDWR)
        unless_open.callback(os.close, index_fd)
        header = read_header(directory, index_fd)
        _check_namespace(directory, header, read_namespace(directory, directory_fd), namespace)
        direct_io = supports_direct_io(directory_fd)
        data_flags = os.O_RDWR | (os.O_DIRECT if direct_io else 0)
        data_fd = open_slab_file(directory, directory_fd, DATA_FILE, data_flags)
        unless_open.callback(os.close, data_fd)
        if header.geometry.payload_bytes != payload_bytes:
            raise StorageError(
                f"{directory}: the slab holds chunks of {header.geometry.payload_bytes} bytes, not "
                f"{payload_bytes}; {START_AFRESH}"
            )
        check_sizes(directory, data_fd, index_fd, header.geometry)
        os.utime(lock_fd)
        preallocated = is_allocated(data_fd, header.geometry.data_bytes)
        unless_open.pop_all()
        return SlabFiles(directory, data_fd, index_fd, lock_fd, header, direct_io, preallocated)


def open_slab_file(directory: Path, directory_fd: int, name: str, flags: int) -> int:
    """Open a file that a slab must have. Raises `OSError`, or `StorageError` if it is missing."""
    try:
        return open_file(directory_fd, name, flags)
    except FileNotFoundError as error:
        raise StorageError(f"{directory}: {name} is missing; {START_AFRESH}") from error


def _make_private(directory: Path, directory_fd: int) -> None:
    """Refuse a directory of another user, whose bytes can't be trusted; shut it to all others."""
    status = os.fstat(directory_fd)
    if status.st_uid != os.geteuid():
        raise StorageError(
            f"{directory} belongs to another user (uid {status.st_uid}); remove it or use another "
            "directory"
        )
    if status.st_mode & 0o077:
        os.fchmod(directory_fd, 0o700)


def read_namespace(directory: Path, directory_fd: int) -> StoredNamespace:
    """What `namespace.json` of a slab says. Raises `StorageError`."""
    with storage_errors("read", directory / NAMESPACE_FILE):
        fd = open_slab_file(directory, directory_fd, NAMESPACE_FILE, os.O_RDONLY)
        try:
            text = os.pread(fd, MAX_NAMESPACE_FILE_BYTES, 0)
        finally:
            os.close(fd)
    return decode_namespace(text, str(directory))


def _check_namespace(
    directory: Path, header: SlabHeader, stored: StoredNamespace, wanted: StoredNamespace
) -> None:
    if header.digest != stored.digest or header.digest != wanted.digest:
        raise StorageError(
            f"{directory}: the slab belongs to another namespace ({header.digest.hex()}, not "
            f"{wanted.digest.hex()}); {START_AFRESH}"
        )
    if stored != decode_namespace(encode_namespace(wanted), str(directory)):
        differing = sorted(
            name
            for name in stored.fields.keys() | wanted.fields.keys()
            if stored.fields.get(name) != wanted.fields.get(name)
        )
        raise StorageError(
            f"{directory}: {NAMESPACE_FILE} differs in {', '.join(differing)}; {START_AFRESH}"
        )


def check_sizes(directory: Path, data_fd: int, index_fd: int, geometry: SlabGeometry) -> None:
    """Raise `StorageError` if a file is shorter than its slots."""
    for name, fd, needed in (
        (DATA_FILE, data_fd, geometry.data_bytes),
        (INDEX_FILE, index_fd, geometry.index_bytes),
    ):
        size = os.fstat(fd).st_size
        if size < needed:
            raise StorageError(
                f"{directory}: {name} is truncated ({size} of {needed} bytes); {START_AFRESH}"
            )


def resize_slab(files: SlabFiles, slot_count: int) -> SlabFiles:
    """Give an open slab another number of slots; chunks beyond a new end are lost, others stay.

    The files given must be used no more, but for `close` if this raises `StorageError`.
    """
    have = files.header.geometry
    wanted = SlabGeometry(slot_count, have.payload_bytes)
    if wanted == have:
        return files
    header = dataclasses.replace(files.header, geometry=wanted)
    # The header never promises more than the files hold: it is written last when they grow,
    # first when they shrink.
    with storage_errors("resize", files.directory):
        if slot_count > have.slot_count:
            # What an interrupted shrinking left behind must not come back as records.
            os.ftruncate(files.index_fd, have.index_bytes)
            try:
                preallocate(files.data_fd, wanted.data_bytes)
                preallocate(files.index_fd, wanted.index_bytes)
            except OSError:
                os.ftruncate(files.data_fd, have.data_bytes)
                raise
        write_header(files.index_fd, header)
        os.ftruncate(files.data_fd, wanted.data_bytes)
        os.ftruncate(files.index_fd, wanted.index_bytes)
        preallocated = is_allocated(files.data_fd, wanted.data_bytes)
    return dataclasses.replace(files, header=header, preallocated=preallocated)


def write_header(index_fd: int, header: SlabHeader) -> None:
    """Write the file header and wait until it is on the device. Raises `OSError`."""
    write_at(index_fd, [memoryview(header.encode())], 0)
    os.fsync(index_fd)


def read_header(directory: Path, index_fd: int) -> SlabHeader:
    """Read the file header again. Raises `StorageError`."""
    with storage_errors("read", directory), memoryview(bytearray(HEADER_BYTES)) as raw:
        got = read_at(index_fd, [raw], 0)
        return decode_header(bytes(raw[:got]), str(directory))


def remove_slab_files(directory: Path) -> None:
    """Remove a slab's files and its directory; anything else in there stays, and so does it.

    Raises `OSError`.
    """
    with opened_directory(directory) as directory_fd:
        for name in OUR_FILES:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=directory_fd)
    os.rmdir(directory)
