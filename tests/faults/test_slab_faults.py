"""What a slab says at opening, and does while serving, when its files or device go wrong."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from slab_files_at_fault import (
    CHUNK,
    GEOMETRY,
    NAMESPACE,
    SIZE,
    SLOTS,
    directory_of,
    flip,
    opened,
    refused,
    replaced,
)

from emberkv.domain.types import Outcome
from emberkv.errors import ConfigError, StorageError
from emberkv.testing.storage import chunk_key, get, holds, payload_of, put, record_for
from emberkv.tiers.format import (
    DATA_FILE,
    HEADER_BYTES,
    INDEX_FILE,
    LOCK_FILE,
    NAMESPACE_FILE,
    RECORD_BYTES,
    SlabGeometry,
    SlabHeader,
    StoredNamespace,
)
from emberkv.tiers.slab import Slab
from emberkv.tiers.slab_directory import SlabDirectory

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can take another user's rights")


@pytest.fixture
def slab(tmp_path: Path) -> Iterator[Slab]:
    """A slab in which every slot holds the chunk of its own number."""
    filled = opened(tmp_path)
    assert [put(filled, number, number) for number in range(SLOTS)] == [Outcome.OK] * SLOTS
    yield filled
    filled.close()


@pytest.fixture
def closed(slab: Slab, tmp_path: Path) -> Path:
    """The directory of such a slab, its owner gone."""
    slab.close()
    return directory_of(tmp_path)


# ── at opening: the place ────────────────────────────────────────────────────────────────────


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    refused(tmp_path / "absent", r"absent does not exist; create", ConfigError)


def test_a_file_in_place_of_the_directory_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    refused(file, "file is not a directory", ConfigError)
    refused(file / "below", "does not exist", ConfigError)


@pytest.mark.parametrize("size_bytes", [0, -1])
def test_a_size_must_be_positive(tmp_path: Path, size_bytes: int) -> None:
    with pytest.raises(ConfigError, match="must be positive"):
        SlabDirectory(tmp_path, size_bytes)
    with pytest.raises(ConfigError, match="can't be negative"):
        SlabDirectory(tmp_path, SIZE, reserve_bytes=-1)


def test_a_tier_smaller_than_one_chunk_says_what_it_needs(tmp_path: Path) -> None:
    needed = SlabGeometry(1, CHUNK).total_bytes
    with pytest.raises(ConfigError, match=f"smaller than one chunk.*{needed} bytes"):
        SlabDirectory(tmp_path, needed - 1).open_slab(NAMESPACE, CHUNK)
    with pytest.raises(ConfigError, match="at least one byte"):
        SlabDirectory(tmp_path, SIZE).open_slab(NAMESPACE, 0)
    with pytest.raises(ConfigError, match="larger than the disk tier"):
        SlabDirectory(tmp_path, SIZE).open_slab(NAMESPACE, CHUNK, slab_bytes=SIZE + 1)
    SlabDirectory(tmp_path, needed).open_slab(NAMESPACE, CHUNK).close()


@contextlib.contextmanager
def rights_of_nobody() -> Iterator[None]:
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@as_root
def test_without_permission_the_message_says_so() -> None:
    place = Path(tempfile.mkdtemp(prefix="slab-faults-"))
    try:
        place.chmod(0o755)
        with rights_of_nobody():
            refused(place, "permission denied; give this user")
        opened(place).close()
        with rights_of_nobody():
            refused(place, "permission denied")
    finally:
        shutil.rmtree(place)


@as_root
def test_a_slab_of_another_user_is_not_trusted(closed: Path) -> None:
    os.chown(closed, NOBODY, NOBODY)
    refused(closed.parent, "belongs to another user")


def test_files_are_private(closed: Path) -> None:
    assert closed.stat().st_mode & 0o777 == 0o700
    for name in (DATA_FILE, INDEX_FILE, NAMESPACE_FILE, LOCK_FILE):
        assert (closed / name).stat().st_mode & 0o777 == 0o600
    assert sorted(os.listdir(closed)) == sorted([DATA_FILE, INDEX_FILE, NAMESPACE_FILE, LOCK_FILE])


def test_a_directory_open_to_others_is_shut(closed: Path) -> None:
    closed.chmod(0o777)
    opened(closed.parent).close()
    assert closed.stat().st_mode & 0o777 == 0o700


# ── at opening: the files ────────────────────────────────────────────────────────────────────


def test_two_engines_on_one_slab(slab: Slab, tmp_path: Path) -> None:
    refused(tmp_path, f"in use by another engine \\(process {os.getpid()}\\); stop it or give")
    assert holds(slab, 1, 1)
    slab.close()
    again = opened(tmp_path)
    assert holds(again, 1, 1)
    again.close()


def test_a_slab_with_other_fields_under_one_digest(closed: Path) -> None:
    other = StoredNamespace(NAMESPACE.digest, {"model": "other", "chunk_tokens": 32})
    with pytest.raises(StorageError, match=r"namespace.json differs in model"):
        opened(closed.parent, other)


def test_a_slab_of_another_namespace_in_this_ones_place(closed: Path) -> None:
    other = StoredNamespace(NAMESPACE.digest[:8] + b"different", NAMESPACE.fields)
    with pytest.raises(StorageError, match="belongs to another namespace"):
        opened(closed.parent, other)


def test_a_slab_with_another_chunk_size(closed: Path) -> None:
    with pytest.raises(StorageError, match="holds chunks of 4096 bytes, not 8192"):
        SlabDirectory(closed.parent, 10 * SIZE).open_slab(NAMESPACE, 8192)


def test_a_newer_format_version(closed: Path) -> None:
    header = bytearray(SlabHeader(GEOMETRY, 1, NAMESPACE.digest).encode())
    header[8] = 99
    with (closed / INDEX_FILE).open("r+b") as index:
        index.write(header)
    refused(closed.parent, "format version 99, this emberkv reads 1")


def test_a_file_that_is_not_ours(closed: Path) -> None:
    (closed / INDEX_FILE).write_bytes(b"a diary")
    refused(closed.parent, "is not a file of emberkv")
    assert (closed / INDEX_FILE).read_bytes() == b"a diary"


@pytest.mark.parametrize("name", [DATA_FILE, INDEX_FILE, NAMESPACE_FILE])
def test_a_missing_file(closed: Path, name: str) -> None:
    (closed / name).unlink()
    refused(closed.parent, f"{name} is missing; run `emberkv purge`")


@pytest.mark.parametrize("name", [DATA_FILE, INDEX_FILE, NAMESPACE_FILE, LOCK_FILE])
def test_a_link_is_never_followed(closed: Path, name: str) -> None:
    elsewhere = closed.parent / "elsewhere"
    (closed / name).rename(elsewhere)
    (closed / name).symlink_to(elsewhere)
    refused(closed.parent, "a symbolic link stands where")


def test_a_link_in_place_of_the_slab_is_not_followed(closed: Path) -> None:
    elsewhere = closed.parent / "elsewhere"
    closed.rename(elsewhere)
    closed.symlink_to(elsewhere)
    refused(closed.parent, "can't open")


@pytest.mark.parametrize("name", [DATA_FILE, INDEX_FILE, NAMESPACE_FILE, LOCK_FILE])
def test_a_pipe_in_place_of_a_file_hangs_nobody(closed: Path, name: str) -> None:
    (closed / name).unlink()
    os.mkfifo(closed / name)
    refused(closed.parent, "can't |missing")


@pytest.mark.parametrize(
    ("name", "size_bytes"),
    [(DATA_FILE, 0), (DATA_FILE, SIZE // 2), (INDEX_FILE, HEADER_BYTES), (INDEX_FILE, 4097)],
)
def test_a_truncated_file(closed: Path, name: str, size_bytes: int) -> None:
    os.truncate(closed / name, size_bytes)
    refused(closed.parent, f"{name} is truncated \\({size_bytes} of")


@pytest.mark.parametrize("size_bytes", [0, 7, 100, 4095])
def test_a_truncated_header(closed: Path, size_bytes: int) -> None:
    os.truncate(closed / INDEX_FILE, size_bytes)
    refused(closed.parent, "not a file of emberkv|cut short")


@pytest.mark.parametrize("offset", [0, 7, 8, 12, 16, 48, 56, 64, 72, 79])
def test_a_flipped_bit_in_the_file_header(closed: Path, offset: int) -> None:
    flip(closed / INDEX_FILE, offset)
    refused(closed.parent, "not a file of emberkv|format version|is damaged")


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[]", b'{"digest": "00", "fields": {}}', b'{"digest": 5, "fields": 5}', b"\xff"],
)
def test_a_damaged_namespace_file(closed: Path, text: bytes) -> None:
    (closed / NAMESPACE_FILE).write_bytes(text)
    refused(closed.parent, "namespace.json is damaged")


def test_the_namespace_can_be_read_by_people(closed: Path) -> None:
    document = json.loads((closed / NAMESPACE_FILE).read_text())
    assert document["fields"] == NAMESPACE.fields
    assert document["digest"] == NAMESPACE.digest.hex()


# ── while serving ────────────────────────────────────────────────────────────────────────────


def test_a_flipped_bit_in_a_payload_is_corrupt(slab: Slab, tmp_path: Path) -> None:
    flip(directory_of(tmp_path) / DATA_FILE, 3 * CHUNK + 17)
    assert get(slab, 3, 3)[0] is Outcome.CORRUPT
    assert all(holds(slab, number, number) for number in range(SLOTS) if number != 3)
    put(slab, 3, 3)
    assert holds(slab, 3, 3)


@pytest.mark.parametrize("offset", range(0, RECORD_BYTES, 5))
def test_a_flipped_bit_in_a_record_is_corrupt(slab: Slab, tmp_path: Path, offset: int) -> None:
    index = directory_of(tmp_path) / INDEX_FILE
    flip(index, HEADER_BYTES + 3 * RECORD_BYTES + offset)
    assert get(slab, 3, 3)[0] is Outcome.CORRUPT
    slab.close()
    again = opened(tmp_path)
    assert chunk_key(3) not in {entry.key for entry in again.entries()}
    again.close()


def test_a_record_in_another_slots_place_is_corrupt(slab: Slab, tmp_path: Path) -> None:
    index = directory_of(tmp_path) / INDEX_FILE
    with index.open("r+b") as file:
        file.seek(HEADER_BYTES + RECORD_BYTES)
        record = file.read(RECORD_BYTES)
        file.write(record)
    assert get(slab, 1, 2)[0] is Outcome.CORRUPT
    assert [entry.slot for entry in slab.entries()] == [0, 1, 3, 4, 5, 6, 7]


def test_files_truncated_under_the_server(slab: Slab, tmp_path: Path) -> None:
    directory = directory_of(tmp_path)
    os.truncate(directory / DATA_FILE, 4 * CHUNK + 512)
    assert [get(slab, number, number)[0] for number in (3, 4, 5)] == [
        Outcome.OK,
        Outcome.CORRUPT,
        Outcome.CORRUPT,
    ]
    os.truncate(directory / INDEX_FILE, HEADER_BYTES + 2 * RECORD_BYTES)
    assert get(slab, 1, 1)[0] is Outcome.OK
    assert get(slab, 3, 3)[0] in {Outcome.ABSENT, Outcome.CORRUPT}
    assert [entry.slot for entry in slab.entries()] == [0, 1]
    put(slab, 5, 5)
    assert holds(slab, 5, 5)


def test_a_device_that_can_not_read(slab: Slab, tmp_path: Path) -> None:
    for name in (DATA_FILE, INDEX_FILE):
        with replaced(directory_of(tmp_path), name, lambda path: os.open(path, os.O_WRONLY)):
            assert get(slab, 1, 1)[0] is Outcome.FAILED
        assert holds(slab, 1, 1)


def test_a_device_that_can_not_write(slab: Slab, tmp_path: Path) -> None:
    with replaced(directory_of(tmp_path), DATA_FILE, lambda path: os.open(path, os.O_RDONLY)):
        assert put(slab, 9, 1) is Outcome.FAILED
    assert get(slab, 9, 1)[0] is Outcome.ABSENT
    assert get(slab, 1, 1)[0] is Outcome.ABSENT  # the slot is empty, not half valid
    with replaced(directory_of(tmp_path), INDEX_FILE, lambda path: os.open(path, os.O_RDONLY)):
        assert put(slab, 9, 2) is Outcome.FAILED
    assert holds(slab, 2, 2)


def test_a_device_without_space(slab: Slab, tmp_path: Path) -> None:
    with replaced(directory_of(tmp_path), DATA_FILE, lambda _: os.open("/dev/full", os.O_RDWR)):
        assert put(slab, 9, 1) is Outcome.FULL
    assert get(slab, 9, 1)[0] is Outcome.ABSENT
    assert put(slab, 9, 1) is Outcome.OK


def test_one_bad_slot_does_not_take_its_neighbours_along(slab: Slab) -> None:
    payloads = [payload_of(number, CHUNK) for number in range(10, 18)]
    records = [record_for(10 + at, at, payload) for at, payload in enumerate(payloads)]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5 * CHUNK, before[1]))
    try:
        outcomes = slab.write(records, [memoryview(payload) for payload in payloads])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(outcomes) == [Outcome.OK] * 5 + [Outcome.FAILED] * 3
    assert all(holds(slab, 10 + at, at) for at in range(5))
    assert len(list(slab.entries())) == 5


def test_a_reset_that_can_not_be_made_durable(slab: Slab, tmp_path: Path) -> None:
    with (
        replaced(directory_of(tmp_path), INDEX_FILE, lambda path: os.open(path, os.O_RDONLY)),
        pytest.raises(StorageError, match="can't reset"),
    ):
        slab.reset()
    assert get(slab, 1, 1)[0] is Outcome.ABSENT
    assert put(slab, 2, 2) is Outcome.SHED
    slab.reset()
    assert put(slab, 2, 2) is Outcome.OK
    slab.close()
    again = opened(tmp_path)
    assert [entry.key for entry in again.entries()] == [chunk_key(2)]
    again.close()


def test_a_closed_slab_says_so(slab: Slab) -> None:
    slab.close()
    with pytest.raises(StorageError, match="closed"):
        slab.reset()
    with pytest.raises(StorageError, match="closed"):
        list(slab.entries())
