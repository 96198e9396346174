"""The peer: vLLM's own tiering manager and file tier, with nothing replaced but the worker.

Its worker refuses the CPU platform, so ours copies for it, between the same device tensors and the
rows of vLLM's own shared region. What differs is who manages the tiers and does their I/O.

For a server: spec_name NativeTierOnCpu, spec_module_path support.native_tier, and the directory
`benchmarks` on PYTHONPATH. Without an engine: `native_manager`.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    OffloadingManager,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from emberkv.engines.vllm.slots import ArenaSlots
from emberkv.engines.vllm.worker import ArenaCopyWorker
from emberkv.live.arena import ArenaGeometry

TOKENS_PER_CHUNK = 32


class _RegionRows:
    """Rows of vLLM's region, with the two attributes of an arena that our worker uses."""

    def __init__(self, region: SharedOffloadRegion) -> None:
        view = region.create_kv_memoryview()
        self.geometry = ArenaGeometry(view.shape[0], view.strides[0])
        self.rows_address = np.asarray(view).ctypes.data


class PeerWorker(OffloadingWorker):
    """Our copying, told of rows by vLLM's own load/store spec."""

    def __init__(self, copier: ArenaCopyWorker, region: SharedOffloadRegion) -> None:
        self._copier = copier
        self._region = region

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: BlockIDsLoadStoreSpec, **_: Any
    ) -> bool:
        return self._copier.submit_store(job_id, src_spec, ArenaSlots(dst_spec.block_ids.tolist()))

    def submit_load(
        self, job_id: int, src_spec: BlockIDsLoadStoreSpec, dst_spec: GPULoadStoreSpec, **_: Any
    ) -> bool:
        return self._copier.submit_load(job_id, ArenaSlots(src_spec.block_ids.tolist()), dst_spec)

    def get_finished(self) -> list[TransferResult]:
        return self._copier.get_finished()

    def wait(self, job_ids: set[int]) -> None:
        self._copier.wait(job_ids)

    def shutdown(self) -> None:
        self._copier.shutdown()
        self._region.cleanup()


class NativeTierOnCpu(TieringOffloadingSpec):
    """vLLM's spec, with a worker that runs on the CPU platform."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=0,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            copier = ArenaCopyWorker(kv_caches, _RegionRows(region), self.blocks_per_chunk, 0)
            self._worker = PeerWorker(copier, region)
        return self._worker


@contextmanager
def native_manager(
    ram_chunks: int, chunk_bytes: int, root_dir: Path, *, threads: int = 16
) -> Iterator[OffloadingManager]:
    """The manager of vLLM over a RAM region and files below `root_dir`, without an engine."""
    config = OffloadingConfig(
        groups=(OffloadingGroupConfig(TOKENS_PER_CHUNK, ("layer",), 0),),
        worker_kv_bytes_per_block=chunk_bytes,
        enable_kv_cache_events=False,
        extra_config={
            "cpu_bytes_to_use": ram_chunks * chunk_bytes,
            "secondary_tiers": [
                {
                    "type": "fs",
                    "root_dir": str(root_dir),
                    "n_read_threads": threads,
                    "n_write_threads": threads,
                }
            ],
        },
        engine_id=f"benchmark-{uuid.uuid4().hex[:8]}",
        model=OffloadingModelConfig("benchmark", "float32"),
        cache=OffloadingCacheConfig(tokens_per_hash=TOKENS_PER_CHUNK, blocks_per_chunk=1),
        parallel=OffloadingParallelConfig(
            rank=0,
            world_size=1,
            tp_size=1,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=False,
        ),
    )
    manager = NativeTierOnCpu(config).get_manager()
    if not all(tier._use_o_direct for tier in manager.secondary_tiers):
        raise SystemExit(f"{root_dir} has no direct I/O: nothing to compare")
    try:
        yield manager
    finally:
        manager.shutdown()
