"""Conformance of a `SlotStorage`.

A storage is held to the protocol by subclassing `SlotStorageTests` in a test module, or
`DurableSlotStorageTests` if it outlives its process:

    class TestMine(DurableSlotStorageTests):
        def make(self, slot_count, payload_bytes): ...
        def reopen(self, storage): ...
"""

from __future__ import annotations

import mmap
import threading
from dataclasses import replace

import pytest
import xxhash

from emberkv.domain.types import ChunkKey, Entry, Outcome, Slot
from emberkv.tiers.base import Record, SlotStorage

OK = Outcome.OK
PAYLOAD_SIZES = (1, 100, 4096, 5000, 65536)


def chunk_key(number: int) -> ChunkKey:
    """A distinct key per number, 32 bytes long."""
    return ChunkKey(number.to_bytes(4, "big") * 8)


def payload_of(number: int, size_bytes: int) -> bytes:
    """Bytes that differ for each number and do not repeat soon."""
    words = (xxhash.xxh3_128_digest(b"%d %d" % (number, at)) for at in range(0, size_bytes, 16))
    return b"".join(words)[:size_bytes]


def record_for(number: int, slot: int, payload: bytes = b"", parent: int | None = None) -> Record:
    """The record of chunk `number` in `slot`; without a payload, one to read with."""
    return Record(
        chunk_key(number),
        None if parent is None else chunk_key(parent),
        Slot(slot),
        xxhash.xxh3_64_intdigest(payload) if payload else 0,
    )


def put(storage: SlotStorage, number: int, slot: int, parent: int | None = None) -> Outcome:
    """Write chunk `number` to `slot`."""
    payload = payload_of(number, storage.payload_bytes)
    return storage.write([record_for(number, slot, payload, parent)], [memoryview(payload)])[0]


def get(storage: SlotStorage, number: int, slot: int) -> tuple[Outcome, bytes]:
    """Read chunk `number` from `slot`."""
    room = bytearray(storage.payload_bytes)
    outcome = storage.read([record_for(number, slot)], [memoryview(room)])[0]
    return outcome, bytes(room)


def holds(storage: SlotStorage, number: int, slot: int) -> bool:
    """Whether `slot` gives back exactly what `put` wrote for `number`."""
    return get(storage, number, slot) == (OK, payload_of(number, storage.payload_bytes))


