"""A real server on a tiny random model: asked by token ids, its sources read from its metrics."""

from __future__ import annotations

import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from demo.measures import Page, Sources, engine_sources
from demo.server import Server, find_keeper, free_port, kill_keeper
from emberkv.app.launch import engine_command

BLOCK_TOKENS = 32
PROMPT_TOKENS = 1200
DEVICE_BLOCKS = 64
ANSWER_TOKENS = 8
SERVE = Path(sys.executable).with_name("emberkv")


def document(seed: int, tokens: int = PROMPT_TOKENS) -> list[int]:
    """A prompt of its own for each seed."""
    numbers = random.Random(seed)
    return [numbers.randrange(100, 40_000) for _ in range(tokens)]


LOGPROB_SPREAD = 2e-3
"""More than computing the same twice in other batches moves a log-probability here."""


@dataclass
class Answered:
    """A greedy answer, how likely each token was, and where the prompt's tokens came from.

    A tiny random model says much the same to every prompt; the log-probabilities tell them apart.
    """

    tokens: list[str]
    logprobs: list[float]
    sources: Sources
    request_id: str

    def equals(self, other: Answered) -> bool:
        pairs = zip(self.logprobs, other.logprobs, strict=True)
        return self.tokens == other.tokens and all(abs(a - b) < LOGPROB_SPREAD for a, b in pairs)


@dataclass
class RealServer:
    """One configuration on one port; may be started, killed and started again."""

    model: Path
    directory: Path
    instance: str
    entry: str = "serve"
    dtype: str = "float32"
    ram: str = "256MiB"
    disk_size: str = "512MiB"
    port: int = field(default_factory=free_port)
    asked: int = 0

    def __post_init__(self) -> None:
        self.log = self.directory / f"{self.instance}.log"
        self.request_log = self.directory / f"{self.instance}.jsonl"
        self.disk = self.directory / "kv"
        self.disk.mkdir(exist_ok=True)
        self.server = Server(self._command(), self.port, self.log)
        self.http = httpx.Client(base_url=self.server.url, timeout=120, trust_env=False)

    def _command(self) -> list[str]:
        flags = [
            *("--host", "127.0.0.1", "--port", str(self.port), "--dtype", self.dtype),
            *("--served-model-name", "tiny", "--max-model-len", "1536", "--enforce-eager"),
            *("--block-size", str(BLOCK_TOKENS)),
            *("--num-gpu-blocks-override", str(DEVICE_BLOCKS)),
        ]
        if self.entry == "plain":
            return engine_command(["serve", str(self.model), *flags])
        tiers = ["--ram", self.ram, "--disk", str(self.disk), "--disk-size", self.disk_size]
        # A twentieth of what so small a model computes is no time for a disk to answer in.
        tiers += ["--max-slowdown", "10"]
        names = ["--instance", self.instance, "--request-log", str(self.request_log)]
        return [str(SERVE), "serve", str(self.model), *tiers, *names, "--", *flags]

    def start(self) -> None:
        self.server.start(lambda: None)

    def page(self) -> Page:
        return Page(self.http.get("/metrics").raise_for_status().text)

    def ask(
        self, prompt: list[int], *, salt: str | None = None, hints: dict[str, Any] | None = None
    ) -> Answered:
        """A greedy answer; with a salt of its own it is computed, whatever any cache holds."""
        before = self.page()
        self.asked += 1
        body: dict[str, Any] = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 1,
            "return_tokens_as_token_ids": True,
        }
        if salt is not None:
            body["cache_salt"] = salt
        if hints is not None:
            body["kv_transfer_params"] = {"emberkv": hints}
        request_id = f"{self.instance}-{self.asked}-"
        response = self.http.post(
            "/v1/completions", json=body, headers={"X-Request-Id": request_id}
        )
        said = response.raise_for_status().json()["choices"][0]["logprobs"]
        after = self.wait_until(lambda page: page.finished_requests > before.finished_requests)
        sources = engine_sources(before, after, len(prompt))
        return Answered(said["tokens"], said["token_logprobs"], sources, request_id)

    def computed(self, prompt: list[int]) -> Answered:
        """The answer without any cache."""
        answered = self.ask(prompt, salt=f"salt {self.asked}")
        assert answered.sources.computed == len(prompt)
        return answered

    def wait_until(self, condition: Any, timeout_s: float = 60.0) -> Page:
        """Read the metrics until they say so; the engine is asked something small meanwhile."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            page = self.page()
            if condition(page):
                return page
            if time.monotonic() > deadline_s:
                raise AssertionError(f"not so in {timeout_s:.0f} s\n{self.server.tail()}")
            time.sleep(0.05)

    def wait_until_written(self, prompts: int) -> None:
        """Until the disk tier holds so many whole prompts; a tiny request makes the engine look."""
        chunks = prompts * (PROMPT_TOKENS // BLOCK_TOKENS)
        deadline_s = time.monotonic() + 60
        while self.page().chunks("disk") < chunks:
            assert time.monotonic() < deadline_s, self.server.tail()
            self.ask([7, 8, 9])

    def wait_until_settled(self) -> None:
        """Until nothing is on its way to disk; a tiny request makes the engine look."""
        deadline_s = time.monotonic() + 60
        self.ask([7, 8, 9])
        while self.page().chunks_under_way("disk"):
            assert time.monotonic() < deadline_s, self.server.tail()
            self.ask([7, 8, 9])

    def kill(self) -> None:
        self.server.kill()

    def kill_keeper(self) -> int | None:
        return kill_keeper(self.instance)

    def keeper(self) -> int | None:
        return find_keeper(self.instance)

    def end(self) -> None:
        """End everything that this server started."""
        if self.server.running:
            self.server.stop()
        self.kill_keeper()
        self.http.close()
        self.server.client.close()
