"""Metrics pages: sums, changes between two readings, quantiles of histograms."""

from __future__ import annotations

import math
from random import Random

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from emberkv.app.load.change import Change
from emberkv.app.metrics_page import Page
from emberkv.errors import WorldError

PAGE = """\
# HELP vllm:prompt_tokens_total Number of prefill tokens processed.
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="m"} 120.0
vllm:prompt_tokens_total{engine="1",model_name="m"} 80.0
# HELP vllm:prompt_tokens_cached_by_source_total By source.
# TYPE vllm:prompt_tokens_cached_by_source_total counter
vllm:prompt_tokens_cached_by_source_total{engine="0",source="device"} 30.0
vllm:prompt_tokens_cached_by_source_total{engine="1",source="device"} 10.0
vllm:prompt_tokens_cached_by_source_total{engine="0",source="host"} 60.0
vllm:prompt_tokens_cached_by_source_total{engine="0",source="disk"} 0.0
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="64"} 1.0
"""


def test_sums_go_over_engines_and_labels_are_read() -> None:
    page = Page(PAGE)
    assert page.total("vllm:prompt_tokens_total") == 200
    assert page.total("vllm:nothing") == 0
    assert page.label("vllm:cache_config_info", "block_size") == "16"
    assert page.label("vllm:cache_config_info", "nothing") is None
    assert not page.shows_tiers
    assert Page(PAGE + "# TYPE emberkv:tier_up gauge\nemberkv:tier_up 1\n").shows_tiers


def test_tokens_by_source_add_up() -> None:
    change = Change(Page(""), Page(PAGE))
    assert change.tokens_by_source() == {"computed": 100, "device": 40, "host": 60}
    assert Change(Page(PAGE), Page(PAGE)).tokens_by_source() == {"computed": 0}
    assert Change(Page(PAGE), Page(PAGE)).reused_share() is None


def test_a_counter_that_goes_back_is_another_server() -> None:
    with pytest.raises(WorldError, match="restarted"):
        Change(Page(PAGE), Page("")).counted("vllm:prompt_tokens_total")


def test_a_page_that_is_none_is_said() -> None:
    with pytest.raises(WorldError, match="can't be read"):
        Page('vllm:x{a="} nonsense')


def test_quantiles_of_a_histogram_lie_in_the_bucket_of_the_true_one() -> None:
    registry = CollectorRegistry()
    bounds = (0.1, 0.2, 0.4, 0.8, 1.6)
    histogram = Histogram("vllm:t_seconds", "t", ("engine",), buckets=bounds, registry=registry)
    numbers = Random(3)
    for _ in range(50):  # what was there before counts for nothing
        histogram.labels("0").observe(1.5)
    before = Page(generate_latest(registry).decode())
    values = sorted(numbers.uniform(0.0, 1.0) ** 2 for _ in range(500))
    for at, value in enumerate(values):
        histogram.labels(str(at % 2)).observe(value)
    change = Change(before, Page(generate_latest(registry).decode()))
    found = change.histogram("vllm:t_seconds")
    assert found.count == 500
    for share in (0.5, 0.95, 0.99):
        true = values[math.ceil(share * 500) - 1]
        upper = next(bound for bound in bounds if true <= bound)
        lower = max([0.0, *(bound for bound in bounds if bound < upper)])
        assert lower <= found.quantile(share) <= upper
    quantiles = found.quantiles()
    assert quantiles is not None
    assert quantiles.p50_s <= quantiles.p95_s <= quantiles.p99_s


def test_beyond_the_last_bound_its_end_is_told() -> None:
    registry = CollectorRegistry()
    histogram = Histogram("vllm:t_seconds", "t", buckets=(1.0, 2.0), registry=registry)
    for value in (0.5, 50.0, 60.0):
        histogram.observe(value)
    change = Change(Page(""), Page(generate_latest(registry).decode()))
    assert change.histogram("vllm:t_seconds").quantile(0.99) == 2.0
    assert change.histogram("vllm:nothing_seconds").quantiles() is None


def test_reuse_is_hits_by_queries() -> None:
    registry = CollectorRegistry()
    Counter("vllm:prefix_cache_queries", "q", registry=registry).inc(400)
    Counter("vllm:prefix_cache_hits", "h", registry=registry).inc(100)
    change = Change(Page(""), Page(generate_latest(registry).decode()))
    assert change.reused_share() == 0.25
