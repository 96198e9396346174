"""A directory of slabs under one size: making room, resizing, listing, verifying, purging."""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from emberkv.domain.types import Outcome
from emberkv.errors import StorageError
from emberkv.testing.storage import chunk_key, get, holds, payload_of, put, record_for
from emberkv.tiers.format import (
    DATA_FILE,
    INDEX_FILE,
    LOCK_FILE,
    NAMESPACE_FILE,
    SlabGeometry,
    StoredNamespace,
)
from emberkv.tiers.slab import Slab
from emberkv.tiers.slab_directory import (
    SlabDirectory,
    describe_slab,
    describe_slabs,
    find_slabs,
    half_of_free_bytes,
    purge_slab,
)
from emberkv.tiers.slab_files import SlabFiles, create_slab, open_slab, resize_slab
from emberkv.tiers.slab_verify import verify_slab

CHUNK = 4096
SLOTS = 8
SIZE = SlabGeometry(SLOTS, CHUNK).total_bytes


def namespace(number: int) -> StoredNamespace:
    return StoredNamespace(number.to_bytes(2, "big") * 8, {"model": f"model-{number}"})


def directory_of(root_dir: Path, number: int) -> Path:
    return root_dir / namespace(number).directory_name


def opened(root_dir: Path, number: int = 1, slabs: float = 1, share: int | None = None) -> Slab:
    return SlabDirectory(root_dir, int(SIZE * slabs)).open_slab(
        namespace(number), CHUNK, slab_bytes=share
    )


def make_used(root_dir: Path, number: int, at_s: float, slabs: float = 9) -> None:
    """A slab of one share, last used at a given time."""
    opened(root_dir, number, slabs, share=SIZE).close()
    for name in (LOCK_FILE, INDEX_FILE):
        os.utime(directory_of(root_dir, number) / name, (at_s, at_s))


def test_a_slab_takes_the_whole_size_and_not_a_byte_more(tmp_path: Path) -> None:
    slab = SlabDirectory(tmp_path, SIZE + CHUNK).open_slab(namespace(1), CHUNK)
    slab.close()
    files = directory_of(tmp_path, 1).iterdir()
    assert slab.slot_count == SLOTS
    blocks = {file.name: file.stat().st_blocks * 512 for file in files}
    assert blocks[DATA_FILE] == SLOTS * CHUNK
    assert sum(file.stat().st_size for file in directory_of(tmp_path, 1).iterdir()) <= SIZE + CHUNK


def test_the_least_recently_used_slabs_make_room(tmp_path: Path) -> None:
    for number, at_s in ((1, 300), (2, 100), (3, 200)):
        make_used(tmp_path, number, at_s)
    opened(tmp_path, 4, slabs=3, share=2 * SIZE).close()
    assert find_slabs(tmp_path) == [directory_of(tmp_path, 1), directory_of(tmp_path, 4)]


def test_opening_and_closing_is_use(tmp_path: Path) -> None:
    for number, at_s in ((1, 100), (2, 200)):
        make_used(tmp_path, number, at_s)
    opened(tmp_path, 1, slabs=9, share=SIZE).close()
    opened(tmp_path, 3, slabs=2, share=SIZE).close()
    assert find_slabs(tmp_path) == [directory_of(tmp_path, 1), directory_of(tmp_path, 3)]


def test_a_slab_in_use_never_makes_room(tmp_path: Path) -> None:
    owner = opened(tmp_path, 1)
    put(owner, 1, 1)
    with pytest.raises(StorageError, match=r"other engines use the rest; give the tier \d+ bytes"):
        opened(tmp_path, 2)
    assert holds(owner, 1, 1)
    assert find_slabs(tmp_path) == [directory_of(tmp_path, 1)]
    other = opened(tmp_path, 2, slabs=2, share=SIZE)
    other.close()
    owner.close()


def test_a_second_engine_takes_no_room_from_others_before_it_is_refused(tmp_path: Path) -> None:
    make_used(tmp_path, 2, 100)
    owner = opened(tmp_path, 1, slabs=2, share=SIZE)
    with pytest.raises(StorageError, match="in use by another engine"):
        opened(tmp_path, 1, slabs=2)
    assert len(find_slabs(tmp_path)) == 2
    owner.close()


