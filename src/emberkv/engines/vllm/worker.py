"""The CPU worker: copies pages between vLLM's KV tensors and arena rows, in the calling thread.

    device tensor t, block b ──► row of the chunk: [t0: block 0 … n-1][t1: block 0 … n-1]…

vLLM's forward pass on CPU is synchronous and has no streams, so a copy made in `submit_*` sees
finished compute and is finished when it returns.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from emberkv.engines.vllm.slots import ArenaSlots
from emberkv.live.arena import Arena


class RowLayout:
    """Where each page of a chunk lies: in the device tensors, and in this rank's part of a row."""

    def __init__(self, kv_caches: CanonicalKVCaches, blocks_per_chunk: int) -> None:
        self.blocks_per_chunk = blocks_per_chunk
        self.tensors: list[tuple[int, int, int]] = []  # address, stride between blocks, page
        self.offsets: list[int] = []
        offset = 0
        for each in kv_caches.tensors:
            page_bytes = each.page_size_bytes
            self.tensors.append((each.tensor.data_ptr(), each.tensor.stride(0), page_bytes))
            self.offsets.append(offset)
            offset += page_bytes * blocks_per_chunk
        self.rank_bytes = offset


class ArenaCopyWorker(OffloadingWorker):
    """Copies with memmove, one page run at a time; consecutive blocks are one run.

    Cost: one call of memmove per tensor and run, no temporary, no allocation.
    """

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        arena: Arena,
        blocks_per_chunk: int,
        rank: int,
        *,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        """Copy for `rank` of the arena's chunks; `close` lets go of the arena at `shutdown`."""
        self._close = close
        self._kv_caches = kv_caches  # keeps the tensors alive, whose addresses the layout holds
        self._layout = RowLayout(kv_caches, blocks_per_chunk)
        self._arena = arena
        self._rows_at = arena.rows_address + rank * self._layout.rank_bytes
        self._row_bytes = arena.geometry.row_bytes
        self._done: list[TransferResult] = []

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec, **_: Any
    ) -> bool:
        """Device → rows of whole chunks; done on return."""
        began = time.perf_counter()
        moved = self._copy(src_spec, dst_spec, to_row=True)
        self._done.append(TransferResult(job_id, True, moved, time.perf_counter() - began))
        return True

    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, **_: Any
    ) -> bool:
        """Rows → device; the first and last chunk may be used in part; done on return."""
        began = time.perf_counter()
        moved = self._copy(dst_spec, src_spec, to_row=False)
        self._done.append(TransferResult(job_id, True, moved, time.perf_counter() - began))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is ever under way between calls."""

    def shutdown(self) -> None:
        self._close()

    def _copy(self, device: GPULoadStoreSpec, rows: LoadStoreSpec, *, to_row: bool) -> int:
        assert isinstance(rows, ArenaSlots)
        memmove = ctypes.memmove
        moved = 0
        tensors = list(zip(self._layout.tensors, self._layout.offsets, strict=True))
        for slot, first_in_chunk, block, count in self._runs(device, rows):
            row_at = self._rows_at + slot * self._row_bytes
            for (address, stride, page), offset in tensors:
                in_row = row_at + offset + first_in_chunk * page
                on_device = address + block * stride
                size = count * page
                if to_row:
                    memmove(in_row, on_device, size)
                else:
                    memmove(on_device, in_row, size)
                moved += size
        return moved

    def _runs(
        self, device: GPULoadStoreSpec, rows: ArenaSlots
    ) -> Iterator[tuple[int, int, int, int]]:
        """(slot, first block's place in the chunk, device block, count) of runs that are one copy.

        A run ends at a chunk's end, and where device blocks are not consecutive or not dense.
        """
        per_chunk = self._layout.blocks_per_chunk
        dense = all(stride == page for _, stride, page in self._layout.tensors)
        first = int(device.block_indices[0])
        blocks: Sequence[int] = device.block_ids.tolist()
        slots: Sequence[int] = rows.block_ids.tolist()
        at = 0
        while at < len(blocks):
            logical = first + at
            chunk, place = divmod(logical, per_chunk)
            count = 1
            while (
                dense
                and place + count < per_chunk
                and at + count < len(blocks)
                and blocks[at + count] == blocks[at] + count
            ):
                count += 1
            yield slots[chunk - first // per_chunk], place, blocks[at], count
            at += count
