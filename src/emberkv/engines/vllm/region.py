"""The arena in the shape that vLLM's own GPU worker takes its host memory in.

Not run on CUDA until now: the attributes are those that vLLM's `CPUOffloadingWorker` uses of its
region (`tests/engines/test_compat.py` names each from its source), and the rows are laid out as
`worker.py` lays them out, byte for byte; the copies themselves need a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker
from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker
from vllm.v1.kv_offload.cpu.host_register import host_unregister

from emberkv.live.arena import Arena

USED_OF_REGION = frozenset(
    {
        "_base",
        "_row_stride",
        "cleanup",
        "create_next_canonical_view",
        "create_next_worker_view",
        "is_pinned",
        "pinned_addresses",
        "rank",
        "total_size_bytes",
    }
)
"""Every attribute that vLLM's worker uses of a region; the canonical view only if configured."""


class ArenaRegion:
    """The arena's rows as one tensor, and this rank's part of them tensor by tensor.

        row of a slot: | rank 0: tensor 0, tensor 1, … | rank 1: … | pad |

    The worker that it is given to owns it from then on, and ends it by `cleanup`: the memory is
    unpinned first, then `close` lets go of the arena.
    """

    def __init__(self, arena: Arena, rank: int, rank_bytes: int, close: Callable[[], None]) -> None:
        geometry = arena.geometry
        rows = torch.from_numpy(arena.bytes[geometry.header_bytes :])
        self.rank = rank
        self.total_size_bytes = geometry.slot_count * geometry.row_bytes
        self.is_pinned = False
        self.pinned_addresses: list[int] = []
        self._base: torch.Tensor | None = rows.view(torch.int8)
        self._row_stride = geometry.row_bytes
        self._close: Callable[[], None] | None = close
        self._slot_count = geometry.slot_count
        self._at_bytes = rank * rank_bytes
        self._end_bytes = self._at_bytes + rank_bytes

    def create_next_worker_view(self, tensor_page_size: int) -> torch.Tensor:
        """The next tensor's part of each row: int8 `(slots, tensor_page_size)`, a row apart.

        `tensor_page_size` is the tensor's bytes per chunk. To be called once per tensor, in order.
        """
        end_bytes = self._at_bytes + tensor_page_size
        assert self._base is not None
        assert end_bytes <= self._end_bytes, "the tensors take more than this rank's part of a row"
        view = torch.as_strided(
            self._base,
            size=(self._slot_count, tensor_page_size),
            stride=(self._row_stride, 1),
            storage_offset=self._base.storage_offset() + self._at_bytes,
        )
        self._at_bytes = end_bytes
        return view

    def cleanup(self) -> None:
        """Undo the pinning and let go of the arena; may be called twice."""
        for address in reversed(self.pinned_addresses):
            host_unregister(address)
        self.pinned_addresses.clear()
        self.is_pinned = False
        self._base = None
        close, self._close = self._close, None
        if close is not None:
            close()


def gpu_worker(
    kv_caches: CanonicalKVCaches,
    arena: Arena,
    blocks_per_chunk: int,
    rank: int,
    *,
    close: Callable[[], None],
) -> OffloadingWorker:
    """Make vLLM's own worker copy between the GPU's KV tensors and the arena's rows.

    It pins the rows if vLLM pins memory on this platform; `close` lets go of the arena at its end.
    """
    rank_bytes = blocks_per_chunk * sum(each.page_size_bytes for each in kv_caches.tensors)
    region = ArenaRegion(arena, rank, rank_bytes, close)
    with ExitStack() as on_failure:
        on_failure.callback(region.cleanup)
        worker = CPUOffloadingWorker(
            kv_caches=kv_caches,
            blocks_per_chunk=blocks_per_chunk,
            num_cpu_chunks=arena.geometry.slot_count,
            mmap_region=region,
        )
        on_failure.pop_all()
    return worker
