"""The arena: one memory, several mappings, headers that say what a row holds."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

from emberkv.domain.types import ChunkKey, Entry, Slot
from emberkv.errors import KeeperError
from emberkv.live.arena import (
    FREE,
    PAGE_BYTES,
    READY,
    WRITING,
    Arena,
    ArenaGeometry,
    create_memory,
)

GEOMETRY = ArenaGeometry(slot_count=10, chunk_bytes=3 * PAGE_BYTES + 100)


@pytest.fixture
def fd() -> Iterator[int]:
    fd = create_memory(GEOMETRY)
    yield fd
    os.close(fd)


def keys(*names: bytes) -> list[ChunkKey]:
    return [ChunkKey(name) for name in names]


@pytest.mark.parametrize("size_bytes", [0, 4096, 100_000, 1 << 20, 123_456_789])
@pytest.mark.parametrize("chunk_bytes", [1, 4096, 5000, 1 << 20])
def test_a_geometry_within_a_size_is_the_largest_that_fits(
    size_bytes: int, chunk_bytes: int
) -> None:
    geometry = ArenaGeometry.within(size_bytes, chunk_bytes)
    assert geometry.slot_count == 0 or geometry.total_bytes <= size_bytes
    assert ArenaGeometry(geometry.slot_count + 1, chunk_bytes).total_bytes > size_bytes


def test_two_mappings_see_the_same_bytes(fd: int) -> None:
    here, there = Arena(fd, GEOMETRY), Arena(fd, GEOMETRY)
    here.row(Slot(9))[:] = b"\x07" * GEOMETRY.chunk_bytes
    assert bytes(there.row(Slot(9))) == b"\x07" * GEOMETRY.chunk_bytes
    assert not any(there.row(Slot(8)))
    here.close()
    there.close()


def test_rows_are_aligned_to_pages(fd: int) -> None:
    arena = Arena(fd, GEOMETRY)
    addresses = [
        np.frombuffer(arena.row(Slot(slot)), np.uint8).ctypes.data
        for slot in range(GEOMETRY.slot_count)
    ]
    assert addresses[0] == arena.rows_address
    assert all(address % PAGE_BYTES == 0 for address in addresses)
    arena.close()


def test_a_header_names_what_its_row_holds(fd: int) -> None:
    arena = Arena(fd, GEOMETRY)
    slots = [Slot(3), Slot(1)]
    arena.mark_writing(slots, keys(b"head", b"tail\0\0"), [None, ChunkKey(b"head")])
    assert arena.headers["state"][slots].tolist() == [WRITING, WRITING]
    arena.mark_ready(slots, tick=40)
    assert arena.headers["state"][slots].tolist() == [READY, READY]
    assert arena.headers["tick"][slots].tolist() == [40, 41]
    assert arena.entry(Slot(3)) == Entry(ChunkKey(b"head"), None, Slot(3))
    assert arena.entry(Slot(1)) == Entry(ChunkKey(b"tail\0\0"), ChunkKey(b"head"), Slot(1))
    arena.mark_used([Slot(3)], tick=77)
    arena.mark_free([Slot(1)])
    assert arena.headers["tick"][3] == 77
    assert arena.headers["state"].tolist() == [FREE, FREE, FREE, READY, *[FREE] * 6]
    arena.close()


def test_no_slots_at_all_can_be_marked(fd: int) -> None:
    arena = Arena(fd, GEOMETRY)
    before = arena.headers.tobytes()
    arena.mark_writing([], [], [])
    arena.mark_ready([], 0)
    arena.mark_used([], 0)
    arena.mark_free([])
    assert arena.headers.tobytes() == before
    arena.close()


def test_every_new_content_has_a_generation_of_its_own(fd: int) -> None:
    arena = Arena(fd, GEOMETRY)
    for expected in (1, 2, 3):
        arena.mark_writing([Slot(5)], keys(b"k%d" % expected), [None])
        assert arena.headers["generation"][5] == expected
    arena.close()


def test_nobody_can_change_the_size_under_another(fd: int) -> None:
    for size_bytes in (0, GEOMETRY.total_bytes + PAGE_BYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size_bytes)


def test_memory_of_another_size_is_refused(fd: int) -> None:
    with pytest.raises(KeeperError, match="another size"):
        Arena(fd, ArenaGeometry(11, GEOMETRY.chunk_bytes))


def test_a_discarded_arena_gives_its_memory_back_whoever_maps_it(fd: int) -> None:
    owner, other = Arena(fd, GEOMETRY), Arena(fd, GEOMETRY)
    other.bytes[:] = 1
    assert os.fstat(fd).st_blocks * 512 == GEOMETRY.total_bytes
    owner.discard()
    assert os.fstat(fd).st_blocks == 0
    assert not any(other.row(Slot(0)))
    other.close()
