"""One directory of slabs under one total size: open, make room, list, purge.

Each namespace has a slab of its own. The size is one limit for all of them: a new slab gets its
room by reclaiming others whole, least recently used first, never one that is in use. Whatever
else lies in the directory is left alone: a slab is recognised by its name and by the magic of its
index, and only its own files are ever removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from emberkv.domain.types import ChunkKey
from emberkv.errors import ConfigError, StorageError
from emberkv.tiers.format import (
    DATA_FILE,
    DIRECTORY_PREFIX,
    INDEX_FILE,
    LOCK_FILE,
    SlabGeometry,
    StoredNamespace,
    slots_that_fit,
)
from emberkv.tiers.slab import Slab, newest_of_each_key, scan_records
from emberkv.tiers.slab_files import (
    check_sizes,
    create_slab,
    is_locked,
    is_slab,
    open_slab,
    open_slab_file,
    opened_directory,
    read_header,
    read_namespace,
    remove_slab_files,
    resize_slab,
    storage_errors,
    try_lock,
)

DIRECTORY_WAIT_S: Final = 30.0
_DIRECTORY_PAUSE_S: Final = 0.05
_SLAB_NAME: Final = re.compile(re.escape(DIRECTORY_PREFIX) + r"[0-9a-f]{16}")
# Directories being made or removed; what is found under these names was left by a crash.
_MAKING: Final = ".making"
_REMOVING: Final = ".removing"
_LEFT_OVER_NAME: Final = re.compile(
    r"\." + _SLAB_NAME.pattern + f"({re.escape(_MAKING)}|{re.escape(_REMOVING)})"
)


@dataclass(frozen=True, slots=True)
class SlabInfo:
    """What can be seen of a slab from outside.

    `problem` says why it can't be used, and then what could not be read is None or 0.
    """

    directory: Path
    namespace: StoredNamespace | None
    geometry: SlabGeometry | None
    size_bytes: int
    chunks: int
    last_used_s: float
    in_use: bool
    problem: str | None


class SlabDirectory:
    """The slabs below `root_dir`, together never larger than `size_bytes`."""

    def __init__(self, root_dir: Path, size_bytes: int, *, reserve_bytes: int = 0) -> None:
        """Check the arguments; `reserve_bytes` is what the file system must keep free.

        Raises `ConfigError` for sizes or a path that can't be meant, `StorageError` for a
        directory that can't be used.
        """
        if size_bytes <= 0:
            raise ConfigError(f"the disk tier's size must be positive, not {size_bytes} bytes")
        if reserve_bytes < 0:
            raise ConfigError(f"the disk reserve can't be negative ({reserve_bytes} bytes)")
        require_directory(root_dir)
        self._root_dir = root_dir
        self._size_bytes = size_bytes
        self._reserve_bytes = reserve_bytes

    def open_slab(
        self, namespace: StoredNamespace, payload_bytes: int, *, slab_bytes: int | None = None
    ) -> Slab:
        """Open the namespace's slab, made or resized to `slab_bytes` (default: the whole size).

        Reclaims other slabs if there is no room. Raises `ConfigError` if not even one chunk fits,
        `StorageError` for everything the files or the device refuse.
        """
        slab_bytes = self._size_bytes if slab_bytes is None else slab_bytes
        if slab_bytes > self._size_bytes:
            raise ConfigError(
                f"a slab of {slab_bytes} bytes is larger than the disk tier of {self._size_bytes}"
            )
        slot_count = slots_that_fit(slab_bytes, payload_bytes)
        if slot_count == 0:
            needed = SlabGeometry(1, payload_bytes).total_bytes
            raise ConfigError(
                f"the disk tier of {slab_bytes} bytes is smaller than one chunk; give it at least "
                f"{needed} bytes"
            )
        geometry = SlabGeometry(slot_count, payload_bytes)
        directory = self._root_dir / namespace.directory_name
        with _alone_in(self._root_dir):
            _remove_left_overs(self._root_dir)
            if os.path.lexists(directory):
                files = open_slab(directory, namespace, payload_bytes)
                try:
                    self._make_room(directory, geometry)
                    files = resize_slab(files, slot_count)
                except StorageError:
                    files.close()
                    raise
            else:
                self._make_room(directory, geometry)
                self._create(directory, namespace, geometry)
                files = open_slab(directory, namespace, payload_bytes)
        try:
            return Slab(files, reserve_bytes=self._reserve_bytes)
        except StorageError:
            files.close()
            raise

    def _create(self, directory: Path, namespace: StoredNamespace, geometry: SlabGeometry) -> None:
        """Make the slab beside its place and move it there whole."""
        making = directory.with_name(f".{directory.name}{_MAKING}")
        try:
            create_slab(making, namespace, geometry)
            with storage_errors("create", directory):
                os.rename(making, directory)
        except StorageError:
            with contextlib.suppress(OSError, StorageError):
                remove_slab_files(making)
            raise

    def _make_room(self, directory: Path, geometry: SlabGeometry) -> None:
        """Reclaim other slabs until this one fits into the size and the file system."""
        others = [slab for slab in find_slabs(self._root_dir) if slab != directory]
        sizes = {slab: _size_bytes(slab) for slab in others}
        over_bytes = geometry.total_bytes + sum(sizes.values()) - self._size_bytes
        for slab in sorted(others, key=_last_used_s):
            if over_bytes <= 0:
                break
            if _remove(slab):
                over_bytes -= sizes[slab]
        if over_bytes > 0:
            raise StorageError(
                f"{self._root_dir}: {geometry.total_bytes} bytes do not fit into the disk tier of "
                f"{self._size_bytes}: other engines use the rest; give the tier {over_bytes} bytes "
                "more, or this engine a directory of its own"
            )
        self._require_free(directory, geometry)

    def _require_free(self, directory: Path, geometry: SlabGeometry) -> None:
        with storage_errors("look at", self._root_dir):
            status = os.statvfs(self._root_dir)
        free_bytes = status.f_bavail * status.f_frsize - self._reserve_bytes
        present_bytes = _size_bytes(directory)
        growth_bytes = geometry.total_bytes - present_bytes
        if growth_bytes > max(0, free_bytes):
            raise StorageError(
                f"{self._root_dir}: the file system has {max(0, free_bytes)} bytes free beyond the "
                f"reserve, the disk tier needs {growth_bytes} more; make it at most "
                f"{max(0, free_bytes) + present_bytes} bytes or free some space"
            )


def half_of_free_bytes(root_dir: Path) -> int:
    """Half of what the file system has free, counting what our own slabs there hold as free.

    Raises `ConfigError` and `StorageError` as `require_directory` does.
    """
    require_directory(root_dir)
    with storage_errors("look at", root_dir):
        status = os.statvfs(root_dir)
    held_bytes = sum(map(_size_bytes, find_slabs(root_dir)))
    return (status.f_bavail * status.f_frsize + held_bytes) // 2


def require_directory(root_dir: Path) -> None:
    """Raise `ConfigError` unless `root_dir` is a directory, `StorageError` if it can't be read."""
    with storage_errors("look at", root_dir):
        try:
            is_directory = os.path.isdir(root_dir)
            os.stat(root_dir)
        except (FileNotFoundError, NotADirectoryError):
            raise ConfigError(
                f"{root_dir} does not exist; create the directory for the disk tier first"
            ) from None
    if not is_directory:
        raise ConfigError(f"{root_dir} is not a directory; name a directory for the disk tier")


