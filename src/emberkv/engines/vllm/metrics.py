"""Our metric table in vLLM's words."""

from __future__ import annotations

from collections.abc import Iterable

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
)

from emberkv.observe.metrics import METRICS, Kind, Metric
from emberkv.observe.tally import Sample


def definitions() -> dict[str, OffloadingMetricMetadata]:
    """Every metric, for vLLM's front end to declare."""
    return {metric.name: _definition(metric) for metric in METRICS}


def stats_of(samples: Iterable[Sample]) -> OffloadingConnectorStats:
    """Samples as vLLM's stats payload."""
    stats = OffloadingConnectorStats()
    for metric, labels, value in samples:
        if metric.kind is Kind.COUNTER:
            stats.increase_counter(metric.name, value, labels)
        elif metric.kind is Kind.GAUGE:
            stats.set_gauge(metric.name, value, labels)
        else:
            stats.observe_histogram(metric.name, value, labels)
    return stats


def _definition(metric: Metric) -> OffloadingMetricMetadata:
    if metric.kind is Kind.COUNTER:
        return OffloadingCounterMetadata(metric.documentation, metric.labels)
    if metric.kind is Kind.GAUGE:
        return OffloadingGaugeMetadata(metric.documentation, metric.labels)
    return OffloadingHistogramMetadata(metric.documentation, metric.labels, metric.buckets)
