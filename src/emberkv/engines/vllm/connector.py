"""`EmberConnector`: vLLM's OffloadingConnector, forwarding what a spec is not told.

That is vLLM's whole configuration (for the namespace, in both processes), and of each request its
external id, prompt length and how many tokens the device cache held. It decides nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from emberkv.engines.vllm import compat
from emberkv.engines.vllm.context import vllm_config_in_sight
from emberkv.engines.vllm.hashing import chunk_keys
from emberkv.engines.vllm.manager import EmberOffloadingManager
from emberkv.errors import ConfigError
from emberkv.live.manager import TierManager

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
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
            (group,) = self.connector_scheduler.config.kv_group_configs
            self._hashes_per_chunk: int = group.hashes_per_chunk

    def on_new_request(self, request: Request, **more: Any) -> None:
        super().on_new_request(request, **more)
        facts = None if self._tiers is None else self._tiers.facts(request.request_id)
        if self._tiers is not None and facts is not None:
            keys = chunk_keys(request.block_hashes, self._hashes_per_chunk)
            self._tiers.names(request.request_id, keys)
            facts.prompt_tokens = request.num_prompt_tokens
            facts.external_id = compat.external_id(request.request_id)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int, **more: Any
    ) -> tuple[int | None, bool]:
        facts = None if self._tiers is None else self._tiers.facts(request.request_id)
        if facts is not None and not facts.preemptions:
            facts.device_tokens = num_computed_tokens
        return super().get_num_new_matched_tokens(request, num_computed_tokens, **more)

    def register_kv_caches(self, kv_caches: dict[str, Any], **more: Any) -> None:
        with vllm_config_in_sight(self._vllm_config):
            super().register_kv_caches(kv_caches, **more)
