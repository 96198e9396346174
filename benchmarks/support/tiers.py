"""The tiers without an engine: vLLM's manager interface over a driver, as the spec builds it."""

from __future__ import annotations

import gc
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from emberkv.core.limits import Limits
from emberkv.core.residents import Residents
from emberkv.core.stack import TierStack
from emberkv.domain.namespace import Namespace
from emberkv.engines.vllm.manager import EmberOffloadingManager
from emberkv.live.driver import Driver
from emberkv.live.keeper.client import KeeperClient, join
from emberkv.live.keeper.joining import Place
from emberkv.live.keeper.messages import DiskSettings, KeeperConfig
from emberkv.live.manager import TierManager
from emberkv.policy.eviction import EVICTION_POLICIES
from emberkv.tiers.format import SlabGeometry

NAMESPACE = Namespace.of({"purpose": "benchmark"})
PATIENT = Limits(max_wait_s=3600.0, max_stall_s=3600.0)
DEADLINE_S = 120.0


def manager_over(
    driver: Driver, chunk_bytes: int, *, tokens_per_chunk: int = 32, limits: Limits = PATIENT
) -> EmberOffloadingManager:
    """A strict manager: what goes wrong is raised."""
    lru = EVICTION_POLICIES["lru"]
    tiers = [Residents(count, chunk_bytes, lru(count)) for count in driver.slot_counts]
    stack = TierStack(tiers, limits)
    manager = TierManager(stack, driver, time.monotonic, lambda facts: None, strict=True)
    return EmberOffloadingManager(manager, tokens_per_chunk, lambda: None)


@dataclass(frozen=True)
class DiskTierPlan:
    """A disk tier for a keeper: where, and how many chunks."""

    directory: Path
    chunks: int
    read_threads: int = 8
    write_threads: int = 4

    def settings(self, chunk_bytes: int) -> DiskSettings:
        size_bytes = SlabGeometry(self.chunks, chunk_bytes).total_bytes
        return DiskSettings(
            str(self.directory),
            size_bytes,
            read_threads=self.read_threads,
            write_threads=self.write_threads,
        )


@contextmanager
def keeper(
    ram_chunks: int, chunk_bytes: int, disk: DiskTierPlan | None = None
) -> Iterator[KeeperClient]:
    """A keeper of its own, ended cleanly afterwards."""
    instance = f"benchmark-{uuid.uuid4().hex[:8]}"
    settings = None if disk is None else disk.settings(chunk_bytes)
    config = KeeperConfig(ram_chunks, chunk_bytes, keep_s=0.0, disk=settings)
    client = join(Place(instance, uuid.uuid4().hex), config, NAMESPACE)
    if client.disk_failure:
        raise SystemExit(f"the disk tier is off: {client.disk_failure}")
    try:
        yield client
    finally:
        client.close(clean=True)


def freeze_heap() -> None:
    """Leave what exists by now out of garbage collection, as vLLM does once it has started."""
    gc.collect()
    gc.freeze()


def step_until(
    manager: EmberOffloadingManager, condition: Callable[[], bool], *, pause_s: float = 0.001
) -> None:
    """Step the manager until a condition holds; ends the benchmark if it does not come."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise SystemExit("a tier did not get where the benchmark needs it in time")
        time.sleep(pause_s)
        manager.tiers.step_end((), ())


def resident_counts(manager: EmberOffloadingManager) -> Sequence[int]:
    """Chunks per tier, RAM first."""
    return [len(tier.entries) for tier in manager.tiers.stack.tiers]


def is_usable(manager: EmberOffloadingManager) -> bool:
    """Whether RAM is there and every tier has named what it holds."""
    return not any(tier.held for tier in manager.tiers.stack.tiers)
