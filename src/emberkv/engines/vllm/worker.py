"""The CPU worker: copies pages between vLLM's KV tensors and arena rows, before it returns.

    device tensor t, block b ──► row of the chunk: [t0: block 0 … n-1][t1: block 0 … n-1]…

vLLM's forward pass on CPU is synchronous and has no streams, so a copy made in `submit_*` sees
finished compute and is finished when it returns.

One thread copies scattered pages at little more than half the speed of a plain memcpy, so a large
copy is shared among a few. Each takes the next piece when it is done with the last: where the
cores are busy with something else, the calling thread does most of it and waits for nobody long.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from emberkv.engines.vllm.slots import ArenaSlots
from emberkv.live.arena import Arena

Bytes = npt.NDArray[np.uint8]

COPY_THREADS: Final = 4
SHARED_COPY_BYTES: Final = 8 << 20
"""Below this a copy is over before another thread has woken up."""


class Tensor(NamedTuple):
    """Where a device tensor's pages are."""

    address: int
    blocks: int
    stride_bytes: int
    page_bytes: int


class Band(NamedTuple):
    """Device tensors alike and at equal distances, as one array, and their places in every row."""

    pages: Bytes
    """[tensor, block, byte]"""

    rows: Bytes
    """[slot, tensor, place of the block in its chunk, byte]"""


class ArenaCopyWorker(OffloadingWorker):
    """Copies between device and arena with NumPy, a run of consecutive blocks at a time.

    Cost: one call per run and band (one band, as vLLM allocates), no temporary.
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
        self._kv_caches = kv_caches  # keeps the tensors alive, whose addresses the bands hold
        self._blocks_per_chunk = blocks_per_chunk
        self._block_bytes = sum(each.page_size_bytes for each in kv_caches.tensors)
        rank_at = arena.rows_address + rank * self._block_bytes * blocks_per_chunk
        self._bands = list(_bands(kv_caches, arena, blocks_per_chunk, rank_at))
        helpers = min(COPY_THREADS, len(os.sched_getaffinity(0))) - 1
        self._helpers = ThreadPoolExecutor(helpers, "emberkv-copy") if helpers else None
        self._helper_count = helpers
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

    def get_finished(self, **_: Any) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int], **_: Any) -> None:
        """Nothing is ever under way between calls."""

    def shutdown(self, **_: Any) -> None:
        if self._helpers is not None:
            self._helpers.shutdown()
        self._bands.clear()
        self._close()

    def _copy(self, device: GPULoadStoreSpec, rows: LoadStoreSpec, *, to_row: bool) -> int:
        """Copy every block of `device`; returns how many bytes that was."""
        assert isinstance(rows, ArenaSlots)
        pieces: list[tuple[Bytes, Bytes]] = []
        for slot, place, block, count in self._runs(device, rows):
            for band in self._bands:
                row = band.rows[slot, :, place : place + count]
                pages = band.pages[:, block : block + count]
                pieces.append((row, pages) if to_row else (pages, row))
        moved = len(device.block_ids) * self._block_bytes
        left = iter(pieces)  # every thread takes from this one
        helping = []
        if self._helpers is not None and moved >= SHARED_COPY_BYTES:
            helping = [self._helpers.submit(_copy_all, left) for _ in range(self._helper_count)]
        _copy_all(left)
        for each in helping:
            each.result()
        return moved

    def _runs(
        self, device: GPULoadStoreSpec, rows: ArenaSlots
    ) -> Iterator[tuple[int, int, int, int]]:
        """(slot, first block's place in the chunk, device block, count) of runs that are one copy.

        A run ends at a chunk's end, and where device blocks are not consecutive.
        """
        per_chunk = self._blocks_per_chunk
        first = int(device.block_indices[0])
        blocks: Sequence[int] = device.block_ids.tolist()
        slots: Sequence[int] = rows.block_ids.tolist()
        at = 0
        while at < len(blocks):
            chunk, place = divmod(first + at, per_chunk)
            longest = min(per_chunk - place, len(blocks) - at)
            count = 1
            while count < longest and blocks[at + count] == blocks[at] + count:
                count += 1
            yield slots[chunk - first // per_chunk], place, blocks[at], count
            at += count


def _copy_all(pieces: Iterator[tuple[Bytes, Bytes]]) -> None:
    for target, source in pieces:
        np.copyto(target, source)


def _bands(
    kv_caches: CanonicalKVCaches, arena: Arena, blocks_per_chunk: int, rank_at: int
) -> Iterator[Band]:
    """The device's tensors in bands; `rank_at` is where the rank's part of slot 0's row begins."""
    geometry = arena.geometry
    row_at = rank_at
    for band in _alike([_tensor_of(each) for each in kv_caches.tensors]):
        first = band[0]
        distance = band[1].address - first.address if len(band) > 1 else 0
        part_bytes = blocks_per_chunk * first.page_bytes
        yield Band(
            _array(
                first.address,
                (len(band), first.blocks, first.page_bytes),
                (distance, first.stride_bytes, 1),
            ),
            _array(
                row_at,
                (geometry.slot_count, len(band), blocks_per_chunk, first.page_bytes),
                (geometry.row_bytes, part_bytes, first.page_bytes, 1),
            ),
        )
        row_at += len(band) * part_bytes


def _tensor_of(each: CanonicalKVCacheTensor) -> Tensor:
    tensor = each.tensor
    return Tensor(tensor.data_ptr(), tensor.shape[0], tensor.stride(0), each.page_size_bytes)


def _alike(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Runs of tensors that differ in nothing but addresses at equal distances."""
    run: list[Tensor] = []
    for tensor in tensors:
        if run:
            distance = tensor.address - run[-1].address
            fits = tensor[1:] == run[0][1:]
            if not fits or (len(run) > 1 and distance != run[1].address - run[0].address):
                yield run
                run = []
        run.append(tensor)
    if run:
        yield run


def _array(address: int, shape: tuple[int, ...], strides_bytes: tuple[int, ...]) -> Bytes:
    """An array over memory that somebody else keeps alive."""
    first = np.frombuffer(memoryview((ctypes.c_uint8 * 1).from_address(address)), dtype=np.uint8)
    return np.lib.stride_tricks.as_strided(first, shape, strides_bytes)
