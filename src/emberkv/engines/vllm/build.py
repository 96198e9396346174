"""The manager's parts put together from the settings: the one place that names each of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from emberkv.config import Config
from emberkv.core.canary import Canary, CanaryRule
from emberkv.core.economy import Terms
from emberkv.core.limits import Limits
from emberkv.core.residents import Residents
from emberkv.core.retention import Quotas
from emberkv.core.stack import TierStack
from emberkv.domain.types import DISK, Level, TenantName
from emberkv.engines.vllm.manager import EmberOffloadingManager
from emberkv.live.canaries import Canaries
from emberkv.live.canary import Comparer, KvRows
from emberkv.live.control.server import start_control
from emberkv.live.driver import Driver
from emberkv.live.guard import make_guard
from emberkv.live.keeper.client import KeeperClient
from emberkv.live.manager import TierManager
from emberkv.live.operations import About, HashPrompt, Operations
from emberkv.observe.baseline import read_baseline
from emberkv.observe.request_log import RequestLog
from emberkv.policy.eviction import EVICTION_POLICIES

STRICT_VARIABLE = "EMBERKV_STRICT"
"""Set to 1, it makes defects of ours raise instead of turning the tiers off: for tests."""

PROBE_BYTES = 16 << 20
"""What a tier that is not loaded from is tried with: enough to tell its delay from its pace."""

MakeStack = Callable[[Sequence[Residents], Limits, Terms, Quotas], TierStack]


def build_manager(
    driver: Driver,
    settings: Config,
    *,
    tokens_per_chunk: int,
    clock: Callable[[], float],
    make_stack: MakeStack = TierStack,
    hash_prompt: HashPrompt | None = None,
    kv_rows: KvRows | None = None,
) -> EmberOffloadingManager:
    """The manager that vLLM calls, over a driver's tiers. `clock` gives monotonic seconds.

    `make_stack` may give a stack that audits itself. `hash_prompt` is for dry runs, `kv_rows` for
    a canary. Raises `ConfigError` if the request log can't be written.
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
        seeds=_seeds(settings),
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
        guard=make_guard(settings, len(tiers)),
    )
    manager.fates.policies.update({Level(n): settings.eviction_policy for n in range(len(tiers))})
    if settings.disk is not None and len(tiers) <= DISK:
        failure = driver.disk_failure if isinstance(driver, KeeperClient) else None
        manager.tally.tier_up(DISK, up=False, reason=failure or "")
    about = _about(driver, settings, tokens_per_chunk, hash_prompt)
    operations = Operations(manager, about, clock)
    if settings.canary and kv_rows is not None:
        manager.canaries = _canaries(manager, settings.canary, kv_rows)
        operations.facts["canary"] = manager.canaries.facts
    if settings.guard is not None:
        operations.facts["guard"] = manager.watch.facts
    control = start_control(operations) if settings.control else None

    def close() -> None:
        if control is not None:
            control.close()
        log.close()

    return EmberOffloadingManager(manager, tokens_per_chunk, close)


def _canaries(manager: TierManager, share: float, rows: KvRows) -> Canaries:
    canary = Canary(CanaryRule(share, rows.kv_type.precision))
    comparer = Comparer(manager.driver.arena, rows.kv_type, rows.parts)
    return Canaries(manager.stack, manager.tally, canary, comparer, manager.watch.take_out)


def _seeds(settings: Config) -> tuple[tuple[int, float], ...]:
    """What prompts of some lengths took alone when the baseline was recorded."""
    if settings.baseline is None:
        return ()
    points = read_baseline(settings.baseline).prefill
    return tuple((point.tokens, point.seconds) for point in points)


def _about(
    driver: Driver, settings: Config, tokens_per_chunk: int, hash_prompt: HashPrompt | None
) -> About:
    keeper = driver if isinstance(driver, KeeperClient) else None
    return About(
        instance=keeper.instance if keeper else settings.instance or f"engine-{os.getpid()}",
        tokens_per_chunk=tokens_per_chunk,
        namespace=keeper.namespace if keeper else None,
        root_dir=str(settings.disk.root_dir.absolute()) if settings.disk else None,
        keeper_pid=lambda: keeper.keeper_pid if keeper else None,
        hash_prompt=hash_prompt,
    )
