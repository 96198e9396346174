"""What goes wrong with a disk, and what a slab says or does then."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from emberkv.domain.types import Outcome, Slot
from emberkv.errors import ConfigError, EmberError, StorageError
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
from emberkv.tiers.slab_directory import SlabDirectory, describe_slab
from emberkv.tiers.slab_files import open_slab

CHUNK = 4096
SLOTS = 8
GEOMETRY = SlabGeometry(SLOTS, CHUNK)
SIZE = GEOMETRY.total_bytes
NAMESPACE = StoredNamespace(bytes(range(16)), {"model": "tiny", "chunk_tokens": 32})
NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can take another user's rights")
as_user_or_root_can_mount = "mounting a small tmpfs is not permitted here"


def opened(root_dir: Path, namespace: StoredNamespace = NAMESPACE, chunk: int = CHUNK) -> Slab:
    return SlabDirectory(root_dir, SIZE).open_slab(namespace, chunk)


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
    return tmp_path / NAMESPACE.directory_name


def refused(root_dir: Path, message: str, kind: type[EmberError] = StorageError) -> None:
    with pytest.raises(kind, match=message) as caught:
        opened(root_dir)
    assert "\n" not in str(caught.value)


def flip(path: Path, offset: int, bit: int = 3) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (value,) = file.read(1)
        file.seek(offset)
        file.write(bytes([value ^ 1 << bit]))


@contextlib.contextmanager
def replaced(name: str, instead: Callable[[Path], int]) -> Iterator[None]:
    """Let this process's descriptor of a slab's file point at something else for a while."""
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            target = link.readlink()
            if target.name == name and target.parent.name == NAMESPACE.directory_name:
                fd = int(link.name)
                break
    else:
        raise AssertionError(f"{name} is not open")
    kept, other = os.dup(fd), instead(target)
    os.dup2(other, fd)
    os.close(other)
    try:
        yield
    finally:
        os.dup2(kept, fd)
        os.close(kept)


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
    flip(tmp_path / NAMESPACE.directory_name / DATA_FILE, 3 * CHUNK + 17)
    assert get(slab, 3, 3)[0] is Outcome.CORRUPT
    assert all(holds(slab, number, number) for number in range(SLOTS) if number != 3)
    put(slab, 3, 3)
    assert holds(slab, 3, 3)


@pytest.mark.parametrize("offset", range(0, RECORD_BYTES, 5))
def test_a_flipped_bit_in_a_record_is_corrupt(slab: Slab, tmp_path: Path, offset: int) -> None:
    index = tmp_path / NAMESPACE.directory_name / INDEX_FILE
    flip(index, HEADER_BYTES + 3 * RECORD_BYTES + offset)
    assert get(slab, 3, 3)[0] is Outcome.CORRUPT
    slab.close()
    again = opened(tmp_path)
    assert chunk_key(3) not in {entry.key for entry in again.entries()}
    again.close()


def test_a_record_in_another_slots_place_is_corrupt(slab: Slab, tmp_path: Path) -> None:
    index = tmp_path / NAMESPACE.directory_name / INDEX_FILE
    with index.open("r+b") as file:
        file.seek(HEADER_BYTES + RECORD_BYTES)
        record = file.read(RECORD_BYTES)
        file.write(record)
    assert get(slab, 1, 2)[0] is Outcome.CORRUPT
    assert [entry.slot for entry in slab.entries()] == [0, 1, 3, 4, 5, 6, 7]


def test_files_truncated_under_the_server(slab: Slab, tmp_path: Path) -> None:
    directory = tmp_path / NAMESPACE.directory_name
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


def test_a_device_that_can_not_read(slab: Slab) -> None:
    for name in (DATA_FILE, INDEX_FILE):
        with replaced(name, lambda path: os.open(path, os.O_WRONLY)):
            assert get(slab, 1, 1)[0] is Outcome.FAILED
        assert holds(slab, 1, 1)


def test_a_device_that_can_not_write(slab: Slab) -> None:
    with replaced(DATA_FILE, lambda path: os.open(path, os.O_RDONLY)):
        assert put(slab, 9, 1) is Outcome.FAILED
    assert get(slab, 9, 1)[0] is Outcome.ABSENT
    assert get(slab, 1, 1)[0] is Outcome.ABSENT  # the slot is empty, not half valid
    with replaced(INDEX_FILE, lambda path: os.open(path, os.O_RDONLY)):
        assert put(slab, 9, 2) is Outcome.FAILED
    assert holds(slab, 2, 2)


def test_a_device_without_space(slab: Slab) -> None:
    with replaced(DATA_FILE, lambda _: os.open("/dev/full", os.O_RDWR)):
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
        replaced(INDEX_FILE, lambda path: os.open(path, os.O_RDONLY)),
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


# ── file systems ─────────────────────────────────────────────────────────────────────────────


def mount(*words: str) -> bool:
    return subprocess.run(["mount", *words], capture_output=True, check=False).returncode == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    if shutil.which("mount") is None or not mount(
        "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)
    ):
        pytest.skip("mounting a small tmpfs is not permitted here")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(place: Path) -> None:
    with (place / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
        while True:
            filler.write(bytes(4096))


def punch_holes(data: Path) -> None:
    """Take the blocks of a file away, as if there had been no preallocation."""
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    with data.open("r+b") as file:
        assert fallocate(file.fileno(), 3, 0, GEOMETRY.data_bytes) == 0


def test_a_file_system_too_small_says_what_fits(small_disk: Path) -> None:
    directory = SlabDirectory(small_disk, 64 << 20)
    with pytest.raises(StorageError, match=r"free beyond the reserve.*at most \d+ bytes") as caught:
        directory.open_slab(NAMESPACE, CHUNK)
    fits = re.search(r"at most (\d+) bytes", str(caught.value))
    assert fits is not None
    SlabDirectory(small_disk, int(fits[1]) - (64 << 10)).open_slab(NAMESPACE, CHUNK).close()


def test_a_full_file_system_leaves_nothing_behind(small_disk: Path) -> None:
    fill(small_disk)
    refused(small_disk, "full|free")
    assert os.listdir(small_disk) == ["filler"]


def test_a_preallocated_slab_serves_on_a_full_file_system(small_disk: Path) -> None:
    slab = opened(small_disk)
    fill(small_disk)
    assert slab.preallocated
    assert put(slab, 1, 1) is Outcome.OK
    slab.close()
    again = opened(small_disk)
    assert holds(again, 1, 1)
    again.close()


def test_a_sparse_slab_on_a_full_file_system(small_disk: Path) -> None:
    opened(small_disk).close()
    punch_holes(small_disk / NAMESPACE.directory_name / DATA_FILE)
    slab = opened(small_disk)
    assert not slab.preallocated
    assert put(slab, 1, 1) is Outcome.OK
    fill(small_disk)
    assert put(slab, 2, 2) is Outcome.FULL
    assert get(slab, 2, 2)[0] is Outcome.ABSENT
    assert holds(slab, 1, 1)
    (small_disk / "filler").unlink()
    assert put(slab, 2, 2) is Outcome.OK
    slab.close()


def test_a_sparse_slab_keeps_the_reserve_free(small_disk: Path) -> None:
    opened(small_disk).close()
    directory = small_disk / NAMESPACE.directory_name
    punch_holes(directory / DATA_FILE)
    now_s = [0.0]
    files = open_slab(directory, NAMESPACE, CHUNK)
    slab = Slab(files, reserve_bytes=256 << 10, monotonic_s=lambda: now_s[0])
    assert put(slab, 1, 1) is Outcome.OK
    fill(small_disk)
    (small_disk / "filler").write_bytes(bytes((1 << 20) - (200 << 10)))
    now_s[0] = 0.5
    assert put(slab, 2, 2) is Outcome.OK  # looked at once a second at most
    now_s[0] = 1.0
    assert put(slab, 3, 3) is Outcome.FULL
    assert holds(slab, 1, 1)
    (small_disk / "filler").unlink()
    now_s[0] = 2.5
    assert put(slab, 3, 3) is Outcome.OK
    slab.close()


def test_a_read_only_file_system(small_disk: Path) -> None:
    opened(small_disk).close()
    assert mount("-o", "remount,ro", str(small_disk))
    refused(small_disk, "read-only")
    other = StoredNamespace(b"another namespace", {})
    with pytest.raises(StorageError, match="read-only"):
        SlabDirectory(small_disk, 3 * SIZE).open_slab(other, CHUNK)
    assert describe_slab(small_disk / NAMESPACE.directory_name).problem is None


# ── killed while writing ─────────────────────────────────────────────────────────────────────

WRITER = """
import sys, threading
from pathlib import Path
from emberkv.testing.storage import put
from emberkv.tiers.format import StoredNamespace
from emberkv.tiers.slab_directory import SlabDirectory

