"""The CPU worker moves every page to its place and touches nothing else."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, CanonicalKVCacheTensor, GPULoadStoreSpec

from emberkv.domain.types import Slot
from emberkv.engines.vllm.slots import ArenaSlots
from emberkv.engines.vllm.worker import SHARED_COPY_BYTES, ArenaCopyWorker
from emberkv.live.arena import Arena, ArenaGeometry, create_memory

pytestmark = pytest.mark.engine

BLOCKS = 24


def in_one_storage(pages: Sequence[int]) -> list[torch.Tensor]:
    """As vLLM allocates: layers at equal distances in one piece of memory."""
    storage = torch.randint(-128, 127, (len(pages) * BLOCKS * pages[0],), dtype=torch.int8)
    return list(storage.view(len(pages), BLOCKS, pages[0]))


def apart(pages: Sequence[int]) -> list[torch.Tensor]:
    """Tensors of several sizes, each in memory of its own."""
    return [torch.randint(-128, 127, (BLOCKS, page), dtype=torch.int8) for page in pages]


def with_gaps(pages: Sequence[int]) -> list[torch.Tensor]:
    """Blocks that do not follow each other without a gap, the last layers first."""
    storage = torch.randint(-128, 127, (len(pages), BLOCKS, 3 * pages[0]), dtype=torch.int8)
    return [layer[:, : pages[0]] for layer in reversed(storage.unbind())]


LAYOUTS = {
    "one storage": (in_one_storage, (512, 512, 512, 512)),
    "one layer": (in_one_storage, (640,)),
    "several sizes": (apart, (512, 512, 256, 1024, 1024)),
    "gaps": (with_gaps, (384, 384, 384)),
}


@dataclass
class Bench:
    """Device tensors, an arena, and the worker of one rank of two."""

    tensors: list[torch.Tensor]
    blocks_per_chunk: int
    arena: Arena
    worker: ArenaCopyWorker
    rank: int

    def expected_row(self, blocks: Sequence[int]) -> bytes:
        """A rank's part of the row of a chunk of these blocks."""
        return b"".join(
            tensor[block].numpy().tobytes() for tensor in self.tensors for block in blocks
        )

    def row(self, slot: int) -> bytes:
        """The rank's part of a row."""
        part = self.arena.geometry.chunk_bytes // 2
        with self.arena.row(Slot(slot)) as row:
            return bytes(row[self.rank * part : (self.rank + 1) * part])

    def fill_arena(self) -> None:
        chance = np.random.default_rng(1)
        self.arena.bytes[:] = chance.integers(0, 255, self.arena.bytes.size, dtype=np.uint8)

    def everything(self) -> tuple[bytes, list[torch.Tensor]]:
        return self.arena.bytes.tobytes(), [tensor.clone() for tensor in self.tensors]


@pytest.fixture(params=[(name, n) for name in LAYOUTS for n in (1, 3)], ids=str)
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    name, blocks_per_chunk = request.param
    make, pages = LAYOUTS[name]
    made = make_bench(make(pages), pages, blocks_per_chunk)
    yield made
    made.worker.shutdown()


def make_bench(
    tensors: list[torch.Tensor], pages: Sequence[int], blocks_per_chunk: int, slots: int = 8
) -> Bench:
    caches = CanonicalKVCaches(
        [CanonicalKVCacheTensor(t, page) for t, page in zip(tensors, pages, strict=True)], []
    )
    geometry = ArenaGeometry(slots, 2 * blocks_per_chunk * sum(pages))
    memory = create_memory(geometry)
    arena = Arena(memory, geometry)
    os.close(memory)
    worker = ArenaCopyWorker(caches, arena, blocks_per_chunk, rank=1, close=arena.close)
    return Bench(tensors, blocks_per_chunk, arena, worker, rank=1)


def device_of(blocks: Sequence[int], first: int = 0) -> GPULoadStoreSpec:
    return GPULoadStoreSpec(list(blocks), [len(blocks)], [first])


def test_a_store_writes_whole_rows_and_nothing_else(bench: Bench) -> None:
    bench.fill_arena()
    before, device_before = bench.everything()
    n = bench.blocks_per_chunk
    blocks = [*range(5, 5 + n), *range(20, 20 - n, -1)]  # in order, and backwards
    assert bench.worker.submit_store(7, device_of(blocks), ArenaSlots([6, 2]))

    assert bench.row(6) == bench.expected_row(blocks[:n])
    assert bench.row(2) == bench.expected_row(blocks[n:])
    done = bench.worker.get_finished()
    assert [(each.job_id, each.success) for each in done] == [(7, True)]
    assert done[0].transfer_size == bench.arena.geometry.chunk_bytes
    after, device_after = bench.everything()
    part = bench.arena.geometry.chunk_bytes // 2
    changed = np.frombuffer(before, np.uint8) != np.frombuffer(after, np.uint8)
    for slot in (2, 6):
        start = bench.arena.geometry.header_bytes + slot * bench.arena.geometry.row_bytes + part
        changed[start : start + part] = False
    assert not changed.any()
    assert all(torch.equal(a, b) for a, b in zip(device_before, device_after, strict=True))


def test_a_load_may_begin_and_end_inside_a_chunk(bench: Bench) -> None:
    bench.fill_arena()
    arena_before, device_before = bench.everything()
    n = bench.blocks_per_chunk
    first = n - 1  # the last block of chunk 0, all of chunk 1, the first of chunk 2
    blocks = [11, *range(2, 2 + n), 17]
    assert bench.worker.submit_load(8, ArenaSlots([3, 0, 5]), device_of(blocks, first))

    arena_after, device_after = bench.everything()
    assert arena_after == arena_before
    got = {block: bench.expected_row([block]) for block in blocks}
    for at, block in enumerate(blocks):
        chunk, place = divmod(first + at, n)
        assert got[block] == block_in_row(bench, bench.row([3, 0, 5][chunk]), place)
    others = [block for block in range(BLOCKS) if block not in blocks]
    for mine, old in zip(device_after, device_before, strict=True):
        assert torch.equal(mine[others], old[others])


def block_in_row(bench: Bench, row: bytes, place: int) -> bytes:
    """One block's pages in a rank's part of a row."""
    found, offset = b"", 0
    for tensor in bench.tensors:
        page = tensor.shape[1]
        found += row[offset + place * page : offset + (place + 1) * page]
        offset += page * bench.blocks_per_chunk
    return found


def test_a_large_copy_shared_among_threads_is_whole() -> None:
    pages = (256 << 10,) * 4
    bench = make_bench(in_one_storage(pages), pages, 1, slots=BLOCKS)
    chance = np.random.default_rng(2)
    blocks, slots = chance.permutation(BLOCKS).tolist(), chance.permutation(BLOCKS).tolist()
    assert len(blocks) * sum(pages) >= SHARED_COPY_BYTES
    bench.worker.submit_store(1, device_of(blocks), ArenaSlots(slots))
    kept = [tensor.clone() for tensor in bench.tensors]
    assert [bench.row(slot) for slot in slots] == [bench.expected_row([block]) for block in blocks]
    for tensor in bench.tensors:
        tensor.zero_()
    bench.worker.submit_load(2, ArenaSlots(slots), device_of(blocks))
    assert all(torch.equal(a, b) for a, b in zip(kept, bench.tensors, strict=True))
    bench.worker.shutdown()
