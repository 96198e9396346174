"""The bytes of a slab, past its owner: read from another namespace's, or damaged on purpose."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from typing import Final

from emberkv.domain.types import ChunkKey
from emberkv.tiers.format import DATA_FILE, INDEX_FILE, SlabHeader
from emberkv.tiers.slab import scan_records
from emberkv.tiers.slab_directory import find_slabs
from emberkv.tiers.slab_files import read_header

FLIPPED: Final = 0x10


class _Slab:
    """A slab's two files, open."""

    def __init__(self, directory: Path, flags: int) -> None:
        self._fds = [os.open(directory / name, flags) for name in (INDEX_FILE, DATA_FILE)]
        self.index_fd, self.data_fd = self._fds
        self.header: SlabHeader = read_header(directory, self.index_fd)

    def slots(self) -> dict[ChunkKey, int]:
        """Where each chunk is."""
        geometry = self.header.geometry
        records = scan_records(self.index_fd, geometry.slot_count, self.header.epoch)
        return {record.key: record.slot for record in records}

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)


class ForeignChunks:
    """The payloads of a slab that is not this server's, by key."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __call__(self, key: ChunkKey) -> bytes | None:
        """A chunk's payload, or None if the slab does not have it."""
        with closing(_Slab(self._directory, os.O_RDONLY)) as slab:
            slot = slab.slots().get(key)
            geometry = slab.header.geometry
            if slot is None:
                return None
            return os.pread(slab.data_fd, geometry.payload_bytes, slot * geometry.stride_bytes)


def damage_slabs(root_dir: Path) -> int:
    """Flip a bit in the middle of every chunk of every slab in a directory; returns how many."""
    damaged = 0
    for directory in find_slabs(root_dir):
        with closing(_Slab(directory, os.O_RDWR)) as slab:
            geometry = slab.header.geometry
            for slot in slab.slots().values():
                at = slot * geometry.stride_bytes + geometry.payload_bytes // 2
                byte = os.pread(slab.data_fd, 1, at)[0]
                os.pwrite(slab.data_fd, bytes([byte ^ FLIPPED]), at)
                damaged += 1
            os.fsync(slab.data_fd)
    return damaged
