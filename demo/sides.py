"""The two sides of the demo: vLLM by itself, and vLLM with its KV cache in tiers."""

from __future__ import annotations

import importlib.metadata
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from demo.client import MODEL_NAME, Answer
from demo.measures import (
    Page,
    Sources,
    device_bytes_read,
    ember_sources,
    engine_sources,
    logged_sources,
)
from demo.screen import Screen
from demo.script import DEVICE_BLOCKS, MAX_MODEL_TOKENS, Before
from demo.server import Server, find_keeper, free_port, kill_keeper
from demo.verdicts import BLOCK_TOKENS, Phase, Source

RAM_SIZE: Final = "512MiB"
DISK_SIZE: Final = "1GiB"
KEEP_S: Final = 300
TIER_DIRECTORY: Final = "tier"
CHUNK_BYTES: Final = 30 * 3 * 64 * 2 * BLOCK_TOKENS * 4
"""SmolLM2-135M in float32: 30 layers, 3 heads of 64, key and value, 32 tokens, 4 bytes."""
MOST_WASTE: Final = 0.05
"""Of what is brought up from disk, so much may go unused."""

SETTLE_S: Final = 20.0
_POLL_S: Final = 0.05
_WARM_UP: Final = "The quick brown fox"


def engine_flags(port: int) -> list[str]:
    """The flags of `vllm serve` that both sides share: a device cache too small for the work."""
    return [
        *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", MODEL_NAME),
        *("--dtype", "float32", "--block-size", str(BLOCK_TOKENS), "--enforce-eager"),
        *("--num-gpu-blocks-override", str(DEVICE_BLOCKS)),
        *("--max-model-len", str(MAX_MODEL_TOKENS)),
    ]


def program(name: str) -> str:
    """A command of this environment."""
    return str(Path(sys.executable).with_name(name))


def plain_serve(model: Path) -> list[str]:
    """`vllm serve`. The CPU build's own `vllm` command looks for a distribution of that name."""
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        module = "vllm.entrypoints.openai.api_server"
        return [sys.executable, "-W", "ignore", "-m", module, "--model", str(model)]
    return [program("vllm"), "serve", str(model)]


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer, and what each witness says of where its prompt's tokens came from."""

    answer: Answer
    engine: Sources
    ember: Sources
    logged: Sources | None


class PlainSide:
    """vLLM without emberkv: the baseline."""

    name = "without emberkv"

    def __init__(self, model: Path, scratch: Path, screen: Screen) -> None:
        self._screen = screen
        port = free_port()
        self.server = Server(self._command(model, scratch, port), port, scratch / self._log_name)

    _log_name = "vllm.log"

    def _command(self, model: Path, scratch: Path, port: int) -> list[str]:
        return [*plain_serve(model), *engine_flags(port)]

    def begin(self, before: Before, phase: Phase) -> None:
        """Bring the server into the state that a visit starts from."""
        if before is not Before.NOTHING:
            pids = self.server.kill()
            self._screen.say(f"SIGKILL to {len(pids)} processes of the server")
        self.start()

    def start(self) -> None:
        """Start the server if it is not running, and have it answer once."""
        if self.server.running:
            return
        with self._screen.working(f"starting the server {self.name}") as working:
            took_s = self.server.start(working.tick)
        self.server.client.complete(_WARM_UP, "warm-up", max_tokens=1)
        self._screen.say(f"server {self.name} up after {took_s:.0f} s")

    def ask(self, prompt: str, request_id: str) -> Answer:
        """One request."""
        return self.server.client.complete(prompt, request_id)

    def end(self, phase: Phase) -> None:
        """Check what can only be checked once a visit is over."""

    def close(self) -> None:
        """End every process of this side."""
        self.server.kill()


