"""How the demo reads a server: metrics pages, request logs, processes, streams."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from signal import SIGKILL

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from demo.measures import (
    Page,
    Sources,
    device_bytes_read,
    ember_sources,
    engine_sources,
    logged_sources,
    process_tree,
)
from demo.server import end_processes, find_keeper, free_port
from emberkv.observe import metrics
from emberkv.observe.request_log import RequestLog
from emberkv.observe.requests import RequestFacts


def page_of(device: int, host: int, disk: int, computed: int) -> Page:
    """A page as the engine writes it, with emberkv's own names."""
    registry = CollectorRegistry()
    cached = Counter(
        "vllm:prompt_tokens_cached_by_source", "…", ["model_name", "source"], registry=registry
    )
    tokens = Counter(metrics.TOKENS.name, "…", ["model_name", "source"], registry=registry)
    for engine_name, name, count in (
        ("device", "device", device),
        ("host", "ram", host),
        ("disk", "disk", disk),
    ):
        cached.labels("m", engine_name).inc(count)
        tokens.labels("m", name).inc(count)
    tokens.labels("m", "computed").inc(computed)
    done = Counter("vllm:request_success", "…", ["finished_reason"], registry=registry)
    done.labels("stop").inc(2)
    done.labels("length").inc(3)
    chunks = Gauge(metrics.TIER_CHUNKS.name, "…", ["model_name", "tier"], registry=registry)
    chunks.labels('odd "name"', "ram").set(7)
    return Page(generate_latest(registry).decode())


def test_both_witnesses_are_read_as_differences() -> None:
    before, after = page_of(64, 0, 0, 10), page_of(64, 2048, 32, 31)
    assert ember_sources(before, after) == Sources(0, 2048, 32, 21)
    assert engine_sources(before, after, prompt_tokens=2101) == Sources(0, 2048, 32, 21)


def test_a_page_sums_over_labels_that_are_not_asked_for() -> None:
    page = page_of(0, 0, 0, 0)
    assert page.finished_requests == 5
    assert page.chunks("ram") == 7
    assert page.chunks("disk") == 0


def test_the_request_log_is_found_by_the_id_that_was_sent(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    assert logged_sources(path, "harbour-0") is None
    log = RequestLog(path)
    facts = RequestFacts("cmpl-harbour-0-0-1234", external_id="cmpl-harbour-0-0")
    facts.prompt_tokens, facts.ram_tokens, facts.device_tokens = 100, 64, 32
    log.write(facts)
    log.close()
    assert logged_sources(path, "harbour-0") == Sources(32, 64, 0, 4)
    assert logged_sources(path, "harbour-1") is None
    assert json.loads(path.read_text())["prompt_tokens"] == 100


def test_a_process_tree_is_followed_and_ended() -> None:
    code = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', sys.argv[1]])"
    code += "; print(flush=True); time.sleep(600)"
    command = [sys.executable, "-c", code, "import time; time.sleep(600)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout
        parent.stdout.readline()
        tree = process_tree(parent.pid)
        assert tree[0] == parent.pid
        assert len(tree) == 2
        assert set(tree) < set(process_tree(os.getpid()))
        end_processes(tree, SIGKILL)
        assert process_tree(parent.pid) == []


def test_reads_from_a_device_are_counted_per_process() -> None:
    assert device_bytes_read(os.getpid()) >= 0
    assert device_bytes_read(0) == 0


def test_no_keeper_is_found_for_an_instance_that_nobody_has() -> None:
    assert find_keeper("demo-of-nobody") is None


def test_a_free_port_can_be_had() -> None:
    assert 1024 <= free_port() <= 65535
