"""The storage that fails on purpose does so exactly as planned."""

from __future__ import annotations

import threading

from emberkv.domain.types import Outcome, Slot
from emberkv.drills.faults import Fault, FaultyStorage, Operation
from emberkv.testing.storage import get, holds, put, record_for
from emberkv.tiers.memory import MemoryStorage

TIMEOUT_S = 30.0


def faulty(*faults: Fault) -> FaultyStorage:
    return FaultyStorage(MemoryStorage(4, 64), faults)


def test_an_outcome_replaces_the_storages_own() -> None:
    storage = faulty(Fault(Operation.WRITE, frozenset({Slot(1)}), outcome=Outcome.FULL))
    assert put(storage, 0, 0) is Outcome.OK
    assert put(storage, 1, 1) is Outcome.FULL
    assert get(storage, 1, 1)[0] is Outcome.ABSENT
    storage.plan(Fault(Operation.READ, outcome=Outcome.FAILED))
    assert put(storage, 1, 1) is Outcome.OK
    assert get(storage, 1, 1)[0] is Outcome.FAILED
    storage.plan()
    assert holds(storage, 1, 1)


def test_only_the_chunks_named_are_hit() -> None:
    storage = faulty()
    for slot in range(4):
        put(storage, slot, slot)
    storage.plan(Fault(Operation.READ, frozenset({Slot(2)}), outcome=Outcome.FAILED))
    rooms = [memoryview(bytearray(64)) for _ in range(4)]
    outcomes = storage.read([record_for(slot, slot) for slot in range(4)], rooms)
    assert list(outcomes) == [Outcome.OK, Outcome.OK, Outcome.FAILED, Outcome.OK]


def test_a_flip_while_writing_is_corrupt_from_then_on() -> None:
    storage = faulty(Fault(Operation.WRITE, flip=True))
    assert put(storage, 1, 1) is Outcome.OK
    storage.plan()
    assert get(storage, 1, 1)[0] is Outcome.CORRUPT


def test_a_flip_while_reading_is_corrupt_this_time() -> None:
    storage = faulty(Fault(Operation.READ, flip=True))
    put(storage, 1, 1)
    assert get(storage, 1, 1)[0] is Outcome.CORRUPT
    storage.plan()
    assert holds(storage, 1, 1)


def test_a_held_call_goes_on_when_it_is_released() -> None:
    release = threading.Event()
    storage = faulty(Fault(Operation.WRITE, release=release))
    outcomes: list[Outcome] = []
    writer = threading.Thread(target=lambda: outcomes.append(put(storage, 1, 1)))
    writer.start()
    assert storage.wait_until_held(1, TIMEOUT_S)
    assert get(storage, 1, 1)[0] is Outcome.ABSENT
    release.set()
    writer.join(TIMEOUT_S)
    assert outcomes == [Outcome.OK]
    assert not storage.wait_until_held(1, 0)
    assert holds(storage, 1, 1)
