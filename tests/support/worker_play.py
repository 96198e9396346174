"""Chunks on their way through the real worker, arena, tier I/O and slab, by seed.

Two ranks store and load; chunks go to disk and come back; slots are given to other chunks, bits
flip, everything is reset. Whatever a device gets is compared with what was stored for the key.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from random import Random

import numpy as np
import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, CanonicalKVCacheTensor, GPULoadStoreSpec

from emberkv.domain.types import DISK, RAM, ChunkKey, Copy, Outcome, Slot, TransferId
from emberkv.engines.vllm.slots import ArenaSlots
from emberkv.engines.vllm.worker import ArenaCopyWorker
from emberkv.live.arena import Arena, ArenaGeometry, create_memory
from emberkv.live.keeper.seals import Seals
from emberkv.live.keeper.tier_io import TierIo
from emberkv.tiers.format import DATA_FILE, SlabGeometry, StoredNamespace
from emberkv.tiers.slab_directory import SlabDirectory

RANKS = 2
LAYERS, PAGE_BYTES, BLOCKS, PER_CHUNK = 3, 256, 16, 3
RAM_SLOTS, DISK_SLOTS = 6, 5
CHUNK_BYTES = RANKS * LAYERS * PAGE_BYTES * PER_CHUNK
NAMESPACE = StoredNamespace(b"worker play", {"purpose": "test"})

Content = list[torch.Tensor]
"""What each rank has stored for a chunk: [layer, block, byte]."""


class QuietSeals(Seals):
    """Seals that nobody makes before they are needed."""

    def _start(self) -> None:
        """No thread."""


class WorkerPlay:
    """One seed's run. Raises an `AssertionError` that names seed and step."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.seed, self.number = seed, 0
        self.chance = Random(seed)
        torch.manual_seed(seed)
        geometry = ArenaGeometry(RAM_SLOTS, CHUNK_BYTES)
        fd = create_memory(geometry)
        self.arena = Arena(fd, geometry)
        os.close(fd)
        self.devices = [
            torch.randint(-128, 127, (LAYERS, BLOCKS, PAGE_BYTES), dtype=torch.int8)
            for _ in range(RANKS)
        ]
        self.workers = [
            ArenaCopyWorker(
                CanonicalKVCaches([CanonicalKVCacheTensor(t, PAGE_BYTES) for t in device], []),
                self.arena,
                PER_CHUNK,
                rank,
            )
            for rank, device in enumerate(self.devices)
        ]
        size_bytes = SlabGeometry(DISK_SLOTS, CHUNK_BYTES).total_bytes
        self.slab = SlabDirectory(directory, size_bytes).open_slab(NAMESPACE, CHUNK_BYTES)
        self.data = directory / NAMESPACE.directory_name / DATA_FILE
        self.io = TierIo(
            self.arena, QuietSeals(self.arena), self.slab, read_threads=0, write_threads=0
        )
        self.contents: dict[ChunkKey, Content] = {}
        self.ram: dict[Slot, ChunkKey] = {}
        self.disk: dict[Slot, ChunkKey] = {}  # what was last written there, before any reset too
        self.good: set[Slot] = set()  # of these, what must be found
        self.transfers = 0

    def play(self, steps: int) -> None:
        """Do anything at all, `steps` times."""
        acts = (self.store, self.load, self.write, self.read, self.read_another, self.flip)
        try:
            for self.number in range(1, steps + 1):
                rare = self.chance.random()
                if rare < 0.04:
                    self.reset_with_a_write_taken_up()
                elif rare < 0.08:
                    self.give_a_row_away_under_a_write()
                else:
                    self.chance.choice(acts)()
        finally:
            self.slab.close()

    def must(self, holds: bool, what: str) -> None:
        assert holds, f"seed {self.seed}, step {self.number}: {what}"

    # ── engine ↔ arena ───────────────────────────────────────────────────────────────────────

    def store(self) -> None:
        """A chunk is computed in any blocks of the device and stored."""
        slot = Slot(self.chance.randrange(RAM_SLOTS))
        self.store_at(slot)

    def store_at(self, slot: Slot) -> None:
        key = ChunkKey(b"chunk %d" % len(self.contents))
        blocks = self.chance.sample(range(BLOCKS), PER_CHUNK)
        self.arena.mark_writing([slot], [key], [None])
        for device, worker in zip(self.devices, self.workers, strict=True):
            device[:, blocks] = torch.randint(
                -128, 127, (LAYERS, PER_CHUNK, PAGE_BYTES), dtype=torch.int8
            )
            worker.submit_store(1, _device(blocks, 0), ArenaSlots([slot]))
        self.contents[key] = [device[:, blocks].clone() for device in self.devices]
        self.arena.mark_ready([slot], 0)
        self.ram[slot] = key

    def load(self) -> None:
        """Some chunks are loaded as one, beginning and ending anywhere in them."""
        if not self.ram:
            return
        slots = self.chance.sample(sorted(self.ram), self.chance.randint(1, len(self.ram)))[:3]
        first = self.chance.randrange(PER_CHUNK)
        end = len(slots) * PER_CHUNK - self.chance.randrange(PER_CHUNK)
        if end <= first:
            return
        blocks = self.chance.sample(range(BLOCKS), end - first)
        before = first + PER_CHUNK * self.chance.randrange(3)  # its place in the whole request
        for rank, worker in enumerate(self.workers):
            worker.submit_load(2, ArenaSlots(slots), _device(blocks, before))
            whole = torch.cat([self.contents[self.ram[slot]][rank] for slot in slots], dim=1)
            got = self.devices[rank][:, blocks]
            same = torch.equal(got, whole[:, first:end])
            self.must(same, f"rank {rank} loads other bytes than were stored from {slots}")
            worker.get_finished()

    # ── arena ↔ disk ─────────────────────────────────────────────────────────────────────────

    def order(self, key: ChunkKey, ram: Slot, disk: Slot, *, up: bool) -> None:
        self.transfers += 1
        source, target = (DISK, RAM) if up else (RAM, DISK)
        slots = ((disk,), (ram,)) if up else ((ram,), (disk,))
        copy = Copy(TransferId(self.transfers), source, target, (key,), (None,), *slots)
        self.io.submit(copy, lambda *_: None)

    def run_write(self) -> Outcome:
        (outcome,) = self.io._write(self.io._writes.get_nowait())
        return outcome

    def write(self) -> None:
        """A chunk is written behind."""
        if self.ram:
            ram = self.chance.choice(sorted(self.ram))
            disk = Slot(self.chance.randrange(DISK_SLOTS))
            self.order(self.ram[ram], ram, disk, up=False)
            self.must(self.run_write() is Outcome.OK, "a write fails")
            self.disk[disk] = self.ram[ram]
            self.good.add(disk)

    def read(self) -> None:
        """A chunk that was written is asked for; gone or damaged, it must be called so."""
        if self.disk:
            disk = self.chance.choice(sorted(self.disk))
            self.promote(self.disk[disk], disk, expected=disk in self.good)

    def read_another(self) -> None:
        """A chunk is asked for in a slot that holds another."""
        if self.contents and self.disk:
            disk = self.chance.choice(sorted(self.disk))
            key = self.chance.choice(sorted(self.contents))
            self.promote(key, disk, expected=disk in self.good and self.disk[disk] == key)

    def promote(self, key: ChunkKey, disk: Slot, *, expected: bool) -> None:
        ram = Slot(self.chance.randrange(RAM_SLOTS))
        self.ram.pop(ram, None)
        self.arena.mark_writing([ram], [key], [None])
        self.order(key, ram, disk, up=True)
        (outcome,) = self.io._read(self.io._reads.get_nowait())
        self.must((outcome is Outcome.OK) == expected, f"{key!r} in disk slot {disk}: {outcome}")
        if outcome is Outcome.OK:
            self.arena.mark_ready([ram], 0)
            self.ram[ram] = key

    def flip(self) -> None:
        """A bit of a stored payload changes."""
        if self.good:
            disk = self.chance.choice(sorted(self.good))
            stride = (self.data.stat().st_size) // DISK_SLOTS
            at = disk * stride + self.chance.randrange(CHUNK_BYTES)
            with self.data.open("r+b") as data:
                data.seek(at)
                (byte,) = data.read(1)
                data.seek(at)
                data.write(bytes([byte ^ 0x10]))
            self.good.discard(disk)

    # ── what must not mix ────────────────────────────────────────────────────────────────────

    def reset_with_a_write_taken_up(self) -> None:
        """Everything is reset while a thread has a write in its hands."""
        if not self.ram:
            return
        ram = self.chance.choice(sorted(self.ram))
        disk = Slot(self.chance.randrange(DISK_SLOTS))
        self.order(self.ram[ram], ram, disk, up=False)
        taken = self.io._writes.get_nowait()
        self.io.cancel(writes_too=True)
        self.slab.reset()
        self.io._write(taken)
        self.disk[disk] = self.ram[ram]
        self.good.clear()

    def give_a_row_away_under_a_write(self) -> None:
        """A row holds another chunk by the time that its write begins."""
        if not self.ram:
            return
        ram = self.chance.choice(sorted(self.ram))
        disk = Slot(self.chance.randrange(DISK_SLOTS))
        self.order(self.ram[ram], ram, disk, up=False)
        self.store_at(ram)
        self.must(self.run_write() is not Outcome.OK, "a row of another generation is written")


def _device(blocks: Sequence[int], first: int) -> GPULoadStoreSpec:
    return GPULoadStoreSpec(list(blocks), [len(blocks)], [first])


def numpy_rolled(rows: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
    """Rows whose layers are each other's neighbours'."""
    return np.roll(rows, 1, axis=1)