def find_slabs(root_dir: Path) -> list[Path]:
    """The slab directories below `root_dir`, by name. Raises `StorageError`."""
    with storage_errors("list", root_dir):
        names = os.listdir(root_dir)
    found = (root_dir / name for name in sorted(names) if _SLAB_NAME.fullmatch(name))
    return [path for path in found if is_slab(path)]


def describe_slabs(root_dir: Path) -> list[SlabInfo]:
    """Every slab below `root_dir`, in use or not, damaged or not, by name."""
    require_directory(root_dir)
    return [describe_slab(directory) for directory in find_slabs(root_dir)]


def describe_slab(directory: Path) -> SlabInfo:
    """Look at one slab without disturbing its owner. Reads the whole index."""
    namespace: StoredNamespace | None = None
    geometry: SlabGeometry | None = None
    chunks = 0
    problem: str | None = None
    in_use = False
    try:
        with (
            opened_directory(directory) as directory_fd,
            storage_errors("read", directory),
            contextlib.ExitStack() as files,
        ):
            in_use = is_locked(directory_fd)
            index_fd = open_slab_file(directory, directory_fd, INDEX_FILE, os.O_RDONLY)
            files.callback(os.close, index_fd)
            header = read_header(directory, index_fd)
            geometry = header.geometry
            namespace = read_namespace(directory, directory_fd)
            chunks = len(
                newest_of_each_key(scan_records(index_fd, geometry.slot_count, header.epoch))
            )
            data_fd = open_slab_file(directory, directory_fd, DATA_FILE, os.O_RDONLY)
            files.callback(os.close, data_fd)
            check_sizes(directory, data_fd, index_fd, geometry)
    except StorageError as error:
        problem = str(error)
    return SlabInfo(
        directory=directory,
        namespace=namespace,
        geometry=geometry,
        size_bytes=_size_bytes(directory),
        chunks=chunks,
        last_used_s=_last_used_s(directory),
        in_use=in_use,
        problem=problem,
    )


