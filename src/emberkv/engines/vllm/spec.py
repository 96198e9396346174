"""`EmberOffloadingSpec`: the entry that vLLM's own OffloadingConnector loads."""

from __future__ import annotations

import os
import time
from typing import Any

from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    OffloadingManager,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadingWorker,
)
from vllm.v1.kv_offload.config import OffloadingConfig

from emberkv import config as configuration
from emberkv.core.limits import Limits
from emberkv.core.residents import Residents
from emberkv.core.stack import TierStack
from emberkv.engines.vllm import compat, metrics
from emberkv.engines.vllm.manager import EmberOffloadingManager
from emberkv.engines.vllm.worker import ArenaCopyWorker
from emberkv.errors import ConfigError
from emberkv.live.arena import ArenaGeometry
from emberkv.live.manager import TierManager
from emberkv.observe.request_log import RequestLog
from emberkv.policy.eviction import EVICTION_POLICIES
from emberkv.testing.driver import InlineDriver

_SHARED: dict[str, Any] = {}


class EmberOffloadingSpec(OffloadingSpec):
    """Cheap to build: vLLM builds one per process and role. Resources come with the getters."""

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        return metrics.definitions()

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        compat.require_tested()
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
            raise ConfigError(
                f"cpu_bytes_to_use is {self.settings.ram_bytes}, less than one chunk of "
                f"{self.chunk_bytes} bytes: raise it or make chunks smaller"
            )

    def _driver(self) -> InlineDriver:
        if "driver" not in _SHARED:
            _SHARED["driver"] = InlineDriver(self.geometry)
        return _SHARED["driver"]

    def get_manager(self) -> OffloadingManager:
        driver = self._driver()
        policy = EVICTION_POLICIES[self.settings.eviction_policy]
        tiers = [Residents(n, self.chunk_bytes, policy(n)) for n in driver.slot_counts]
        limits = Limits(max_wait_s=self.settings.max_wait_s, max_stall_s=self.settings.max_stall_s)
        log = RequestLog(self.settings.request_log)
        manager = TierManager(
            TierStack(tiers, limits),
            driver,
            time.monotonic,
            log.write,
            strict=os.environ.get("EMBERKV_STRICT") == "1",
        )
        return EmberOffloadingManager(manager, self.tokens_per_chunk, log.close)

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        rank = 0 if self.replicated_layout else self.config.parallel.rank
        return ArenaCopyWorker(kv_caches, self._driver().arena, self.blocks_per_chunk, rank)
