"""`EmberConnector`: vLLM's OffloadingConnector, forwarding what a spec is not told.

That is vLLM's whole configuration (for the namespace, in both processes), and of each request its
external id, prompt length and how many tokens the device cache held. It decides nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from emberkv.domain.types import RequestId
from emberkv.engines.vllm import compat
from emberkv.engines.vllm.context import vllm_config_in_sight
from emberkv.engines.vllm.manager import EmberOffloadingManager
from emberkv.errors import ConfigError
from emberkv.live.manager import TierManager

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


class EmberConnector(OffloadingConnector):
    """Loaded by `kv_connector_module_path`; serves with `EmberOffloadingSpec`."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        with vllm_config_in_sight(vllm_config):
            super().__init__(vllm_config, role, kv_cache_config)
        self._tiers: TierManager | None = None
        if self.connector_scheduler is not None:
            manager = self.connector_scheduler.manager
            if not isinstance(manager, EmberOffloadingManager):
                raise ConfigError(
                    "EmberConnector serves with emberkv's own spec: set spec_name to "
                    "'EmberOffloadingSpec' and spec_module_path to 'emberkv.engines.vllm'"
                )
            self._tiers = manager.tiers
            self._hashes_per_chunk = compat.hashes_per_chunk(self.connector_scheduler)

    def on_new_request(self, request: Request, **more: Any) -> None:
        super().on_new_request(request, **more)
        tiers = self._tiers
        facts = None if tiers is None else tiers.facts(request.request_id)
        if tiers is not None and facts is not None:
            facts.external_id = compat.external_id(request.request_id)
            tiers.describe(
                RequestId(request.request_id),
                request.num_prompt_tokens,
                lambda: compat.chunk_keys(request, self._hashes_per_chunk),
            )

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int, **more: Any
    ) -> tuple[int | None, bool]:
        if self._tiers is not None:
            self._tiers.asks(RequestId(request.request_id), num_computed_tokens)
        return super().get_num_new_matched_tokens(request, num_computed_tokens, **more)

    def build_connector_meta(
        self, scheduler_output: SchedulerOutput, **more: Any
    ) -> KVConnectorMetadata:
        meta = super().build_connector_meta(scheduler_output, **more)
        if self._tiers is not None:
            self._tiers.step_begins(compat.step_work(scheduler_output, self._tiers.prompt_tokens))
        return meta

    def get_kv_connector_stats(self, **more: Any) -> KVConnectorStats | None:
        if self._tiers is not None:  # asked for once at the end of every step
            self._tiers.step_done()
        return super().get_kv_connector_stats(**more)

    def reset_cache(self) -> bool | None:
        """False if what a tier holds may come back with the engine after a crash."""
        done = super().reset_cache()
        return done if self._tiers is None or self._tiers.reset_is_durable else False

    def register_kv_caches(self, kv_caches: dict[str, Any], **more: Any) -> None:
        with vllm_config_in_sight(self._vllm_config):
            super().register_kv_caches(kv_caches, **more)
