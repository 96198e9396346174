"""`EmberOffloadingSpec`: the entry that vLLM's own OffloadingConnector loads."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    OffloadingManager,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadingWorker,
)
from vllm.v1.kv_offload.config import OffloadingConfig

from emberkv import config as configuration
from emberkv.core.stack import TierStack
from emberkv.engines.vllm import compat, metrics
from emberkv.engines.vllm.build import MakeStack, build_manager
from emberkv.engines.vllm.context import find_vllm_config
from emberkv.engines.vllm.hashing import PromptHasher
from emberkv.engines.vllm.keeping import KeeperTerms
from emberkv.engines.vllm.logs import show_beside_vllm
from emberkv.engines.vllm.worker import ArenaCopyWorker
from emberkv.errors import ConfigError
from emberkv.live.arena import Arena, ArenaGeometry
from emberkv.live.canary import KvRows, kv_type_of
from emberkv.live.driver import Driver


class EmberOffloadingSpec(OffloadingSpec):
    """Cheap to build: vLLM builds one per process and role. Resources come with the getters."""

    make_stack: MakeStack = TierStack

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        return metrics.definitions()

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        compat.require_tested()
        show_beside_vllm()
        self.settings = configuration.parse(config.extra_config)
        if len(config.groups) != 1:
            raise ConfigError(
                f"this model has {len(config.groups)} KV cache groups; emberkv serves models "
                "with one (full attention in every layer)"
            )
        ranks = 1 if config.replicated_layout else config.parallel.world_size
        self.replicated_layout = config.replicated_layout
        self.chunk_bytes = config.worker_kv_bytes_per_block * self.blocks_per_chunk * ranks
        self.tokens_per_chunk = self.tokens_per_block[0] * self.blocks_per_chunk
        self.geometry = ArenaGeometry.within(self.settings.ram_bytes, self.chunk_bytes)
        if not self.geometry.slot_count:
            needed_bytes = ArenaGeometry(1, self.chunk_bytes).total_bytes
            raise ConfigError(
                f"cpu_bytes_to_use is {self.settings.ram_bytes}, less than one chunk with its "
                f"header, {needed_bytes} bytes: raise it or make chunks smaller"
            )

    @property
    def terms(self) -> KeeperTerms:
        return KeeperTerms(self.settings, self.geometry, self.config)

    def open_driver(self) -> Driver:
        """The scheduler's driver. Raises `ConfigError` and `KeeperError`."""
        return self.terms.join_manager()

    def open_arena(self, rank: int) -> tuple[Arena, Callable[[], None]]:
        """A worker's arena, and what lets go of it. Raises `ConfigError` and `KeeperError`."""
        attachment = self.terms.join_worker(rank)
        return attachment.arena, attachment.close

    def clock(self) -> float:
        """Monotonic seconds."""
        return time.monotonic()

    def get_manager(self, **_: Any) -> OffloadingManager:
        return build_manager(
            self.open_driver(),
            self.settings,
            tokens_per_chunk=self.tokens_per_chunk,
            clock=self.clock,
            hash_prompt=self._prompt_hasher(),
            kv_rows=self._kv_rows(),
            make_stack=self.make_stack,
        )

    def _kv_rows(self) -> KvRows | None:
        """What rows hold, for a canary. Raises `ConfigError` if that can't be compared."""
        if not self.settings.canary:
            return None
        vllm_config = find_vllm_config()
        if vllm_config is None:
            raise ConfigError(
                "canary needs EmberConnector: vLLM shows its configuration to it alone"
            )
        name = str(vllm_config.cache_config.cache_dtype)
        kv_type = kv_type_of(str(vllm_config.model_config.dtype) if name == "auto" else name)
        ranks = 1 if self.replicated_layout else self.config.parallel.world_size
        return KvRows(kv_type, len(self.config.groups[0].layer_names) * ranks)

    def _prompt_hasher(self) -> PromptHasher | None:
        """Where vLLM shows its configuration: it says how requests are hashed."""
        vllm_config = find_vllm_config()
        return None if vllm_config is None else PromptHasher(vllm_config, self.config)

    def get_worker(self, kv_caches: CanonicalKVCaches, **_: Any) -> OffloadingWorker:
        self._require_equal_parts(kv_caches)
        arena, close = self.open_arena(self.config.parallel.rank)
        rank = 0 if self.replicated_layout else self.config.parallel.rank
        if current_platform.is_cuda_alike() or current_platform.is_xpu():
            from emberkv.engines.vllm.region import gpu_worker

            return gpu_worker(kv_caches, arena, self.blocks_per_chunk, rank, close=close)
        return ArenaCopyWorker(kv_caches, arena, self.blocks_per_chunk, rank, close=close)

    def _require_equal_parts(self, kv_caches: CanonicalKVCaches) -> None:
        """Refuse ranks whose parts of a chunk differ in size: a row has equal parts for all."""
        pages_bytes = sum(each.page_size_bytes for each in kv_caches.tensors)
        if pages_bytes != self.config.worker_kv_bytes_per_block:
            raise ConfigError(
                f"rank {self.config.parallel.rank} holds {pages_bytes} bytes per block, not the "
                f"{self.config.worker_kv_bytes_per_block} it was announced with; emberkv serves "
                "models whose layers are shared out evenly among ranks"
            )
