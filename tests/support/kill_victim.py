"""The process that gets killed: real slab and arena writes, without an end, driven by a seed.

    kill_victim.py        reads a JSON object a line, answers with a JSON object a line

The template process has everything imported and forks one victim per `{"do": "start", …}`, so
that a kill costs milliseconds. A victim is an engine and its keeper in one: it offloads into the
arena, writes behind, promotes, frees and resets with the keeper's own parts, and says in the
shared words what it has begun and what was acknowledged to it.
"""

from __future__ import annotations

import json
import os
import queue
import random
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from kill_defects import PLANTED
from kill_seams import Death, Seams
from kill_words import WEIGHTS_STEP, Place, Words, chunk_of, perhaps

from emberkv.domain.types import DISK, RAM, ChunkKey, Copy, Outcome, Slot, TransferId
from emberkv.live.arena import Arena, ArenaGeometry
from emberkv.live.keeper.seals import Seals
from emberkv.live.keeper.tier_io import TierIo
from emberkv.testing.storage import chunk_key, payload_of
from emberkv.tiers.format import SlabGeometry, StoredNamespace
from emberkv.tiers.slab import Slab
from emberkv.tiers.slab_directory import SlabDirectory

NUMBERS = 40
LONGEST_LIFE_S = 30.0
MAX_COPIES = 3
NOT_KILLED, VIOLATION, BROKEN = 3, 4, 5
NAMESPACE = StoredNamespace(b"kill-tests", {"model": "tiny"})


@dataclass(frozen=True)
class Plan:
    """What one victim is to do. `root_dir` may hold a slab of another size; then it is resized."""

    seed: str
    root_dir: str
    ram_slots: int
    disk_slots: int
    payload_bytes: int
    words_fd: int
    arena_fd: int
    owner_pid: int
    resets_soon: bool = False
    death: tuple[str, int, float] | None = None
    defect: str | None = None

    @property
    def arena_geometry(self) -> ArenaGeometry:
        return ArenaGeometry(self.ram_slots, self.payload_bytes)

    def open_slab(self) -> Slab:
        size_bytes = SlabGeometry(self.disk_slots, self.payload_bytes).total_bytes
        return SlabDirectory(Path(self.root_dir), size_bytes).open_slab(
            NAMESPACE, self.payload_bytes
        )


def key_of(chunk: int) -> ChunkKey:
    """The key of a chunk's id: weights do not change it."""
    return chunk_key(chunk % WEIGHTS_STEP)


class ViolationError(Exception):
    """The victim itself has seen something wrong; with a planted defect it keeps that to itself."""


@dataclass(eq=False)
class _Order:
    """A copy under way."""

    copy: Copy
    chunks: list[int]
    done: list[int]
    left: int = field(init=False)

    def __post_init__(self) -> None:
        self.left = len(self.chunks)


