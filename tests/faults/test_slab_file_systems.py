"""A slab on a small, full, sparse or read-only file system, and one whose owner is killed."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from slab_files_at_fault import (
    CHUNK,
    GEOMETRY,
    NAMESPACE,
    SIZE,
    directory_of,
    opened,
    refused,
)

from emberkv.domain.types import Outcome
from emberkv.errors import StorageError
from emberkv.testing.storage import chunk_key, get, holds, put
from emberkv.tiers.format import (
    DATA_FILE,
    StoredNamespace,
)
from emberkv.tiers.slab import Slab
from emberkv.tiers.slab_directory import SlabDirectory, describe_slab
from emberkv.tiers.slab_files import open_slab

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
    punch_holes(directory_of(small_disk) / DATA_FILE)
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
    directory = directory_of(small_disk)
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
    assert describe_slab(directory_of(small_disk)).problem is None


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
    number = first << 20  # no key is written to two slots
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
    for slot, key in entries.items():
        # The last write told of, the next one, or if none was told of the very first.
        said = last.get(slot, (slot // 2 * 2 << 20) + slot % 2 - 2)
        found = [number for number in (said, said + 2) if number >= 0 and chunk_key(number) == key]
        assert len(found) == 1
        assert holds(slab, found[0], slot)
    lost = set(last) - set(entries)
    assert len({slot // 2 for slot in lost}) == len(lost), "only what a thread was just writing"
    slab.close()
