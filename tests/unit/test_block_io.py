"""Whole reads and writes: short ones, many buffers, memory of any alignment."""

from __future__ import annotations

import errno
import mmap
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberkv.tiers.block_io import (
    IOV_MAX,
    AlignedBuffers,
    is_allocated,
    preallocate,
    read_at,
    supports_direct_io,
    write_at,
)
from emberkv.tiers.format import SlabGeometry
from emberkv.tiers.payload_file import PayloadFile


@pytest.fixture
def file_fd(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


@given(sizes=st.lists(st.integers(0, 50), max_size=30), offset=st.integers(0, 100))
def test_many_buffers_make_one_stretch(sizes: list[int], offset: int) -> None:
    fd = os.memfd_create("stretch")
    try:
        parts = [bytes([at % 251 + 1]) * size for at, size in enumerate(sizes)]
        write_at(fd, [memoryview(part) for part in parts], offset)
        assert os.pread(fd, 5000, offset) == b"".join(parts)
        rooms = [bytearray(size) for size in sizes]
        assert read_at(fd, [memoryview(room) for room in rooms], offset) == sum(sizes)
        assert rooms == parts
    finally:
        os.close(fd)


def test_more_buffers_than_one_call_takes(file_fd: int) -> None:
    parts = [memoryview(at.to_bytes(2, "big")) for at in range(IOV_MAX + 7)]
    write_at(file_fd, parts, 0)
    rooms = [memoryview(bytearray(2)) for _ in parts]
    assert read_at(file_fd, rooms, 0) == 2 * len(parts)
    assert rooms == parts


def test_short_transfers_go_on_where_they_stopped() -> None:
    fd = os.memfd_create("short")
    try:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        parts = [memoryview(bytes([at]) * 1000) for at in range(8)]
        resource.setrlimit(resource.RLIMIT_FSIZE, (2500, before[1]))
        try:
            with pytest.raises(OSError) as caught:  # noqa: PT011 - its number is what matters
                write_at(fd, parts, 0)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert caught.value.errno == errno.EFBIG
        assert os.fstat(fd).st_size == 2500, "the first call was short, the second was refused"
        rooms = [memoryview(bytearray(1000)) for _ in range(8)]
        assert read_at(fd, rooms, 0) == 2500
        assert bytes(rooms[2]) == bytes([2]) * 500 + bytes(500)
    finally:
        os.close(fd)


def test_a_device_without_space_says_so() -> None:
    fd = os.open("/dev/full", os.O_RDWR)
    try:
        with pytest.raises(OSError) as caught:  # noqa: PT011 - its number is what matters
            write_at(fd, [memoryview(b"x")], 0)
        assert caught.value.errno == errno.ENOSPC
    finally:
        os.close(fd)


def test_preallocation_gives_blocks_and_keeps_content(file_fd: int) -> None:
    os.pwrite(file_fd, b"content", 0)
    assert not is_allocated(file_fd, 1 << 20)
    if not preallocate(file_fd, 1 << 20):
        pytest.skip("this file system can't preallocate")
    assert is_allocated(file_fd, 1 << 20)
    assert os.fstat(file_fd).st_size == 1 << 20
    assert os.pread(file_fd, 8, 0) == b"content\0"


def test_the_probe_leaves_nothing_behind(tmp_path: Path) -> None:
    directory_fd = os.open(tmp_path, os.O_RDONLY)
    try:
        (tmp_path / "probe").touch()
        supports_direct_io(directory_fd)
        assert os.listdir(tmp_path) == []
    finally:
        os.close(directory_fd)


def test_aligned_buffers_are_used_again() -> None:
    pool = AlignedBuffers(8192)
    first, second = pool.take(), pool.take()
    assert first is not second
    pool.give_back(first)
    assert pool.take() is first
    assert len(second) == 8192


@pytest.mark.parametrize("direct_io", [True, False])
@pytest.mark.parametrize("payload_bytes", [4096, 5000])
@pytest.mark.parametrize("misalignment", [0, 1, 512])
def test_payloads_may_lie_anywhere_in_memory(
    tmp_path: Path, direct_io: bool, payload_bytes: int, misalignment: int
) -> None:
    flags = os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct_io else 0)
    try:
        fd = os.open(tmp_path / "data", flags)
    except OSError:
        pytest.skip("this file system has no direct I/O")
    geometry = SlabGeometry(3, payload_bytes)
    os.ftruncate(fd, geometry.data_bytes)
    memory = mmap.mmap(-1, 8 * 8192)
    view = memoryview(memory)
    payloads = [
        view[at * 8192 + misalignment : at * 8192 + misalignment + payload_bytes] for at in range(3)
    ]
    contents = [bytes([at + 1]) * payload_bytes for at in range(3)]
    for payload, content in zip(payloads, contents, strict=True):
        payload[:] = content
    try:
        file = PayloadFile(fd, geometry, direct_io)
        file.write(0, payloads)
        view[:] = bytes(len(view))
        file.read(0, payloads)
        assert [bytes(payload) for payload in payloads] == contents
        assert os.stat(tmp_path / "data").st_size == geometry.data_bytes
    finally:
        os.close(fd)
