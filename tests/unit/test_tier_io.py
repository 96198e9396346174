"""Tier I/O: parallel, in batches, loads apart from writes, rows of other generations untouched."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np
import pytest

from emberkv.domain.types import DISK, RAM, ChunkKey, Copy, Entry, Outcome, Slot, TransferId
from emberkv.live.arena import READY, Arena, ArenaGeometry, create_memory
from emberkv.live.keeper.seals import Seals, checksum
from emberkv.live.keeper.tier_io import FIRST_READ_BYTES, TierIo
from emberkv.tiers.base import Record
from emberkv.tiers.memory import MemoryStorage

SLOTS = 64
CHUNK_BYTES = 4096
DEADLINE_S = 20


class Gate(MemoryStorage):
    """A storage whose reads or writes can be made to hang, and which counts who is inside."""

    def __init__(self) -> None:
        super().__init__(SLOTS, CHUNK_BYTES)
        self.reads, self.writes = threading.Event(), threading.Event()
        self.reads.set()
        self.writes.set()
        self.inside: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.error: Exception | None = None

    def read(
        self, records: Sequence[Record], payloads: Sequence[memoryview], /
    ) -> Sequence[Outcome]:
        self.inside.put("read")
        assert self.reads.wait(DEADLINE_S)
        return super().read(records, payloads)

    def write(
        self, records: Sequence[Record], payloads: Sequence[memoryview], /
    ) -> Sequence[Outcome]:
        self.inside.put("write")
        assert self.writes.wait(DEADLINE_S)
        if self.error is not None:
            raise self.error
        return super().write(records, payloads)


class Rig:
    """An arena, a storage, and what was reported."""

    def __init__(self, **options: int) -> None:
        geometry = ArenaGeometry(SLOTS, CHUNK_BYTES)
        fd = create_memory(geometry)
        self.arena = Arena(fd, geometry)
        os.close(fd)
        self.seals = Seals(self.arena)
        self.storage = Gate()
        self.io = TierIo(self.arena, self.seals, self.storage, **options)
        self.reports: queue.SimpleQueue[tuple[int, int, tuple[Outcome, ...]]] = queue.SimpleQueue()
        self._transfer = 0

    def report(self, copy: Copy, first: int, outcomes: Sequence[Outcome], busy_s: float) -> None:
        assert busy_s >= 0
        self.reports.put((copy.transfer, first, tuple(outcomes)))

    def fill(self, slots: Sequence[int], name: bytes = b"k") -> None:
        """Put chunks into RAM as the engine does."""
        keys = [ChunkKey(name + b"%d" % slot) for slot in slots]
        self.arena.mark_writing([Slot(s) for s in slots], keys, [None] * len(slots))
        for slot, key in zip(slots, keys, strict=True):
            self.arena.row(Slot(slot))[:] = key.ljust(CHUNK_BYTES, b".")
        self.arena.mark_ready([Slot(s) for s in slots], 0)

    def copy(
        self, names: Sequence[bytes], ram: Sequence[int], disk: Sequence[int], up: bool
    ) -> int:
        """Submit one; returns its transfer."""
        self._transfer += 1
        keys = tuple(ChunkKey(name) for name in names)
        if up:
            self.arena.mark_writing([Slot(s) for s in ram], keys, [None] * len(keys))
        ram_slots, disk_slots = tuple(map(Slot, ram)), tuple(map(Slot, disk))
        self.io.submit(
            Copy(
                TransferId(self._transfer),
                DISK if up else RAM,
                RAM if up else DISK,
                keys,
                (None, *keys[:-1]),
                disk_slots if up else ram_slots,
                ram_slots if up else disk_slots,
            ),
            self.report,
        )
        return self._transfer

    def write(self, slots: Sequence[int]) -> int:
        return self.copy([b"k%d" % s for s in slots], slots, slots, up=False)

    def results(self, chunks: int) -> dict[tuple[int, int], Outcome]:
        """Wait for as many chunks; each must end once."""
        found: dict[tuple[int, int], Outcome] = {}
        while len(found) < chunks:
            transfer, first, outcomes = self.reports.get(timeout=DEADLINE_S)
            for index, outcome in enumerate(outcomes, first):
                assert (transfer, index) not in found
                found[transfer, index] = outcome
        return found

    def idle(self) -> None:
        done = threading.Event()
        self.io.when_idle(done.set)
        assert done.wait(DEADLINE_S)


@pytest.fixture
def start() -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def start(**options: int) -> Rig:
        rigs.append(Rig(**options))
        return rigs[-1]

    yield start
    for rig in rigs:
        rig.storage.reads.set()
        rig.storage.writes.set()
        rig.io.close()
        rig.idle()
        rig.seals.stop()


def test_chunks_go_down_and_come_back_up(start: Callable[..., Rig]) -> None:
    rig = start()
    rig.fill(range(20))
    rig.write(range(20))
    assert set(rig.results(20).values()) == {Outcome.OK}
    rig.copy([b"k%d" % slot for slot in range(20)], range(30, 50), range(20), up=True)
    assert set(rig.results(20).values()) == {Outcome.OK}
    for slot in range(20):
        assert bytes(rig.arena.row(Slot(30 + slot))) == bytes(rig.arena.row(Slot(slot)))


def test_a_write_seals_its_row_and_so_does_a_read(start: Callable[..., Rig]) -> None:
    rig = start()
    rig.fill([1])
    rig.write([1])
    rig.results(1)
    rig.copy([b"k1"], [2], [1], up=True)
    rig.results(1)
    sealed = threading.Event()
    rig.arena.headers["state"][2] = READY
    rig.seals.verify(lambda entries, last: sealed.set() if last else None)  # after what is queued
    assert sealed.wait(DEADLINE_S)
    for slot in (1, 2):
        header = rig.arena.headers[slot]
        assert header["sealed"] == header["generation"] == 1
        assert header["checksum"] == checksum(rig.arena.row(Slot(slot)))


def test_each_batch_is_reported_as_soon_as_it_ends(start: Callable[..., Rig]) -> None:
    rig = start(write_threads=1, batch_bytes=2 * CHUNK_BYTES)
    rig.fill(range(5))
    rig.write(range(5))
    reported = [rig.reports.get(timeout=DEADLINE_S)[1:] for _ in range(3)]
    assert [(first, len(outcomes)) for first, outcomes in reported] == [(0, 2), (2, 2), (4, 1)]


def test_one_copy_is_worked_on_by_several_threads(start: Callable[..., Rig]) -> None:
    rig = start(write_threads=4, batch_bytes=CHUNK_BYTES)
    rig.fill(range(8))
    rig.storage.writes.clear()
    rig.write(range(8))
    for _ in range(4):
        assert rig.storage.inside.get(timeout=DEADLINE_S) == "write"
    rig.storage.writes.set()
    rig.results(8)


def test_a_promotion_begins_with_small_batches_for_all_threads(start: Callable[..., Rig]) -> None:
    """The first chunks are there early, the rest is shared out."""
    io = start(read_threads=4, batch_bytes=1 << 30).io
    small = FIRST_READ_BYTES // CHUNK_BYTES
    cuts = list(io._cuts(4 * small + 10, upward=True))
    assert [last - first for first, last in cuts] == [small] * 4 + [3, 3, 3, 1]
    assert cuts[0][0] == 0
    assert all(one[1] == other[0] for one, other in pairwise(cuts))
    assert list(io._cuts(4 * small + 10, upward=False)) == [(0, 4 * small + 10)]


def test_a_load_does_not_wait_behind_write_behinds(start: Callable[..., Rig]) -> None:
    rig = start(write_threads=2, read_threads=1)
    rig.fill([0])
    rig.write([0])
    rig.results(1)
    rig.storage.writes.clear()
    rig.fill(range(1, 30))
    for slot in range(1, 30):
        rig.write([slot])
    load = rig.copy([b"k0"], [40], [0], up=True)
    assert rig.results(1) == {(load, 0): Outcome.OK}
    rig.storage.writes.set()
    rig.results(29)


def test_what_is_queued_can_be_cancelled_and_what_runs_goes_on(start: Callable[..., Rig]) -> None:
    rig = start(write_threads=1, batch_bytes=CHUNK_BYTES)
    rig.fill(range(4))
    rig.storage.writes.clear()
    transfer = rig.write(range(4))
    assert rig.storage.inside.get(timeout=DEADLINE_S) == "write"
    rig.io.cancel(writes_too=True)
    assert rig.results(3) == {(transfer, at): Outcome.SHED for at in (1, 2, 3)}
    rig.storage.writes.set()
    assert rig.results(1) == {(transfer, 0): Outcome.OK}
    rig.fill([9])
    again = rig.write([9])  # cancelling is no end
    assert rig.results(1) == {(again, 0): Outcome.OK}


def test_a_write_taken_up_before_everything_is_cancelled_is_not_begun_after() -> None:
    rig = Rig(read_threads=0, write_threads=0)  # the test is the thread
    rig.fill([3])
    rig.write([3])
    taken_up = rig.io._writes.get_nowait()
    rig.io.cancel(writes_too=True)
    rig.storage.reset()
    assert rig.io._write(taken_up) == [Outcome.SHED]
    assert list(rig.storage.entries()) == []
    rig.seals.stop()


def test_a_reset_waits_for_the_writes_that_run(start: Callable[..., Rig]) -> None:
    rig = start(write_threads=1)
    rig.fill([3])
    rig.storage.writes.clear()
    rig.write([3])
    assert rig.storage.inside.get(timeout=DEADLINE_S) == "write"
    rig.io.cancel(writes_too=True)
    done = threading.Event()
    rig.io.when_written(done.set)
    assert not done.is_set()
    rig.storage.writes.set()
    assert done.wait(DEADLINE_S)


def test_a_hung_read_holds_its_slots_and_others_go_on(start: Callable[..., Rig]) -> None:
    rig = start(read_threads=1, write_threads=1, batch_bytes=CHUNK_BYTES)
    rig.storage.reads.clear()
    load = rig.copy([b"a", b"b"], [5, 6], [5, 6], up=True)
    assert rig.storage.inside.get(timeout=DEADLINE_S) == "read"
    rig.io.cancel(writes_too=False)
    given_back: queue.SimpleQueue[list[Slot]] = queue.SimpleQueue()
    assert rig.io.quarantine(given_back.put) == [5]
    assert rig.results(1) == {(load, 1): Outcome.SHED}
    rig.fill([1])
    write = rig.write([1])
    assert rig.results(1) == {(write, 0): Outcome.OK}
    assert given_back.empty()
    rig.storage.reads.set()
    assert given_back.get(timeout=DEADLINE_S) == [5]


def test_a_row_given_to_another_chunk_meanwhile_is_left_alone(start: Callable[..., Rig]) -> None:
    rig = start(write_threads=1, read_threads=1)
    rig.storage.writes.clear()
    rig.storage.reads.clear()
    rig.fill([0, 1, 2])
    first_write = rig.write([0])
    assert rig.storage.inside.get(timeout=DEADLINE_S) == "write"
    write = rig.write([1])
    first_read = rig.copy([b"x"], [8], [8], up=True)
    assert rig.storage.inside.get(timeout=DEADLINE_S) == "read"
    read = rig.copy([b"k2"], [9], [2], up=True)
    rig.fill([1, 9], name=b"new")
    rig.storage.writes.set()
    rig.storage.reads.set()
    found = rig.results(4)
    assert found[first_write, 0] is Outcome.OK
    assert found[first_read, 0] is Outcome.ABSENT
    assert found[write, 0] is found[read, 0] is Outcome.SHED
    assert [entry.key for entry in rig.storage.entries()] == [b"k0"]
    assert bytes(rig.arena.row(Slot(9))).startswith(b"new9.")


def test_a_storage_that_raises_ends_its_chunks_and_no_thread(start: Callable[..., Rig]) -> None:
    rig = start(write_threads=1)
    rig.fill([0, 1])
    rig.storage.error = RuntimeError("not allowed by the protocol")
    failed = rig.write([0])
    assert rig.results(1) == {(failed, 0): Outcome.FAILED}
    rig.storage.error = None
    fine = rig.write([1])
    assert rig.results(1) == {(fine, 0): Outcome.OK}


def test_closing_sheds_what_is_queued(start: Callable[..., Rig]) -> None:
    rig = start(write_threads=1, batch_bytes=CHUNK_BYTES)
    rig.fill(range(3))
    rig.storage.writes.clear()
    transfer = rig.write(range(3))
    assert rig.storage.inside.get(timeout=DEADLINE_S) == "write"
    rig.io.close()
    assert rig.results(2) == {(transfer, 1): Outcome.SHED, (transfer, 2): Outcome.SHED}


# ── seals ────────────────────────────────────────────────────────────────────────────────────────


def verified(seals: Seals) -> list[bytes]:
    found: list[bytes] = []
    done = threading.Event()

    def on_batch(entries: Sequence[Entry], last: bool) -> None:
        found.extend(entry.key for entry in entries)
        if last:
            done.set()

    seals.verify(on_batch)
    assert done.wait(DEADLINE_S)
    return found


def test_only_sealed_ready_rows_that_match_are_verified(start: Callable[..., Rig]) -> None:
    rig = start()
    rig.fill(range(6))
    rig.seals.request(np.arange(5))  # not 5
    assert verified(rig.seals) == [b"k0", b"k1", b"k2", b"k3", b"k4"]
    rig.arena.row(Slot(1))[7] = 0
    rig.arena.mark_free([Slot(2)])
    rig.arena.mark_writing([Slot(3)], [ChunkKey(b"half")], [None])
    assert verified(rig.seals) == [b"k0", b"k4"]


def test_verified_rows_come_least_recently_used_first(start: Callable[..., Rig]) -> None:
    rig = start()
    rig.fill(range(4))
    rig.seals.request(np.arange(4))
    rig.arena.mark_used([Slot(1), Slot(0)], tick=100)
    assert verified(rig.seals) == [b"k2", b"k3", b"k1", b"k0"]


def test_a_row_that_is_being_written_is_not_sealed(start: Callable[..., Rig]) -> None:
    rig = start()
    rig.fill([0])
    rig.arena.mark_writing([Slot(0)], [ChunkKey(b"next")], [None])
    rig.seals.request(np.array([0]))
    rig.arena.mark_ready([Slot(0)], 0)
    assert verified(rig.seals) == []


def test_invalidated_seals_stay_invalid(start: Callable[..., Rig]) -> None:
    rig = start(write_threads=1)
    rig.fill(range(4))
    rig.seals.request(np.arange(3))
    rig.storage.writes.clear()
    rig.write([3])
    assert rig.storage.inside.get(timeout=DEADLINE_S) == "write"
    rig.seals.invalidate()
    rig.storage.writes.set()
    rig.results(1)
    assert verified(rig.seals) == []
    assert not rig.arena.headers["sealed"].any()