def test_what_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    native = tmp_path / "model_block128" / "ab.bin"
    native.parent.mkdir()
    native.write_bytes(b"native")
    alike = tmp_path / "emberkv-00ff00ff00ff00ff"
    alike.mkdir()
    (alike / DATA_FILE).write_bytes(b"x" * SIZE)
    (alike / INDEX_FILE).write_bytes(b"not ours")
    link = tmp_path / "emberkv-11ff11ff11ff11ff"
    link.symlink_to(alike)
    make_used(tmp_path, 1, 100)
    opened(tmp_path, 2).close()
    assert find_slabs(tmp_path) == [directory_of(tmp_path, 2)]
    assert native.read_bytes() == b"native"
    assert len(list(alike.iterdir())) == 2
    for path in (alike, link, native.parent):
        with pytest.raises(StorageError, match="nothing was removed"):
            purge_slab(path)


def test_a_strangers_file_in_a_slab_stays(tmp_path: Path) -> None:
    make_used(tmp_path, 1, 100)
    stranger = directory_of(tmp_path, 1) / "notes.txt"
    stranger.write_text("mine")
    with pytest.raises(StorageError, match="can't remove"):
        purge_slab(directory_of(tmp_path, 1))
    assert [path.read_text() for path in tmp_path.rglob("notes.txt")] == ["mine"]


@pytest.mark.parametrize("state", [".making", ".removing"])
def test_left_overs_of_a_crash_go(tmp_path: Path, state: str) -> None:
    make_used(tmp_path, 1, 100)
    left_over = tmp_path / f".{namespace(1).directory_name}{state}"
    directory_of(tmp_path, 1).rename(left_over)
    (left_over / INDEX_FILE).write_bytes(b"half")
    slab = opened(tmp_path)
    assert list(slab.entries()) == []
    assert os.listdir(tmp_path) == [namespace(1).directory_name]
    slab.close()


def filled(root_dir: Path) -> Slab:
    slab = opened(root_dir)
    for number in range(SLOTS):
        put(slab, number, number)
    return slab


def test_a_larger_size_keeps_every_chunk(tmp_path: Path) -> None:
    filled(tmp_path).close()
    slab = opened(tmp_path, slabs=2)
    assert slab.slot_count > SLOTS
    assert slab.preallocated
    assert all(holds(slab, number, number) for number in range(SLOTS))
    assert put(slab, 99, slab.slot_count - 1) is Outcome.OK
    slab.close()
    again = opened(tmp_path, slabs=2)
    assert holds(again, 99, again.slot_count - 1)
    again.close()


def test_a_smaller_size_keeps_the_chunks_that_fit(tmp_path: Path) -> None:
    filled(tmp_path).close()
    slab = opened(tmp_path, slabs=0.5)
    kept = slab.slot_count
    assert 0 < kept < SLOTS
    assert [entry.key for entry in slab.entries()] == [chunk_key(number) for number in range(kept)]
    slab.close()
    assert sum(file.stat().st_size for file in directory_of(tmp_path, 1).iterdir()) < SIZE
    again = opened(tmp_path)
    assert len(list(again.entries())) == kept, "what was cut off stays gone"
    again.close()


def test_growing_goes_on_where_a_crash_cut_it_short(tmp_path: Path) -> None:
    filled(tmp_path).close()
    for name in (DATA_FILE, INDEX_FILE):
        with (directory_of(tmp_path, 1) / name).open("ab") as file:
            file.write(bytes(8192))
    slab = opened(tmp_path, slabs=2)
    assert len(list(slab.entries())) == SLOTS
    slab.close()


def test_after_an_interrupted_shrinking_no_old_record_comes_back(tmp_path: Path) -> None:
    filled(tmp_path).close()
    directory = directory_of(tmp_path, 1)
    cut_off = (directory / INDEX_FILE).read_bytes()[-128 * 4 :]
    opened(tmp_path, slabs=0.5).close()
    with (directory / INDEX_FILE).open("ab") as index:
        index.write(cut_off)
    slab = opened(tmp_path)
    assert len(list(slab.entries())) < SLOTS - 2
    slab.close()


def test_growing_fails_whole(tmp_path: Path) -> None:
    create_slab(tmp_path / "slab", namespace(1), SlabGeometry(SLOTS, CHUNK))
    files: SlabFiles = open_slab(tmp_path / "slab", namespace(1), CHUNK)
    with pytest.raises(StorageError, match="can't resize"):
        resize_slab(files, 1 << 50)
    files.close()
    assert (tmp_path / "slab" / DATA_FILE).stat().st_size == SLOTS * CHUNK
    open_slab(tmp_path / "slab", namespace(1), CHUNK).close()


