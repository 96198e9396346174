"""`DrillOffloadingSpec`: an ordinary server's spec, with a clock, a keeper and loads that go wrong.

Only `emberkv drill` and tests name it, as `spec_module_path` of a server of their own; it refuses
to be built in any process that they have not started.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.config import OffloadingConfig

from emberkv.drills import keeper
from emberkv.drills.faults import MixUp
from emberkv.drills.plan import FollowedPlan, plan_path
from emberkv.engines.vllm.eager import EagerOffloadingSpec
from emberkv.engines.vllm.keeping import KeeperTerms
from emberkv.engines.vllm.spec import EmberOffloadingSpec
from emberkv.errors import ConfigError


class DrillOffloadingSpec(EmberOffloadingSpec):
    """Raises `ConfigError` outside a drill."""

    def __init__(self, config: OffloadingConfig) -> None:
        self._plan = FollowedPlan(plan_path())
        super().__init__(config)

    @property
    def terms(self) -> KeeperTerms:
        return replace(super().terms, keeper_module=keeper.MODULE)

    def clock(self) -> float:
        """Monotonic seconds, moved as planned."""
        return super().clock() + self._plan.now().clock_offset_s

    def get_worker(self, kv_caches: CanonicalKVCaches, **more: Any) -> OffloadingWorker:
        worker = super().get_worker(kv_caches, **more)
        if not current_platform.is_cpu():
            return worker  # its loads end later than `submit_load`: there is nothing to mix up yet
        return MixingWorker(
            worker, kv_caches, self.blocks_per_chunk, FollowedPlan(plan_path(), 0.0)
        )


class EagerDrillSpec(DrillOffloadingSpec, EagerOffloadingSpec):
    """Faults for a self-check: it also loads what is quicker to compute."""


class MixingWorker(OffloadingWorker):
    """A CPU worker whose loads put right bytes in wrong places, while the plan says so."""

    def __init__(
        self,
        worker: OffloadingWorker,
        kv_caches: CanonicalKVCaches,
        blocks_per_chunk: int,
        plan: FollowedPlan,
    ) -> None:
        self._worker = worker
        self._tensors: list[torch.Tensor] = [each.tensor for each in kv_caches.tensors]
        self._blocks_per_chunk = blocks_per_chunk
        self._plan = plan

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec, **more: Any
    ) -> bool:
        return bool(self._worker.submit_store(job_id, src_spec, dst_spec, **more))

    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, **more: Any
    ) -> bool:
        mix_up = self._plan.now().loads
        blocks = torch.from_numpy(dst_spec.block_ids).long()
        before = [tensor[blocks].clone() for tensor in self._tensors] if mix_up else []
        done = bool(self._worker.submit_load(job_id, src_spec, dst_spec, **more))
        if mix_up:
            loaded = [tensor[blocks].clone() for tensor in self._tensors]
            mixed = self._mixed_up(mix_up, loaded, before)
            for tensor, pages in zip(self._tensors, mixed, strict=True):
                tensor[blocks] = pages
        return done

    def get_finished(self, **more: Any) -> list[TransferResult]:
        return list(self._worker.get_finished(**more))

    def wait(self, job_ids: set[int], **more: Any) -> None:
        self._worker.wait(job_ids, **more)

    def shutdown(self, **more: Any) -> None:
        self._tensors.clear()
        self._worker.shutdown(**more)

    def _mixed_up(
        self, mix_up: MixUp, loaded: list[torch.Tensor], before: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """The pages of each tensor, `[block, byte]`, as the fault leaves them."""
        last = max(len(loaded[0]) - self._blocks_per_chunk, 0)
        match mix_up:
            case MixUp.OTHER_CHUNK:
                # The last one: the same chunks in another order are the same to attention.
                return [torch.cat([pages[:last], pages[: len(pages) - last]]) for pages in loaded]
            case MixUp.STALE_GENERATION:
                return [
                    torch.cat([pages[:last], old[last:]])
                    for pages, old in zip(loaded, before, strict=True)
                ]
            case MixUp.SHIFTED_LAYER:
                return [*loaded[1:], loaded[0]]
            case _:
                raise ConfigError(f"a worker's load can't be mixed up with {mix_up.value}")
