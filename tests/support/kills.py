"""Kills victims, and judges what they leave behind: nothing wrong served, nothing lost.

Kills come in histories of a few on one slab and one arena, so that a crash also meets what an
earlier crash has left. A history follows from the run's seed and its own number alone; only the
moment of a kill from outside, and the interleaving of threads, are the machine's.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from kill_victim import NUMBERS, Plan, key_of
from kill_words import HEADER_UPDATES, SLAB_WRITES, WEIGHTS_STEP, Place, Words, chunk_of

from emberkv.domain.types import Entry, Outcome, Slot
from emberkv.live.arena import Arena, ArenaGeometry, create_memory
from emberkv.live.keeper.seals import Seals
from emberkv.testing.storage import payload_of
from emberkv.tiers.base import Record
from emberkv.tiers.slab import Slab

HERE = Path(__file__).parent
HISTORY_KILLS = 5
RAM_SLOTS = 12
DISK_SLOTS = (16, 16, 9, 24)
PAYLOADS_BYTES = (4096, 100, 16384, 5000, 65536)
OUTSIDE = "outside"
TURNS = tuple(
    means
    for fourth in ("slab write", "opening", "slab write", "slab header")
    for means in (OUTSIDE, "slab write", OUTSIDE, "arena header", fourth)
)
"""How each of twenty kills is made: at a random time from outside, or in the middle of a write."""

LONGEST_DELAY_S = 0.03
ANSWER_S = 20.0
PATIENCE_S = 5.0


class HarmError(AssertionError):
    """Something wrong was served, or something acknowledged was lost."""


@dataclass
class Tally:
    """What a run has seen. `places` counts each kill once, by where it fell."""

    seed: int
    places: Counter[str] = field(default_factory=Counter)
    means: Counter[str] = field(default_factory=Counter)
    acknowledged: int = 0
    under_way: int = 0
    served: int = 0

    @property
    def kills(self) -> int:
        return sum(self.places.values())

    @property
    def in_slab_write(self) -> int:
        return sum(self.places[place.name] for place in SLAB_WRITES)

    @property
    def in_header_update(self) -> int:
        return sum(self.places[place.name] for place in HEADER_UPDATES)

    def as_json(self) -> dict[str, Any]:
        """Everything, for a table."""
        return {
            "seed": self.seed,
            "kills": self.kills,
            "inside a slab write": self.in_slab_write,
            "inside a header update": self.in_header_update,
            "by place": {place.name.lower(): self.places[place.name] for place in Place},
            "by means": dict(self.means),
            "acknowledged slots checked": self.acknowledged,
            "slots under way": self.under_way,
            "payloads served and compared": self.served,
        }


class Killer:
    """The template process, the shared memory, and the histories played with them."""

    def __init__(self, scratch: Path, seed: int, *, defect: str | None = None) -> None:
        self.tally = Tally(seed)
        self._scratch = scratch
        self._defect = defect
        self._words_fd, self._words = Words.create()
        self._arenas: dict[int, tuple[int, Arena, Seals]] = {}
        self._template = subprocess.Popen(
            [sys.executable, HERE / "kill_victim.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ
            | {"PYTHONPATH": str(HERE.parents[1] / "src"), "OMP_NUM_THREADS": "1"}
            | {"OPENBLAS_NUM_THREADS": "1"},
        )

    def close(self) -> None:
        """End the template and free the memory."""
        self._template.kill()
        self._template.wait()
        for stream in (self._template.stdin, self._template.stdout):
            assert stream is not None
            stream.close()
        for fd, _, seals in self._arenas.values():
            seals.stop()
            os.close(fd)
        os.close(self._words_fd)

    def play(self, history: int, kills: int = HISTORY_KILLS) -> None:
        """Play one history: so many kills on one slab and one arena."""
        chance = random.Random(f"{self.tally.seed}/{history}")
        payload_bytes = PAYLOADS_BYTES[history % len(PAYLOADS_BYTES)]
        root_dir = self._scratch / f"history-{history}"
        root_dir.mkdir()
        self._words.clear()
        arena_fd, arena, seals = self._arena(payload_bytes)
        arena.headers.view("u1")[:] = 0
        for number in range(history * HISTORY_KILLS, history * HISTORY_KILLS + kills):
            plan = self._plan(chance, root_dir, payload_bytes, arena_fd, number)
            try:
                place = self._kill(chance, plan, TURNS[number % len(TURNS)])
                self._judge_slab(plan)
                self._judge_arena(plan, arena, seals)
            except Exception as error:
                raise HarmError(
                    f"kill {number} of seed {self.tally.seed}: {type(error).__name__}: {error}\n"
                    f"its history again: EMBERKV_KILLS_SEED={self.tally.seed} "
                    f"EMBERKV_KILL={number} python -m pytest tests/faults/test_kills.py\n{plan}"
                ) from error
            self.tally.places[place.name] += 1
        shutil.rmtree(root_dir)

    def _arena(self, payload_bytes: int) -> tuple[int, Arena, Seals]:
        if payload_bytes not in self._arenas:
            geometry = ArenaGeometry(RAM_SLOTS, payload_bytes)
            fd = create_memory(geometry)
            arena = Arena(fd, geometry)
            self._arenas[payload_bytes] = fd, arena, Seals(arena)
        return self._arenas[payload_bytes]

    def _plan(
        self, chance: random.Random, root_dir: Path, payload_bytes: int, arena_fd: int, number: int
    ) -> Plan:
        group = TURNS[number % len(TURNS)]
        is_new = number % HISTORY_KILLS == 0
        longest = {"slab write": 40, "arena header": 300, "slab header": 2}
        death = None
        if group != OUTSIDE:
            nth = chance.randint(1, longest.get(group, 6 if is_new else 2))
            death = (group, nth, chance.choice((0.0, 1.0, chance.random(), chance.random())))
        return Plan(
            seed=f"{self.tally.seed}/{number}",
            root_dir=str(root_dir),
            ram_slots=RAM_SLOTS,
            disk_slots=chance.choice(DISK_SLOTS),
            payload_bytes=payload_bytes,
            words_fd=self._words_fd,
            arena_fd=arena_fd,
            owner_pid=os.getpid(),
            resets_soon=group == "slab header",
            death=death,
            defect=self._defect,
        )

    # ── the kill ─────────────────────────────────────────────────────────────────────────────

    def _kill(self, chance: random.Random, plan: Plan, means: str) -> Place:
        """Start a victim and see it die; where it was then."""
        words = self._words
        words.forget_places()
        assert self._template.stdin is not None
        self._template.stdin.write(json.dumps(asdict(plan)) + "\n")
        self._template.stdin.flush()
        pid = int(self._answer(ANSWER_S)["pid"])
        victim = os.pidfd_open(pid)
        try:
            if plan.death is None:
                time.sleep(chance.uniform(0.0, LONGEST_DELAY_S))
                means = self._kill_from_outside(victim, OUTSIDE)
            elif not wait([victim], PATIENCE_S):
                means = self._kill_from_outside(victim, "outside, late")
        finally:
            os.close(victim)
        status = self._answer(ANSWER_S)["exit"]
        assert status == -signal.SIGKILL, f"the victim ended by itself, with status {status}"
        self.tally.means[means] += 1
        return words.place()

    @staticmethod
    def _kill_from_outside(victim: int, means: str) -> str:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(victim, signal.SIGKILL)
        return means

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        assert self._template.stdout is not None
        ready = wait([self._template.stdout], timeout_s)
        assert ready, "the template does not answer"
        found: dict[str, Any] = json.loads(self._template.stdout.readline())
        return found

    # ── the judgement ────────────────────────────────────────────────────────────────────────

    def _judge_slab(self, plan: Plan) -> None:
        """Open the slab as a restarted engine does, and try to be given something wrong."""
        words = self._words
        slab = plan.open_slab()
        try:
            entries = list(slab.entries())
            self._judge_entries(plan, slab, entries)
            for slot in range(plan.disk_slots):
                found = self._judge_slot(plan, slab, slot, entries)
                words.disk_begun[slot] = words.disk_done[slot] = found
            for array in (words.disk_begun, words.disk_done):
                array[plan.disk_slots :] = 0  # a smaller slab has lost them
        finally:
            slab.close()

    def _judge_entries(self, plan: Plan, slab: Slab, entries: list[Entry]) -> None:
        """Every chunk that is offered was written there, and reads back right or not at all."""
        rooms = [bytearray(plan.payload_bytes) for _ in entries]
        records = [Record(entry.key, None, entry.slot) for entry in entries]
        outcomes = slab.read(records, [memoryview(room) for room in rooms])
        for entry, outcome, room in zip(entries, outcomes, rooms, strict=True):
            right = self._chunks(self._words.disk_begun, self._words.disk_done, entry.slot)
            keys = {key_of(chunk) for chunk in right}
            assert entry.key in keys, f"slot {entry.slot} offers what was never written there"
            if outcome is Outcome.OK:
                self._require_right(f"slot {entry.slot}", right, entry.key, bytes(room))

    def _judge_slot(self, plan: Plan, slab: Slab, slot: int, entries: list[Entry]) -> int:
        """Ask a slot for what it may hold, and for something else; the chunk that it holds."""
        begun, done = int(self._words.disk_begun[slot]), int(self._words.disk_done[slot])
        right = self._chunks(self._words.disk_begun, self._words.disk_done, slot)
        asked = {key_of(chunk) for chunk in right} | {key_of(1 + (slot + begun) % NUMBERS)}
        holds = 0
        for key in asked:
            room = bytearray(plan.payload_bytes)
            outcome = slab.read([Record(key, None, Slot(slot))], [memoryview(room)])[0]
            if outcome is Outcome.OK:
                holds = self._require_right(f"slot {slot}", right, key, bytes(room))
        if begun == done != 0:
            self.tally.acknowledged += 1
            assert holds, f"slot {slot} has lost chunk {chunk_of(done)}, which was acknowledged"
            assert key_of(holds) in {entry.key for entry in entries}
        elif begun != done:
            self.tally.under_way += 1
        return holds

    def _judge_arena(self, plan: Plan, arena: Arena, seals: Seals) -> None:
        """Take the arena over as the keeper does for a restarted engine."""
        words = self._words
        found: list[Entry] = []
        ended = threading.Event()

        def take(entries: list[Entry], last: bool) -> None:
            found.extend(entries)
            if last:
                ended.set()

        seals.verify(take)
        assert ended.wait(ANSWER_S), "the takeover does not end"
        holds = {}
        for entry in found:
            right = self._chunks(words.ram_begun, words.ram_done, entry.slot)
            row = bytes(arena.row(entry.slot))
            holds[int(entry.slot)] = self._require_right(f"row {entry.slot}", right, entry.key, row)
        for slot in range(plan.ram_slots):
            begun, done = int(words.ram_begun[slot]), int(words.ram_done[slot])
            if begun == done != 0:
                self.tally.acknowledged += 1
                assert slot in holds, f"row {slot} has lost chunk {chunk_of(done)}, sealed"
            elif begun != done:
                self.tally.under_way += 1
            words.ram_begun[slot] = words.ram_done[slot] = holds.get(slot, 0)

    @staticmethod
    def _chunks(begun: Any, done: Any, slot: int) -> set[int]:
        return {chunk_of(begun[slot]), chunk_of(done[slot])} - {0}

    def _require_right(self, where: str, right: set[int], key: bytes, got: bytes) -> int:
        """The chunk of a key whose bytes these are. Raises if they are nobody's, or another's."""
        for chunk in right:
            if key_of(chunk) == key and got == payload_of(chunk, len(got)):
                self.tally.served += 1
                return chunk
        number = int.from_bytes(key[:4], "big")
        is_old = any(
            got == payload_of(number + WEIGHTS_STEP * weights, len(got))
            for weights in range(self._words.weights + 1)
        )
        raise AssertionError(
            f"{where} serves {'stale' if is_old else 'wrong'} bytes for chunk {number}; "
            f"right would be {sorted(right)}"
        )


@contextmanager
def killer(scratch: Path, seed: int, *, defect: str | None = None) -> Iterator[Killer]:
    """A killer whose processes are gone afterwards."""
    made = Killer(scratch, seed, defect=defect)
    try:
        yield made
    finally:
        made.close()


def run_kills(scratch: Path, count: int, seed: int) -> Tally:
    """Make `count` kills. Raises `HarmError` at the first that did harm."""
    with killer(scratch, seed) as made:
        for history in range(-(-count // HISTORY_KILLS)):
            made.play(history, min(HISTORY_KILLS, count - history * HISTORY_KILLS))
        return made.tally