def test_listing_tells_what_is_there(tmp_path: Path) -> None:
    make_used(tmp_path, 2, 100)
    slab = opened(tmp_path, 1, slabs=2, share=SIZE)
    for slot in range(3):
        put(slab, slot % 2, slot)
    mine, other = describe_slabs(tmp_path)
    assert mine.namespace == namespace(1)
    assert mine.geometry == SlabGeometry(SLOTS, CHUNK)
    assert (mine.chunks, mine.in_use, mine.problem) == (2, True, None)
    assert mine.size_bytes == SIZE
    assert (other.chunks, other.in_use, other.last_used_s) == (0, False, 100)
    assert mine.last_used_s > other.last_used_s
    slab.close()
    assert not describe_slab(mine.directory).in_use


def test_listing_names_the_problem_of_a_damaged_slab(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        make_used(tmp_path, number, 100)
    (directory_of(tmp_path, 1) / DATA_FILE).unlink()
    (directory_of(tmp_path, 2) / NAMESPACE_FILE).write_bytes(b"{}")
    os.truncate(directory_of(tmp_path, 3) / DATA_FILE, 4096)
    problems = [info.problem or "" for info in describe_slabs(tmp_path)]
    for problem, word in zip(problems, (DATA_FILE, "damaged", "truncated"), strict=True):
        assert word in problem


def test_looking_does_not_disturb_an_owner(tmp_path: Path) -> None:
    make_used(tmp_path, 1, 100)
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            describe_slab(directory_of(tmp_path, 1))

    looker = threading.Thread(target=look)
    looker.start()
    try:
        for _ in range(50):
            opened(tmp_path).close()
    finally:
        stop.set()
        looker.join()


def test_purge_removes_a_slab_whole_unless_it_is_in_use(tmp_path: Path) -> None:
    slab = filled(tmp_path)
    with pytest.raises(StorageError, match="in use; stop its engine"):
        purge_slab(directory_of(tmp_path, 1))
    assert holds(slab, 3, 3)
    slab.close()
    purge_slab(directory_of(tmp_path, 1))
    assert os.listdir(tmp_path) == []


def test_a_damaged_slab_can_be_purged(tmp_path: Path) -> None:
    filled(tmp_path).close()
    (directory_of(tmp_path, 1) / DATA_FILE).unlink()
    with pytest.raises(StorageError, match="run `emberkv purge`"):
        opened(tmp_path)
    purge_slab(directory_of(tmp_path, 1))
    opened(tmp_path).close()


def test_half_of_the_free_space_counts_our_own_as_free(tmp_path: Path) -> None:
    status = os.statvfs(tmp_path)
    free_bytes = status.f_bavail * status.f_frsize
    # Others use the same file system, so only its order of magnitude is certain.
    assert 0 < half_of_free_bytes(tmp_path) < free_bytes


def test_verify_finds_the_corrupt_ones(tmp_path: Path) -> None:
    with ExitStack() as undo:
        slab = filled(tmp_path)
        undo.callback(slab.close)
        with (directory_of(tmp_path, 1) / DATA_FILE).open("r+b") as data:
            for slot in (2, 5):
                data.seek(slot * CHUNK + 9)
                data.write(b"damage")
        steps: list[tuple[int, int]] = []
        report = verify_slab(
            directory_of(tmp_path, 1), lambda done, total: steps.append((done, total))
        )
        assert report.corrupt_slots == (2, 5)
        assert (report.sound, report.changed, report.unreadable_slots) == (6, 0, ())
        assert not report.is_sound
        assert steps == [(number, SLOTS) for number in range(1, SLOTS + 1)]


def test_verify_of_an_empty_slab_is_sound(tmp_path: Path) -> None:
    make_used(tmp_path, 1, 100)
    report = verify_slab(directory_of(tmp_path, 1), lambda _done, _total: None)
    assert report.is_sound
    assert report.sound == 0


def test_verify_calls_no_chunk_corrupt_that_is_being_rewritten(tmp_path: Path) -> None:
    slab = filled(tmp_path)
    stop = threading.Event()

    def rewrite() -> None:
        number = SLOTS
        while not stop.is_set():
            payloads = [payload_of(number + slot, CHUNK) for slot in range(SLOTS)]
            records = [
                record_for(number + slot, slot, payload) for slot, payload in enumerate(payloads)
            ]
            slab.write(records, [memoryview(payload) for payload in payloads])
            number += SLOTS

    writer = threading.Thread(target=rewrite)
    writer.start()
    try:
        reports = [
            verify_slab(directory_of(tmp_path, 1), lambda _done, _total: None) for _ in range(200)
        ]
    finally:
        stop.set()
        writer.join()
    assert all(report.is_sound for report in reports)
    assert get(slab, 0, 0)[0] is Outcome.ABSENT
    slab.close()