class SlotStorageTests:
    """What every `SlotStorage` must do; see the module's docstring."""

    def make(self, slot_count: int, payload_bytes: int) -> SlotStorage:
        """A new empty storage; the subclass closes it after the test if that matters."""
        raise NotImplementedError

    @pytest.mark.parametrize("payload_bytes", PAYLOAD_SIZES)
    def test_gives_back_what_was_written(self, payload_bytes: int) -> None:
        storage = self.make(4, payload_bytes)
        assert (storage.slot_count, storage.payload_bytes) == (4, payload_bytes)
        assert [put(storage, number, number) for number in range(4)] == [OK] * 4
        assert all(holds(storage, number, number) for number in range(4))

    def test_an_empty_slot_is_absent(self) -> None:
        assert get(self.make(2, 64), 1, 1)[0] is Outcome.ABSENT

    def test_another_key_is_absent(self) -> None:
        storage = self.make(2, 64)
        put(storage, 1, 0)
        assert get(storage, 2, 0)[0] is Outcome.ABSENT

    def test_a_rewritten_slot_forgets_its_first_chunk(self) -> None:
        storage = self.make(2, 4096)
        put(storage, 1, 0)
        put(storage, 2, 0)
        assert get(storage, 1, 0)[0] is Outcome.ABSENT
        assert holds(storage, 2, 0)

    def test_a_payload_that_is_not_its_checksum_is_corrupt(self) -> None:
        storage = self.make(2, 64)
        payload = payload_of(1, 64)
        record = replace(record_for(1, 0, payload), checksum=12345)
        assert storage.write([record], [memoryview(payload)]) == [OK]
        assert get(storage, 1, 0)[0] is Outcome.CORRUPT

    @pytest.mark.parametrize("slots", [(0, 1, 2, 3), (7, 2, 5, 3), (3, 2, 1, 0), (0, 2, 4, 6)])
    @pytest.mark.parametrize("payload_bytes", [100, 4096])
    def test_one_call_may_name_slots_in_any_order(
        self, slots: tuple[int, ...], payload_bytes: int
    ) -> None:
        storage = self.make(8, payload_bytes)
        payloads = [payload_of(slot, payload_bytes) for slot in slots]
        records = [
            record_for(slot, slot, payload) for slot, payload in zip(slots, payloads, strict=True)
        ]
        assert list(storage.write(records, [memoryview(it) for it in payloads])) == [OK] * 4
        rooms = [bytearray(payload_bytes) for _ in slots]
        wanted = [record_for(slot, slot) for slot in slots]
        wanted[2] = record_for(99, slots[2])
        outcomes = storage.read(wanted, [memoryview(room) for room in rooms])
        assert list(outcomes) == [OK, OK, Outcome.ABSENT, OK]
        assert [rooms[at] for at in (0, 1, 3)] == [payloads[at] for at in (0, 1, 3)]

    def test_takes_aligned_memory_of_a_large_mapping(self) -> None:
        storage = self.make(4, 8192)
        arena = mmap.mmap(-1, 4 * 8192)
        view = memoryview(arena)
        parts = [view[at * 8192 : (at + 1) * 8192] for at in range(4)]
        for number, part in enumerate(parts):
            part[:] = payload_of(number, 8192)
        records = [record_for(number, number, bytes(part)) for number, part in enumerate(parts)]
        assert list(storage.write(records, parts)) == [OK] * 4
        view[:] = bytes(4 * 8192)
        assert list(storage.read(records, parts)) == [OK] * 4
        assert all(bytes(part) == payload_of(at, 8192) for at, part in enumerate(parts))

    def test_a_call_without_records_does_nothing(self) -> None:
        storage = self.make(1, 64)
        assert list(storage.write([], [])) == []
        assert list(storage.read([], [])) == []

    def test_entries_come_least_recently_written_first(self) -> None:
        storage = self.make(4, 64)
        for number, slot in ((1, 2), (2, 0), (3, 1), (4, 2)):
            put(storage, number, slot, parent=number - 1 or None)
        expected = [
            Entry(chunk_key(2), chunk_key(1), Slot(0)),
            Entry(chunk_key(3), chunk_key(2), Slot(1)),
            Entry(chunk_key(4), chunk_key(3), Slot(2)),
        ]
        assert list(storage.entries()) == expected

    def test_of_one_key_in_two_slots_the_newest_is_an_entry(self) -> None:
        storage = self.make(3, 64)
        for slot in (2, 0, 1):
            put(storage, 1, slot)
        assert list(storage.entries()) == [Entry(chunk_key(1), None, Slot(1))]

    def test_reset_forgets_everything(self) -> None:
        storage = self.make(3, 64)
        for number in range(3):
            put(storage, number, number)
        storage.reset()
        assert list(storage.entries()) == []
        assert get(storage, 1, 1)[0] is Outcome.ABSENT
        put(storage, 7, 1)
        assert holds(storage, 7, 1)
        assert [entry.key for entry in storage.entries()] == [chunk_key(7)]

    def test_after_close_nothing_is_tried(self) -> None:
        storage = self.make(2, 64)
        storage.close()
        storage.close()
        assert put(storage, 1, 0) is Outcome.SHED
        assert get(storage, 1, 0)[0] is Outcome.SHED

    def test_many_threads_write_and_read_their_own_slots(self) -> None:
        storage = self.make(64, 4096)
        wrong: list[int] = []

        def work(first_slot: int) -> None:
            for turn in range(8):
                for slot in range(first_slot, first_slot + 8):
                    number = turn * 64 + slot
                    if put(storage, number, slot) is not OK or not holds(storage, number, slot):
                        wrong.append(slot)

        threads = [threading.Thread(target=work, args=(at * 8,)) for at in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert len(list(storage.entries())) == 64


class DurableSlotStorageTests(SlotStorageTests):
    """What a `SlotStorage` that outlives its process must do as well."""

    def reopen(self, storage: SlotStorage) -> SlotStorage:
        """Close `storage` and open it again as a new process would find it."""
        raise NotImplementedError

    def test_what_was_written_outlives_a_close(self) -> None:
        storage = self.make(4, 5000)
        for number in range(4):
            put(storage, number, 3 - number, parent=number - 1 if number else None)
        before = list(storage.entries())
        again = self.reopen(storage)
        assert list(again.entries()) == before
        assert all(holds(again, number, 3 - number) for number in range(4))
        put(again, 9, 0)
        assert [entry.key for entry in again.entries()][-1] == chunk_key(9)

    def test_what_follows_a_passing_reset_is_gone_at_the_next_opening(self) -> None:
        storage = self.make(2, 64)
        for passing in (True, True, False, True):
            put(storage, 1, 1)
            storage.reset(passing=passing)
            assert list(storage.entries()) == []
        put(storage, 2, 1)
        assert holds(storage, 2, 1)
        again = self.reopen(storage)
        assert list(again.entries()) == []
        assert get(again, 2, 1)[0] is Outcome.ABSENT
        put(again, 3, 0)
        storage = self.reopen(again)
        assert holds(storage, 3, 0)

    def test_a_reset_outlives_a_close(self) -> None:
        storage = self.make(2, 64)
        put(storage, 1, 1)
        storage.reset()
        again = self.reopen(storage)
        assert list(again.entries()) == []
        assert get(again, 1, 1)[0] is Outcome.ABSENT
