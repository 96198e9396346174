"""The worker's store and load between device tensors and the arena, against a plain memcpy.

Device: one tensor per layer of SmolLM2-135M (30), pages of 32 tokens, float32 and bfloat16; chunks
of 1, 2 and 4 blocks; blocks consecutive within a chunk, chunks scattered over device and arena.
Floor: one memcpy of as many bytes, in the same direction, between memory of the same kinds (the
device's private memory and a shared, pre-faulted memfd). Sides take turns.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import statistics
from dataclasses import dataclass

import report
import torch
from support.timing import interleave, rounded, seconds
from vllm.v1.kv_offload.base import CanonicalKVCaches, CanonicalKVCacheTensor, GPULoadStoreSpec

from emberkv.engines.vllm.slots import ArenaSlots
from emberkv.engines.vllm.worker import ArenaCopyWorker
from emberkv.live.arena import Arena, ArenaGeometry, create_memory

LAYERS = 30
PAGE_BYTES = {"fp32": 48 << 10, "bf16": 24 << 10}
BLOCKS_PER_CHUNK = (1, 2, 4)
GOAL_RATIO = 0.85


@dataclass(frozen=True)
class Shape:
    """What one comparison moves: `moved_blocks` of `blocks` that device and arena can hold."""

    page_bytes: int
    blocks_per_chunk: int
    moved_blocks: int
    blocks: int

    @property
    def moved_bytes(self) -> int:
        return self.moved_blocks * LAYERS * self.page_bytes


class Bench:
    """Device tensors, an arena as large, and the worker between them."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._chance = random.Random(shape.blocks_per_chunk)
        self._device = torch.ones(LAYERS * shape.blocks * shape.page_bytes, dtype=torch.int8)
        layers = self._device.view(LAYERS, shape.blocks, shape.page_bytes)
        caches = CanonicalKVCaches(
            [CanonicalKVCacheTensor(layer, shape.page_bytes) for layer in layers], []
        )
        chunk_bytes = LAYERS * shape.page_bytes * shape.blocks_per_chunk
        geometry = ArenaGeometry(shape.blocks // shape.blocks_per_chunk, chunk_bytes)
        memory = create_memory(geometry)
        self._arena = Arena(memory, geometry)
        os.close(memory)
        self._arena.bytes[:: 4 << 10] = 1  # have every page there
        self._worker = ArenaCopyWorker(caches, self._arena, shape.blocks_per_chunk, 0)

    def _places(self) -> tuple[GPULoadStoreSpec, ArenaSlots]:
        per_chunk = self._shape.blocks_per_chunk
        chunks = self._shape.blocks // per_chunk
        moved = self._shape.moved_blocks // per_chunk
        starts = self._chance.sample(range(chunks), moved)
        blocks = [start * per_chunk + at for start in starts for at in range(per_chunk)]
        slots = ArenaSlots(self._chance.sample(range(chunks), moved))
        return GPULoadStoreSpec(blocks, [len(blocks)], [0]), slots

    def store(self) -> float:
        device, slots = self._places()
        return self._rate(lambda: self._worker.submit_store(1, device, slots))

    def load(self) -> float:
        device, slots = self._places()
        return self._rate(lambda: self._worker.submit_load(1, slots, device))

    def memcpy_to_arena(self) -> float:
        device_at, arena_at = self._stretch()
        return self._rate(lambda: ctypes.memmove(arena_at, device_at, self._shape.moved_bytes))

    def memcpy_to_device(self) -> float:
        device_at, arena_at = self._stretch()
        return self._rate(lambda: ctypes.memmove(device_at, arena_at, self._shape.moved_bytes))

    def _stretch(self) -> tuple[int, int]:
        spare_pages = (self._device.numel() - self._shape.moved_bytes) >> 12
        return (
            self._device.data_ptr() + (self._chance.randrange(spare_pages + 1) << 12),
            self._arena.rows_address + (self._chance.randrange(spare_pages + 1) << 12),
        )

    def _rate(self, copy: object) -> float:
        return self._shape.moved_bytes / seconds(copy) / 1e9

    def close(self) -> None:
        self._worker.shutdown()
        del self._worker
        self._arena.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=128, help="of fp32 pages, moved per sample")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, help="of torch, as the worker would have")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    samples: dict[str, list[float]] = {}
    worst = {"store": 10.0, "load": 10.0}
    for dtype, page_bytes in PAGE_BYTES.items():
        for per_chunk in BLOCKS_PER_CHUNK:
            moved = arguments.blocks * PAGE_BYTES["fp32"] // page_bytes  # as many bytes each time
            shape = Shape(page_bytes, per_chunk, moved, 4 * moved)
            bench = Bench(shape)
            rates = interleave(
                {
                    "store": bench.store,
                    "store floor": bench.memcpy_to_arena,
                    "load": bench.load,
                    "load floor": bench.memcpy_to_device,
                },
                arguments.rounds,
            )
            bench.close()
            for way in tuple(worst):
                ours, floor = (
                    statistics.median(rates[way]),
                    statistics.median(rates[f"{way} floor"]),
                )
                worst[way] = min(worst[way], ours / floor)
                print(
                    f"  {way} {dtype}, {per_chunk} blocks a chunk: {ours:.2f} GB/s, "
                    f"memcpy {floor:.2f} GB/s, ratio {ours / floor:.2f}"
                )
            label = f"{dtype} x{per_chunk}"
            samples |= rounded({f"{label} {side} GB/s": r for side, r in rates.items()}, 3)
    for way, ratio in worst.items():
        report.write(
            f"arena-{way}",
            ratio,
            "x of memcpy, the worst of six page and chunk sizes",
            f">= {GOAL_RATIO}",
            met=ratio >= GOAL_RATIO,
            samples={name: each for name, each in samples.items() if way in name},
        )


if __name__ == "__main__":
    main()
