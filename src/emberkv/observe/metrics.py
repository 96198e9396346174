"""Every metric, with its kind, unit, labels and meaning: the one table that code and docs share."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final


class Kind(enum.Enum):
    """How a metric moves: up only, both ways, or as a distribution."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True, eq=False)  # a key of every count: the hash must be quick
class Metric:
    """One metric's definition. Label values are bounded: tiers, outcomes, reasons, sources."""

    name: str
    kind: Kind
    documentation: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


def _counter(name: str, documentation: str, *labels: str) -> Metric:
    return Metric(f"emberkv:{name}", Kind.COUNTER, documentation, labels)


def _gauge(name: str, documentation: str, *labels: str) -> Metric:
    return Metric(f"emberkv:{name}", Kind.GAUGE, documentation, labels)


TIER_CAPACITY_BYTES: Final = _gauge("tier_capacity_bytes", "Size of a tier.", "tier")
TIER_USED_BYTES: Final = _gauge("tier_used_bytes", "Bytes of a tier that are taken.", "tier")
TIER_CHUNKS: Final = _gauge("tier_chunks", "Chunks resident in a tier.", "tier")
TIER_PINNED_CHUNKS: Final = _gauge("tier_pinned_chunks", "Chunks that must not leave now.", "tier")
TIER_UP: Final = _gauge("tier_up", "1 while a tier can be used, else 0.", "tier")
TIER_LOAD_SHARE: Final = _gauge(
    "tier_load_share", "Share of requests that may load from a tier: 1 open, 0 taken out.", "tier"
)
TIER_STORES: Final = _gauge("tier_stores", "1 while a tier takes chunks in, else 0.", "tier")
COPIES_QUEUED: Final = _gauge("copies_under_way_chunks", "Chunks on their way to a tier.", "tier")
REQUESTS_WAITING: Final = _gauge("requests_waiting", "Requests that wait for a promotion.")

CHUNKS: Final = _counter(
    "chunks",
    "Chunks by what happened to them: admitted, evicted, lost, promoted, written_behind, ….",
    "tier",
    "event",
)
COPY_BYTES: Final = _counter(
    "copy_bytes", "Bytes copied between tiers, by direction.", "source", "target"
)
COPY_SECONDS: Final = _counter(
    "copy_seconds", "Thread time spent copying between tiers.", "source", "target"
)
COPY_FAILURES: Final = _counter(
    "copy_failures", "Chunks whose copy failed, by kind.", "source", "target", "kind"
)
ENGINE_BYTES: Final = _counter(
    "device_bytes", "Bytes copied between the device and RAM, by direction.", "direction"
)
LOAD_SECONDS: Final = _counter(
    "load_seconds",
    "Time from asking the engine to load from RAM to the load's end. Only vLLM knows how long a"
    " store takes: `vllm:kv_offload_store_time_total`.",
)
TOKENS: Final = _counter("prompt_tokens", "Prompt tokens of ended requests, by source.", "source")
REQUESTS: Final = _counter(
    "requests", "Ended requests, by why they got no more of their prompt.", "reason"
)
CANARY_CHUNKS: Final = _counter(
    "canary_chunks", "Chunks that a canary has compared, by the tier they came from.", "tier"
)
HINTS_UNUSABLE: Final = _counter(
    "hints_unusable", "Hints of requests that could not be used, by kind.", "kind"
)
GUARD_CHANGES: Final = _counter(
    "guard_changes", "Changes of a tier's gate by the guard or an operator.", "tier", "cause"
)
WAIT_SECONDS: Final = Metric(
    "emberkv:promotion_wait_seconds",
    Kind.HISTOGRAM,
    "Time a request waited for its promotion.",
    (),
    SECONDS,
)

METRICS: Final[tuple[Metric, ...]] = (
    TIER_CAPACITY_BYTES,
    TIER_USED_BYTES,
    TIER_CHUNKS,
    TIER_PINNED_CHUNKS,
    TIER_UP,
    TIER_LOAD_SHARE,
    TIER_STORES,
    COPIES_QUEUED,
    REQUESTS_WAITING,
    CHUNKS,
    COPY_BYTES,
    COPY_SECONDS,
    COPY_FAILURES,
    ENGINE_BYTES,
    LOAD_SECONDS,
    TOKENS,
    REQUESTS,
    HINTS_UNUSABLE,
    CANARY_CHUNKS,
    GUARD_CHANGES,
    WAIT_SECONDS,
)
