"""An HTTP server in this process that speaks as much of vLLM's API as `baseline` and `load` use.

It computes nothing: an answer is a stream of empty texts. Its metrics are those of a real page, by
the names that vLLM gives them.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

BLOCK_TOKENS = 16
MODEL = "toy"
BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0)


class Metrics:
    """The metrics of vLLM that are read, and on demand one of emberkv."""

    def __init__(self, *, tiers: bool) -> None:
        self.registry = CollectorRegistry()
        labels = {"labelnames": ("model_name", "engine"), "registry": self.registry}
        self.names = (MODEL, "0")

        def counter(name: str) -> Counter:
            return Counter(f"vllm:{name}", name, **labels)

        def histogram(name: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"vllm:{name}", name, buckets=buckets, **labels)

        self.first_token = histogram("time_to_first_token_seconds", BUCKETS)
        self.inter_token = histogram("inter_token_latency_seconds", BUCKETS)
        self.end_to_end = histogram("e2e_request_latency_seconds", BUCKETS)
        self.lengths = histogram("request_prompt_tokens", (100, 200, 500, 1000, 2000, 5000))
        self.prompt_tokens = counter("prompt_tokens")
        self.queries = counter("prefix_cache_queries")
        self.hits = counter("prefix_cache_hits")
        self.preemptions = counter("num_preemptions")
        self.cached = Counter(
            "vllm:prompt_tokens_cached_by_source",
            "by source",
            ("model_name", "engine", "source"),
            registry=self.registry,
        )
        self.running = Gauge("vllm:num_requests_running", "running", **labels)
        self.waiting = Gauge("vllm:num_requests_waiting", "waiting", **labels)
        self.usage = Gauge("vllm:kv_cache_usage_perc", "usage", **labels)
        self.config = Gauge(
            "vllm:cache_config_info",
            "configuration",
            ("block_size", "num_gpu_blocks"),
            registry=self.registry,
        )
        self.config.labels("16", "1024").set(1)
        for metric in (self.running, self.waiting, self.usage, self.prompt_tokens, self.queries):
            metric.labels(*self.names)
        for metric in (self.hits, self.preemptions):
            metric.labels(*self.names)
        if tiers:
            Gauge("emberkv:tier_up", "up", ("tier",), registry=self.registry).labels("ram").set(1)


class ToyEngine:
    """What the handler of every request shares."""

    def __init__(self, *, tiers: bool = False, longest: int = 4200, fail_every: int = 0) -> None:
        self.metrics = Metrics(tiers=tiers)
        self.longest = longest
        self.fail_every = fail_every
        self.prompts: list[list[int]] = []
        self.bodies: list[dict[str, Any]] = []
        self.lock = threading.Lock()
        self.at_once = 0
        self.most_at_once = 0
        self.url = ""
        self._blocks: set[tuple[int, ...]] = set()

    def admit(self, prompt: list[int]) -> int:
        """Count a prompt; returns how many of its tokens were there before."""
        whole = len(prompt) // BLOCK_TOKENS * BLOCK_TOKENS
        ends = range(BLOCK_TOKENS, whole + 1, BLOCK_TOKENS)
        hit = 0
        for end in ends:
            block = tuple(prompt[:end])
            if block in self._blocks and hit == end - BLOCK_TOKENS:
                hit = end
            self._blocks.add(block)
        names = self.metrics.names
        self.metrics.prompt_tokens.labels(*names).inc(len(prompt))
        self.metrics.queries.labels(*names).inc(len(prompt))
        self.metrics.hits.labels(*names).inc(hit)
        self.metrics.cached.labels(*names, "device").inc(hit)
        self.metrics.lengths.labels(*names).observe(len(prompt))
        return hit

    @contextmanager
    def inside(self) -> Iterator[None]:
        """A request is being answered."""
        with self.lock:
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            self.metrics.running.labels(*self.metrics.names).set(self.at_once)
        try:
            yield
        finally:
            with self.lock:
                self.at_once -= 1


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else the parts of a stream arrive together
    engine: ToyEngine

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        pages = {
            "/metrics": lambda: generate_latest(self.engine.metrics.registry),
            "/version": lambda: json.dumps({"version": "0.0-toy"}).encode(),
            "/v1/models": lambda: json.dumps(
                {"data": [{"id": MODEL, "max_model_len": self.engine.longest}]}
            ).encode(),
        }
        if self.path in pages:
            self._answer(200, pages[self.path]())
        else:
            self._answer(404, b"{}")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.engine.inside():
            with self.engine.lock:
                self.engine.bodies.append(body)
                self.engine.prompts.append(body["prompt"])
                number = len(self.engine.prompts)
                self.engine.admit(body["prompt"])
            if self.engine.fail_every and number % self.engine.fail_every == 0:
                said = {"error": {"message": "no such\ntoken"}}
                self._answer(400, json.dumps(said).encode())
                return
            self._stream(body)

    def _stream(self, body: dict[str, Any]) -> None:
        metrics, names = self.engine.metrics, self.engine.metrics.names
        began_s = last_s = time.perf_counter()
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for at in range(body["max_tokens"]):
            time.sleep(0.0005)
            self._event({"choices": [{"text": ""}]})
            now_s = time.perf_counter()
            histogram = metrics.inter_token if at else metrics.first_token
            histogram.labels(*names).observe(now_s - last_s)
            last_s = now_s
        metrics.end_to_end.labels(*names).observe(last_s - began_s)
        self._event({"choices": [], "usage": {"completion_tokens": body["max_tokens"]}})
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _event(self, event: dict[str, Any]) -> None:
        self._chunk(b"data: " + json.dumps(event).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def _answer(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64


@contextmanager
def serving(engine: ToyEngine) -> Iterator[ToyEngine]:
    """Serve on a port of loopback that was free."""
    handler = type("Handler", (_Handler,), {"engine": engine})
    with _Server(("127.0.0.1", 0), handler) as server:
        engine.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield engine
        finally:
            server.shutdown()
            thread.join()