slab = SlabDirectory(Path(sys.argv[1]), int(sys.argv[2])).open_slab(
    StoredNamespace(bytes(range(16)), {"model": "tiny", "chunk_tokens": 32}), 4096
)
out = threading.Lock()

def work(first):
    number = 0
    while True:
        for slot in (first, first + 1):
            put(slab, number, slot)
            with out:
                print(slot, number, flush=True)
            number += 1

for first in (0, 2, 4, 6):
    threading.Thread(target=work, args=(first,)).start()
"""


@pytest.mark.parametrize("lines", [1, 50, 313])
def test_killed_while_writing(tmp_path: Path, lines: int) -> None:
    words = [sys.executable, "-c", WRITER, str(tmp_path), str(SIZE)]
    last: dict[int, int] = {}
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": "src"}
    ) as writer:
        assert writer.stdout is not None
        for _, line in zip(range(lines), writer.stdout, strict=False):
            slot, number = map(int, line.split())
            last[slot] = number
        writer.send_signal(signal.SIGKILL)
        for line in writer.stdout:
            if line.endswith("\n"):
                slot, number = map(int, line.split())
                last[slot] = number
    slab = opened(tmp_path)
    entries = {entry.slot: entry.key for entry in slab.entries()}
    for slot in range(SLOTS):
        # The last write told of, the one after it, or nothing if that was under way.
        said = last.get(slot)
        candidates = range(2000) if said is None else (said, said + 2)
        found = [number for number in candidates if chunk_key(number) == entries.get(Slot(slot))]
        assert len(found) == (slot in entries) or said is None
        assert all(holds(slab, number, slot) for number in found)
    sound = sum(1 for slot in entries)
    assert sound >= len(last) - 4, "only a slot being written may be lost, one per thread"
    slab.close()
