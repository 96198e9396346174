"""The manager's parts put together from the settings: the one place that names each of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from emberkv.config import Config
from emberkv.core.economy import Terms
from emberkv.core.limits import Limits
from emberkv.core.residents import Residents
from emberkv.core.retention import Quotas
from emberkv.core.stack import TierStack
from emberkv.domain.types import DISK, TenantName
from emberkv.engines.vllm.manager import EmberOffloadingManager
from emberkv.live.driver import Driver
from emberkv.live.manager import TierManager
from emberkv.observe.request_log import RequestLog
from emberkv.policy.eviction import EVICTION_POLICIES

STRICT_VARIABLE = "EMBERKV_STRICT"
"""Set to 1, it makes defects of ours raise instead of turning the tiers off: for tests."""

PROBE_BYTES = 16 << 20
"""What a tier that is not loaded from is tried with: enough to tell its delay from its pace."""


def build_manager(
    driver: Driver,
    settings: Config,
    *,
    tokens_per_chunk: int,
    clock: Callable[[], float],
    make_stack: Callable[[Sequence[Residents], Limits, Terms, Quotas], TierStack] = TierStack,
) -> EmberOffloadingManager:
    """The manager that vLLM calls, over a driver's tiers. `clock` gives monotonic seconds.

    `make_stack` may give a stack that audits itself. Raises `ConfigError` if the request log can't
    be written.
    """
    policy = EVICTION_POLICIES[settings.eviction_policy]
    chunk_bytes = driver.arena.geometry.chunk_bytes
    tiers = [Residents(count, chunk_bytes, policy(count)) for count in driver.slot_counts]
    limits = Limits(
        max_wait_s=settings.max_wait_s,
        max_stall_s=settings.max_stall_s,
        look_ahead_share=settings.look_ahead_share,
    )
    terms = Terms(
        tokens_per_chunk=tokens_per_chunk,
        max_slowdown=settings.max_slowdown,
        probe_chunks=min(max(PROBE_BYTES // chunk_bytes, 4), 256),
    )
    quotas = Quotas(
        pin_share=settings.pin_share,
        raised_share=settings.raised_share,
        offload_min_priority=settings.offload_min_priority,
        tenants=tuple((TenantName(name), share) for name, share in settings.tenants),
    )
    log = RequestLog(settings.request_log)
    manager = TierManager(
        make_stack(tiers, limits, terms, quotas),
        driver,
        clock,
        log.write,
        strict=os.environ.get(STRICT_VARIABLE) == "1",
    )
    if settings.disk is not None and len(tiers) <= DISK:
        manager.tally.tier_up(DISK, up=False)
    return EmberOffloadingManager(manager, tokens_per_chunk, log.close)
