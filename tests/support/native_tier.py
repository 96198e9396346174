"""The engine's own tiering manager as a peer: all of it but the worker, which refuses the CPU.

The manager, its file tier and the shared region are vLLM's. The worker here copies pages with
NumPy, in the calling thread.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class PageCopyWorker(OffloadingWorker):
    """Copies pages between device tensors and rows: tensor by tensor, blocks inside."""

    def __init__(
        self, kv_caches: CanonicalKVCaches, region: SharedOffloadRegion, blocks_per_chunk: int
    ) -> None:
        self._region = region
        self._blocks_per_chunk = blocks_per_chunk
        self._done: list[TransferResult] = []
        self._pairs: list[tuple[npt.NDArray[np.int8], npt.NDArray[np.int8]]] = []
        for each in kv_caches.tensors:
            rows = region.create_next_worker_view(each.page_size_bytes * blocks_per_chunk).numpy()
            pages = rows.reshape(len(rows), blocks_per_chunk, each.page_size_bytes)
            self._pairs.append((each.tensor.numpy(), pages))

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: BlockIDsLoadStoreSpec
    ) -> bool:
        for device, rows in self._pairs:
            rows[self._places(src_spec, dst_spec)] = device[src_spec.block_ids]
        self._done.append(TransferResult(job_id, True))
        return True

    def submit_load(
        self, job_id: int, src_spec: BlockIDsLoadStoreSpec, dst_spec: GPULoadStoreSpec
    ) -> bool:
        for device, rows in self._pairs:
            device[dst_spec.block_ids] = rows[self._places(dst_spec, src_spec)]
        self._done.append(TransferResult(job_id, True))
        return True

    def _places(
        self, device: GPULoadStoreSpec, rows: BlockIDsLoadStoreSpec
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """For each device block: its chunk's row, and its place in the chunk."""
        first = int(device.block_indices[0])
        logical = first + np.arange(len(device.block_ids))
        chunk, place = np.divmod(logical, self._blocks_per_chunk)
        return rows.block_ids[chunk - first // self._blocks_per_chunk], place

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is ever under way between calls."""

    def shutdown(self) -> None:
        self._pairs.clear()
        self._region.cleanup()


class NativeTierOnCpu(TieringOffloadingSpec):
    """The native spec with a worker that runs on the CPU platform."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        region = SharedOffloadRegion(
            engine_id=self._engine_id,
            num_chunks=self.num_chunks,
            rank=0,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        return PageCopyWorker(kv_caches, region, self.blocks_per_chunk)


def wait_for_files(manager: Any, deadline_s: float) -> None:
    """Let the file tier end what it has begun, for as long as an engine's step may take."""
    pool = manager.secondary_tiers[0]._pool
    with pool._condition:
        pool._condition.wait_for(lambda: pool._inflight_jobs == 0, deadline_s)


def chunk_files(root_dir: Path) -> list[Path]:
    """The files of the native tier, one per chunk."""
    return sorted(root_dir.rglob("*.bin"))


@contextmanager
def hung_files(root_dir: Path) -> Iterator[None]:
    """Make every read of a chunk's file hang until the block ends, as a dead disk's does."""
    files = chunk_files(root_dir)
    for file in files:
        file.unlink()
        os.mkfifo(file)
    try:
        yield
    finally:
        for file in files:  # whoever waits for a writer gets one, and finds nothing to read
            if file.exists() and stat.S_ISFIFO(file.stat().st_mode):
                os.close(os.open(file, os.O_RDWR | os.O_NONBLOCK))
                file.unlink()


def unreadable_files(root_dir: Path) -> None:
    """Make every read of a chunk's file fail."""
    for file in chunk_files(root_dir):
        file.unlink()
        file.mkdir()


def damaged_files(root_dir: Path) -> None:
    """Flip one bit in every chunk's file."""
    for file in chunk_files(root_dir):
        damaged = bytearray(file.read_bytes())
        damaged[300] ^= 0x10
        file.write_bytes(damaged)