class EmberSide(PlainSide):
    """vLLM through `emberkv serve`, with a RAM tier and a disk tier."""

    name = "with emberkv"
    _log_name = "emberkv.log"

    def __init__(self, model: Path, scratch: Path, screen: Screen, instance: str) -> None:
        self._instance = instance
        self._request_log = scratch / "requests.jsonl"
        self._keeper: int | None = None
        self._read_bytes = 0
        (scratch / TIER_DIRECTORY).mkdir(mode=0o700)
        super().__init__(model, scratch, screen)

    def _command(self, model: Path, scratch: Path, port: int) -> list[str]:
        return [
            *(program("emberkv"), "serve", str(model), "--ram", RAM_SIZE),
            *("--disk", str(scratch / TIER_DIRECTORY), "--disk-size", DISK_SIZE),
            *("--keep", str(KEEP_S), "--instance", self._instance),
            *("--request-log", str(self._request_log)),
            *("--", *engine_flags(port)),
        ]

    def begin(self, before: Before, phase: Phase) -> None:
        if before is Before.KILL:
            self._kill_server(phase)
        elif before is Before.KILL_RAM_TOO:
            self._kill_server_and_ram(phase)
        else:
            self.start()
            self._keeper = find_keeper(self._instance)
        phase.require(self._keeper is not None, "no keeper is running")
        self._read_bytes = self._keeper_read()
        self._began = self._page()

    def _kill_server(self, phase: Phase) -> None:
        """The keeper lives on with its memory, and the next server has to find it."""
        held = self._page().chunks("ram")
        self._screen.say(f"SIGKILL to {len(self.server.kill())} processes of the server")
        self.start()
        keeper = find_keeper(self._instance)
        phase.require(keeper == self._keeper, "the keeper did not outlive the server")
        found = self._wait(lambda page: page.chunks("ram") >= held, "taken over").chunks("ram")
        phase.require(0 < held <= found, f"{found} of {held} chunks were taken over in RAM")
        self._screen.say(f"keeper {keeper} still there, {found} chunks taken over in RAM")

    def _kill_server_and_ram(self, phase: Phase) -> None:
        """Only the disk has anything left; the next server starts with an empty arena."""
        page = self._wait(_all_written, "written behind to disk")
        phase.require(_all_written(page), "not everything had been written behind to disk")
        held = page.chunks("disk")
        self._screen.say(f"SIGKILL to {len(self.server.kill())} processes of the server")
        killed = kill_keeper(self._instance)
        phase.require(killed is not None, "there was no keeper to kill")
        self._screen.say(f"SIGKILL to keeper {killed}: the RAM tier is gone")
        self.start()
        self._keeper = find_keeper(self._instance)
        # Gauges are 0 until the tiers have said what they hold: the disk's must be there first.
        page = self._wait(lambda page: page.chunks("disk") >= held, "found on disk")
        in_ram, on_disk = page.chunks("ram"), page.chunks("disk")
        phase.require(0 < held <= on_disk, f"{on_disk} of {held} chunks were found on disk")
        phase.require(in_ram == 0, f"the RAM tier had {in_ram} chunks at the start")
        self._screen.say(f"keeper {self._keeper} is new: RAM {in_ram} chunks, disk {on_disk}")

    def ask_witnessed(self, prompt: str, request_id: str) -> Reply:
        """One request, with the counters read before and after it."""
        before = self._page()
        answer = self.ask(prompt, request_id)
        after, logged = self._settled(before, request_id)
        engine = engine_sources(before, after, answer.prompt_tokens)
        return Reply(answer, engine, ember_sources(before, after), logged)

    def end(self, phase: Phase) -> None:
        """A phase is from disk only if the keeper really read that many bytes from the device."""
        self._note_waste(phase)
        read_bytes = self._keeper_read() - self._read_bytes
        wanted = phase.sources.disk // BLOCK_TOKENS * CHUNK_BYTES
        if phase.source is Source.DISK:
            self._screen.say(
                f"the keeper read {read_bytes / 1e6:,.0f} MB from the device "
                f"for {wanted / 1e6:,.0f} MB of chunks"
            )
            phase.require(read_bytes >= wanted, "the bytes did not come from the device")

    def _note_waste(self, phase: Phase) -> None:
        """What was brought up from disk in vain was paid for by someone else's wait."""
        page = self._page()
        promoted = page.promoted_chunks() - self._began.promoted_chunks()
        phase.promoted_tokens = promoted * BLOCK_TOKENS
        phase.promoted_and_used_tokens = ember_sources(self._began, page).disk
        most = phase.promoted_and_used_tokens * (1 + MOST_WASTE) + BLOCK_TOKENS
        phase.require(
            phase.promoted_tokens <= most,
            f"{phase.promoted_tokens} tokens were brought up from disk, and "
            f"{phase.promoted_and_used_tokens} of them used",
        )

    def close(self) -> None:
        super().close()
        kill_keeper(self._instance)

    def _keeper_read(self) -> int:
        return device_bytes_read(self._keeper) if self._keeper is not None else 0

    def _page(self) -> Page:
        return Page(self.server.client.metrics())

    def _wait(self, done: Callable[[Page], bool], what: str) -> Page:
        """The first reading that says something, or the last one in time.

        An engine reports when it takes a step: short requests make it take some.
        """
        deadline_s = time.monotonic() + SETTLE_S
        with self._screen.working(f"waiting until everything is {what}") as working:
            while True:
                page = self._page()
                if done(page) or time.monotonic() > deadline_s:
                    return page
                working.tick()
                self.server.client.complete(_WARM_UP, "still-there", max_tokens=1)

    def _settled(self, before: Page, request_id: str) -> tuple[Page, Sources | None]:
        """The first reading that has counted a request on every side, or the last one in time."""
        deadline_s = time.monotonic() + SETTLE_S
        while True:
            page = self._page()
            logged = logged_sources(self._request_log, request_id)
            counted = page.finished_requests > before.finished_requests
            if counted and logged and any(_tokens(ember_sources(before, page))):
                return page, logged
            if time.monotonic() > deadline_s:
                return page, logged
            time.sleep(_POLL_S)


def _all_written(page: Page) -> bool:
    return page.chunks("disk") >= page.chunks("ram") > 0 and not page.chunks_under_way("disk")


def _tokens(sources: Sources) -> tuple[int, ...]:
    return sources.device, sources.ram, sources.disk, sources.computed
