"""The slab against a plain dictionary, through crashes, flipped bits, truncation and resets."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from emberkv.domain.types import Outcome, Slot
from emberkv.testing.storage import chunk_key, payload_of, record_for
from emberkv.tiers.format import (
    DATA_FILE,
    HEADER_BYTES,
    INDEX_FILE,
    RECORD_BYTES,
    SlabGeometry,
    StoredNamespace,
)
from emberkv.tiers.slab import Slab
from emberkv.tiers.slab_directory import SlabDirectory, describe_slab
from emberkv.tiers.slab_verify import verify_slab

SLOTS = 6
NO_NUMBER = 999
NAMESPACE = StoredNamespace(b"machine!", {"model": "tiny"})
numbers = st.integers(0, 9)
slots = st.integers(0, SLOTS - 1)


@dataclass
class Expected:
    """What a slot holds: the chunk, when it was written, and whether something damaged it."""

    number: int
    order: int
    sound: bool = True


class SlabMachine(RuleBasedStateMachine):
    """Writes, reads and damages one slab; after each step it must only tell the truth."""

    def __init__(self) -> None:
        super().__init__()
        self.scratch = Path(tempfile.mkdtemp(prefix="slab-machine-"))
        self.generation = 0
        self.order = 0
        self.weights = 0
        self.model: dict[int, Expected] = {}
        self.old_payloads: dict[int, bytes] = {}

    @initialize(payload_bytes=st.sampled_from([100, 4096, 5000, 8192]))
    def start(self, payload_bytes: int) -> None:
        self.geometry = SlabGeometry(SLOTS, payload_bytes)
        self.root_dir = self.scratch / "0"
        self.root_dir.mkdir()
        self.slab = self.opened()

    def opened(self) -> Slab:
        directory = SlabDirectory(self.root_dir, self.geometry.total_bytes)
        return directory.open_slab(NAMESPACE, self.geometry.payload_bytes)

    @property
    def directory(self) -> Path:
        return self.root_dir / NAMESPACE.directory_name

    def payload(self, number: int) -> bytes:
        """A key names other bytes after the weights changed."""
        return payload_of(number + 100 * self.weights, self.geometry.payload_bytes)

    @rule(batch=st.dictionaries(slots, numbers, min_size=1))
    def write(self, batch: dict[int, int]) -> None:
        payloads = [self.payload(number) for number in batch.values()]
        records = [
            record_for(number, slot, payload)
            for (slot, number), payload in zip(batch.items(), payloads, strict=True)
        ]
        for slot in batch:
            self.old_payloads[slot] = self.stored_payload(slot)
        outcomes = self.slab.write(records, [memoryview(payload) for payload in payloads])
        assert set(outcomes) == {Outcome.OK}
        for slot, number in batch.items():
            self.order += 1
            self.model[slot] = Expected(number, self.order)

    @rule(wanted=st.lists(st.tuples(slots, numbers), unique_by=lambda pair: pair[0]))
    def read(self, wanted: list[tuple[int, int]]) -> None:
        rooms = [bytearray(self.geometry.payload_bytes) for _ in wanted]
        outcomes = self.slab.read(
            [record_for(number, slot) for slot, number in wanted],
            [memoryview(room) for room in rooms],
        )
        for (slot, number), room, outcome in zip(wanted, rooms, outcomes, strict=True):
            expected = self.model.get(slot)
            matches = expected is not None and expected.number == number
            if outcome is Outcome.OK:
                assert matches
                assert bytes(room) == self.payload(number)
            elif matches and expected is not None:
                assert not expected.sound
            else:
                damaged = expected is not None and not expected.sound
                allowed = {Outcome.ABSENT, Outcome.CORRUPT} if damaged else {Outcome.ABSENT}
                assert outcome in allowed

    @rule()
    def read_everything(self) -> None:
        self.read([(slot, expected.number) for slot, expected in self.model.items()])

    @rule()
    def reset(self) -> None:
        self.slab.reset()
        self.weights += 1
        # A damaged record stays what it is until its slot is written again.
        self.model = {
            slot: Expected(NO_NUMBER, 0, sound=False)
            for slot, expected in self.model.items()
            if not expected.sound
        }

    @rule()
    def reopen(self) -> None:
        self.slab.close()
        self.slab = self.opened()

    @rule()
    def crash(self) -> None:
        """Go on with the files as they are now; the old owner never closed them."""
        self.generation += 1
        before, self.root_dir = self.directory, self.scratch / str(self.generation)
        shutil.copytree(before, self.directory)
        dead, self.slab = self.slab, self.opened()
        dead.close()

    @rule(slot=slots)
    def lose_power_before_the_payload_was_written(self, slot: int) -> None:
        if slot in self.model and slot in self.old_payloads:
            self.store_payload(slot, self.old_payloads[slot])
            self.damage(slot)

    @rule(slot=slots, byte=st.integers(0, 99), bit=st.integers(0, 7))
    def flip_a_bit_of_a_payload(self, slot: int, byte: int, bit: int) -> None:
        self.flip(DATA_FILE, slot * self.geometry.stride_bytes + byte, bit)
        self.damage(slot)

    @rule(slot=slots, byte=st.integers(0, RECORD_BYTES - 1), bit=st.integers(0, 7))
    def flip_a_bit_of_a_record(self, slot: int, byte: int, bit: int) -> None:
        self.flip(INDEX_FILE, HEADER_BYTES + slot * RECORD_BYTES + byte, bit)
        # An empty slot with a flipped bit is a damaged record: no key can be found there.
        self.model.setdefault(slot, Expected(NO_NUMBER, 0, sound=False))
        self.damage(slot)

    @rule(slot=slots)
    def truncate_and_extend_the_data(self, slot: int) -> None:
        with (self.directory / DATA_FILE).open("r+b") as data:
            data.truncate(slot * self.geometry.stride_bytes)
            data.truncate(self.geometry.data_bytes)
        for lost in range(slot, SLOTS):
            self.damage(lost)

    def damage(self, slot: int) -> None:
        if slot in self.model:
            self.model[slot].sound = False

    def flip(self, name: str, offset: int, bit: int) -> None:
        with (self.directory / name).open("r+b") as file:
            file.seek(offset)
            (value,) = file.read(1)
            file.seek(offset)
            file.write(bytes([value ^ 1 << bit]))

    def stored_payload(self, slot: int) -> bytes:
        with (self.directory / DATA_FILE).open("rb") as data:
            data.seek(slot * self.geometry.stride_bytes)
            return data.read(self.geometry.payload_bytes)

    def store_payload(self, slot: int, payload: bytes) -> None:
        with (self.directory / DATA_FILE).open("r+b") as data:
            data.seek(slot * self.geometry.stride_bytes)
            data.write(payload)

    @invariant()
    def entries_are_what_was_written_in_that_order(self) -> None:
        if not hasattr(self, "slab"):
            return
        entries = list(self.slab.entries())
        places = [Slot(entry.slot) for entry in entries]
        assert all(chunk_key(self.model[entry.slot].number) == entry.key for entry in entries)
        assert len({entry.key for entry in entries}) == len(entries)
        orders = [self.model[slot].order for slot in places]
        assert orders == sorted(orders)
        newest: dict[int, int] = {}
        for expected in self.model.values():
            newest[expected.number] = max(newest.get(expected.number, 0), expected.order)
        must = {
            slot
            for slot, expected in self.model.items()
            if expected.sound and expected.order == newest[expected.number]
        }
        assert must <= set(places)

    @rule()
    def look_from_outside(self) -> None:
        sound = {slot for slot, expected in self.model.items() if expected.sound}
        report = verify_slab(self.directory, lambda _done, _total: None)
        assert not sound & set(report.corrupt_slots)
        assert report.sound >= len(sound)
        assert not report.changed
        assert describe_slab(self.directory).in_use

    def teardown(self) -> None:
        if hasattr(self, "slab"):
            self.slab.close()
        shutil.rmtree(self.scratch)


TestSlabMachine = SlabMachine.TestCase
TestSlabMachine.settings = settings(stateful_step_count=30)