def keys_of_slab(directory: Path) -> list[ChunkKey]:
    """The keys that a slab's index names, in use or not, without disturbing its owner.

    Raises `StorageError`.
    """
    with (
        opened_directory(directory) as directory_fd,
        storage_errors("read", directory),
        contextlib.ExitStack() as files,
    ):
        index_fd = open_slab_file(directory, directory_fd, INDEX_FILE, os.O_RDONLY)
        files.callback(os.close, index_fd)
        header = read_header(directory, index_fd)
        records = scan_records(index_fd, header.geometry.slot_count, header.epoch)
        return [record.key for record in newest_of_each_key(records)]


def purge_slab(directory: Path) -> None:
    """Remove a slab whole. Raises `StorageError` if it is in use, not ours, or can't be removed."""
    if not _SLAB_NAME.fullmatch(directory.name) or not is_slab(directory):
        raise StorageError(f"{directory} is not a slab of emberkv; nothing was removed")
    with _alone_in(directory.parent):
        if not _remove(directory):
            raise StorageError(f"{directory}: the slab is in use; stop its engine first")


def _remove(directory: Path) -> bool:
    """Remove an unused slab; False if it is in use. Call only while alone in the root."""
    doomed = directory.with_name(f".{directory.name}{_REMOVING}")
    with storage_errors("remove", directory):
        with opened_directory(directory) as directory_fd:
            lock_fd = try_lock(directory_fd)
        if lock_fd is None:
            return False
        try:
            os.rename(directory, doomed)
            remove_slab_files(doomed)
        finally:
            os.close(lock_fd)
    return True


def _remove_left_overs(root_dir: Path) -> None:
    """Remove what a crash left half made or half removed. Call only while alone in the root."""
    with storage_errors("list", root_dir):
        names = [name for name in os.listdir(root_dir) if _LEFT_OVER_NAME.fullmatch(name)]
    for name in names:
        with storage_errors("remove", root_dir / name):
            remove_slab_files(root_dir / name)


@contextlib.contextmanager
def _alone_in(root_dir: Path) -> Iterator[None]:
    """Let one process at a time make, resize or remove slabs below `root_dir`."""
    deadline_s = time.monotonic() + DIRECTORY_WAIT_S
    with storage_errors("open", root_dir):
        fd = os.open(root_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        while True:
            try:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
            except OSError as error:
                raise StorageError(f"can't lock {root_dir}: {error.strerror}") from error
            if time.monotonic() >= deadline_s:
                raise StorageError(
                    f"{root_dir}: another process has been making or removing a slab for "
                    f"{DIRECTORY_WAIT_S:.0f} s; try again"
                )
            time.sleep(_DIRECTORY_PAUSE_S)
        yield
    finally:
        os.close(fd)


def _size_bytes(directory: Path) -> int:
    """What the slab's files may take on disk, holes included."""
    total_bytes = 0
    for name in (DATA_FILE, INDEX_FILE):
        with contextlib.suppress(OSError):
            total_bytes += os.lstat(directory / name).st_size
    return total_bytes


def _last_used_s(directory: Path) -> float:
    """When the slab was last opened, written or closed, in seconds of the wall clock."""
    newest_s = 0.0
    for name in (LOCK_FILE, INDEX_FILE):
        with contextlib.suppress(OSError):
            newest_s = max(newest_s, os.lstat(directory / name).st_mtime)
    return newest_s