class Victim:
    """Works until it is killed. Slots under way belong to one operation at a time."""

    def __init__(self, plan: Plan, words: Words, seams: Seams) -> None:
        self._chance = random.Random(plan.seed)
        self._plan = plan
        self._words = words
        self._seams = seams
        arena_fd = os.open(f"/proc/{plan.owner_pid}/fd/{plan.arena_fd}", os.O_RDWR)
        self._arena = Arena(arena_fd, plan.arena_geometry)
        seams.watch_headers(self._arena)
        self._seals = Seals(self._arena)
        with seams.at(Place.OPENING_SLAB):
            storage = plan.open_slab()
        self._io = TierIo(self._arena, self._seals, storage, read_threads=2, write_threads=2)
        self._reports: queue.SimpleQueue[tuple[_Order, int, Sequence[Outcome]]] = (
            queue.SimpleQueue()
        )
        self._orders: list[_Order] = []
        self._busy_ram: set[int] = set()
        self._busy_disk: set[int] = set()
        self._written: dict[int, int] = {}
        self._unsealed: dict[int, int] = {}
        self._tick = 1
        self._transfer = 0
        self._resets_soon = plan.resets_soon

    def work(self) -> None:
        """Do one thing after the other."""
        end_s = time.monotonic() + LONGEST_LIFE_S
        doings = [self._store, self._write_behind, self._promote, self._free, self._touch]
        while time.monotonic() < end_s:
            self._words.steps += 1
            self._take_reports(wait=len(self._orders) >= MAX_COPIES)
            self._take_seals()
            if self._words.steps > 6 and (self._resets_soon or self._chance.random() < 0.01):
                self._reset()
                continue
            weights = (5, 8, 3, 2, 1)
            self._chance.choices(doings, weights)[0]()

    # ── RAM ──────────────────────────────────────────────────────────────────────────────────

    def _ram_slots(self, *, ready: bool) -> list[int]:
        done = self._words.ram_done
        return [
            slot
            for slot in range(self._plan.ram_slots)
            if slot not in self._busy_ram and bool(done[slot] or slot in self._unsealed) == ready
        ]

    def _some(self, slots: list[int]) -> list[int]:
        """A few of some slots, often neighbours."""
        count = min(len(slots), self._chance.randint(1, 4))
        if self._chance.random() < 0.5:
            return self._chance.sample(slots, count)
        first = self._chance.randint(0, len(slots) - count)
        return slots[first : first + count]

    def _store(self) -> None:
        """Offload chunks, as worker and manager do."""
        free = self._ram_slots(ready=False)
        if not free:
            return
        slots = self._some(free)
        chunks = [
            self._chance.randint(1, NUMBERS) + WEIGHTS_STEP * self._words.weights for _ in slots
        ]
        self._mark_writing(slots, chunks)
        for slot, chunk in zip(slots, chunks, strict=True):
            with self._seams.at(Place.WRITING_ROW):
                self._arena.row(Slot(slot))[:] = payload_of(chunk, self._plan.payload_bytes)
        self._mark_ready(slots)

    def _mark_writing(self, slots: Sequence[int], chunks: Sequence[int]) -> None:
        done = self._words.begin(self._words.ram_begun, slots, chunks)
        self._written.update(zip(slots, done, strict=True))
        keys = [key_of(chunk) for chunk in chunks]
        self._arena.mark_writing([Slot(slot) for slot in slots], keys, [None, *keys[:-1]])

    def _mark_ready(self, slots: Sequence[int]) -> None:
        self._arena.mark_ready([Slot(slot) for slot in slots], self._tick)
        self._tick += len(slots)
        self._seals.request(np.asarray(slots, dtype=np.int64))
        for slot in slots:
            self._unsealed[slot] = word = self._written.pop(slot)
            self._words.ram_done[slot] = perhaps(word)

    def _take_seals(self) -> None:
        """A chunk that is sealed is acknowledged: whoever comes next finds it."""
        headers = self._arena.headers
        for slot, done in list(self._unsealed.items()):
            if headers["sealed"][slot] == headers["generation"][slot]:
                self._words.ram_done[slot] = done
                del self._unsealed[slot]

    def _free(self) -> None:
        ready = self._ram_slots(ready=True)
        if ready:
            self._forget(self._some(ready))

    def _forget(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._words.ram_begun[slot] = 0
            self._unsealed.pop(slot, None)
        self._arena.mark_free([Slot(slot) for slot in slots])
        self._words.ram_done[list(slots)] = 0

    def _touch(self) -> None:
        ready = self._ram_slots(ready=True)
        if ready:
            self._arena.mark_used([Slot(slot) for slot in self._some(ready)], self._tick)
            self._tick += 4

    # ── disk ─────────────────────────────────────────────────────────────────────────────────

    def _write_behind(self) -> None:
        ready = self._ram_slots(ready=True)
        room = [slot for slot in range(self._plan.disk_slots) if slot not in self._busy_disk]
        if not ready or not room:
            return
        ram, disk = self._some(ready), self._some(room)
        count = min(len(ram), len(disk))
        ram, disk = ram[:count], disk[:count]
        held = [self._unsealed.get(slot) or self._words.ram_done[slot] for slot in ram]
        chunks = [chunk_of(word) for word in held]
        done = self._words.begin(self._words.disk_begun, disk, chunks)
        self._submit(_Order(self._copy(chunks, ram, disk, up=False), chunks, done))

    def _promote(self) -> None:
        held = [
            slot
            for slot in range(self._plan.disk_slots)
            if slot not in self._busy_disk and self._words.disk_done[slot]
        ]
        free = self._ram_slots(ready=False)
        if not held or not free:
            return
        disk, ram = self._some(held), self._some(free)
        count = min(len(ram), len(disk))
        ram, disk = ram[:count], disk[:count]
        chunks = [chunk_of(self._words.disk_done[slot]) for slot in disk]
        self._mark_writing(ram, chunks)
        self._submit(_Order(self._copy(chunks, ram, disk, up=True), chunks, []))

    def _copy(self, chunks: list[int], ram: list[int], disk: list[int], *, up: bool) -> Copy:
        keys = tuple(key_of(chunk) for chunk in chunks)
        ram_slots, disk_slots = tuple(map(Slot, ram)), tuple(map(Slot, disk))
        self._transfer += 1
        self._busy_ram.update(ram)
        self._busy_disk.update(disk)
        return Copy(
            TransferId(self._transfer),
            DISK if up else RAM,
            RAM if up else DISK,
            keys,
            (None, *keys[:-1]),
            disk_slots if up else ram_slots,
            ram_slots if up else disk_slots,
        )

    def _submit(self, order: _Order) -> None:
        self._orders.append(order)
        self._io.submit(order.copy, lambda _, first, got, __: self._ended(order, first, got))

    def _ended(self, order: _Order, first: int, outcomes: Sequence[Outcome]) -> None:
        """On an I/O thread: a chunk that is OK on disk is acknowledged with this call."""
        if order.copy.target == DISK:
            for at, outcome in enumerate(outcomes, first):
                if outcome is Outcome.OK:
                    self._words.disk_done[order.copy.target_slots[at]] = order.done[at]
        self._reports.put((order, first, outcomes))

    def _take_reports(self, *, wait: bool) -> None:
        while self._orders:
            try:
                order, first, outcomes = self._reports.get(block=wait, timeout=LONGEST_LIFE_S)
            except queue.Empty:
                return
            wait = False
            for at, outcome in enumerate(outcomes, first):
                self._took(order, at, outcome)
            order.left -= len(outcomes)
            if not order.left:
                self._orders.remove(order)

    def _took(self, order: _Order, at: int, outcome: Outcome) -> None:
        copy, chunk = order.copy, order.chunks[at]
        up = copy.target == RAM
        if outcome is not Outcome.OK and self._plan.defect is None:
            raise ViolationError(f"chunk {chunk}, {'read' if up else 'written'}: {outcome}")
        self._busy_ram.discard(copy.target_slots[at] if up else copy.source_slots[at])
        self._busy_disk.discard(copy.source_slots[at] if up else copy.target_slots[at])
        if up and outcome is Outcome.OK:
            slot = copy.target_slots[at]
            if self._plan.defect is None and bytes(self._arena.row(slot)) != payload_of(
                chunk, self._plan.payload_bytes
            ):
                raise ViolationError(f"chunk {chunk} was promoted with wrong bytes")
            self._mark_ready([slot])

    # ── both ─────────────────────────────────────────────────────────────────────────────────

    def _reset(self) -> None:
        """Forget everything, as after new weights: from now on a key names other bytes."""
        while self._orders:
            self._take_reports(wait=True)
        words = self._words
        words.ram_begun[:] = 0
        words.disk_begun[:] = 0
        self._unsealed.clear()
        self._arena.mark_free([Slot(slot) for slot in range(self._plan.ram_slots)])
        self._seals.invalidate()
        self._io.storage.reset()
        words.weights += 1
        words.ram_done[:] = 0
        words.disk_done[:] = 0
        self._resets_soon = self._plan.resets_soon


def _be_victim(plan: Plan) -> None:
    """Run as a victim; never returns."""
    code = BROKEN
    try:
        words = Words(os.open(f"/proc/{plan.owner_pid}/fd/{plan.words_fd}", os.O_RDWR))
        seams = Seams(words, None if plan.death is None else Death(*plan.death))
        if plan.defect is not None:
            PLANTED[plan.defect]()
        seams.watch_files()
        Victim(plan, words, seams).work()
        code = NOT_KILLED
    except ViolationError:
        traceback.print_exc()
        code = VIOLATION
    except BaseException:  # noqa: BLE001  whatever it is, the parent must hear of it
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    """Fork victims and tell how they ended, until the end of the input."""
    for line in sys.stdin:
        command: dict[str, Any] = json.loads(line)
        plan = Plan(**command)
        pid = os.fork()
        if not pid:
            _be_victim(plan)
        _say({"pid": pid})
        _, status = os.waitpid(pid, 0)
        _say({"exit": os.waitstatus_to_exitcode(status)})


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
