"""How the scheduler and the workers of one vLLM engine come to the same keeper."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass

from vllm.v1.kv_offload.config import OffloadingConfig

from emberkv.config import Config
from emberkv.domain.units import format_size
from emberkv.engines.vllm.context import find_vllm_config
from emberkv.engines.vllm.identity import Identity, identify
from emberkv.errors import ConfigError
from emberkv.live.arena import ArenaGeometry
from emberkv.live.keeper.address import KEEPER_MODULE
from emberkv.live.keeper.client import KeeperClient, join
from emberkv.live.keeper.joining import Place
from emberkv.live.keeper.messages import DiskSettings, KeeperConfig
from emberkv.live.keeper.worker import WorkerAttachment, join_worker

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KeeperTerms:
    """What one engine asks of its keeper, put together alike in each of its processes."""

    settings: Config
    geometry: ArenaGeometry
    offloading: OffloadingConfig
    keeper_module: str = KEEPER_MODULE

    def join_worker(self, rank: int) -> WorkerAttachment:
        """Attach this worker. Raises `ConfigError` and `KeeperError`."""
        identity = self._identity()
        if identity is None:
            raise ConfigError("vLLM shows its configuration to no worker: use EmberConnector")
        if not identity.persistent:
            logger.warning("disk and takeover are off: %s", identity.reason)
        return join_worker(self._place, rank, self._config(identity), identity.namespace)

    def join_manager(self) -> KeeperClient:
        """Attach the scheduler, once all workers are there. Raises `ConfigError`, `KeeperError`.

        Where vLLM does not show its configuration here, the workers' namespace is taken.
        """
        identity = self._identity()
        client = join(
            self._place,
            self._config(identity),
            None if identity is None else identity.namespace,
            worker_count=self.offloading.parallel.world_size,
        )
        self._say(client)
        return client

    @property
    def _place(self) -> Place:
        instance = self.settings.instance or self._default_instance()
        return Place(instance, self.offloading.engine_id, keeper_module=self.keeper_module)

    def _default_instance(self) -> str:
        """One name per model and data-parallel replica: a restart with other settings finds it."""
        parallel = self.offloading.parallel
        text = f"{self.offloading.model.name}\0{parallel.data_parallel_index}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def _identity(self) -> Identity | None:
        vllm_config = find_vllm_config()
        if vllm_config is None:
            return None
        return identify(vllm_config, self.offloading, self.settings.model_identity)

    def _config(self, identity: Identity | None) -> KeeperConfig:
        persistent = identity is None or identity.persistent
        disk = self.settings.disk
        return KeeperConfig(
            slot_count=self.geometry.slot_count,
            chunk_bytes=self.geometry.chunk_bytes,
            keep_s=self.settings.keep_s if persistent else 0.0,
            disk=None
            if disk is None or not persistent
            else DiskSettings(
                root_dir=str(disk.root_dir.absolute()),
                size_bytes=disk.size_bytes,
                size_is_default=disk.size_is_default,
                read_threads=disk.read_threads,
                write_threads=disk.write_threads,
            ),
            refuse_without_disk=self.settings.on_busy_disk == "refuse",
        )

    def _say(self, client: KeeperClient) -> None:
        sizes = [format_size(count * self.geometry.chunk_bytes) for count in client.slot_counts]
        logger.info(
            "emberkv serves %s of RAM%s in chunks of %s; namespace %s, keeper %d of instance %s",
            sizes[0],
            f" and {sizes[1]} of disk" if len(sizes) > 1 else "",
            format_size(self.geometry.chunk_bytes),
            client.namespace.short,
            client.keeper_pid,
            client.instance,
        )
        if client.disk_failure is not None:
            logger.error("the disk tier is off: %s", client.disk_failure)
