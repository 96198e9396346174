"""Real vLLM servers to compare: plain, with emberkv, with vLLM's own tiers; asked by token ids."""

from __future__ import annotations

import json
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from demo.measures import Page, Sources, device_bytes_read, engine_sources
from demo.server import Server, find_keeper, free_port, kill_keeper
from emberkv.live.control.client import ControlClient
from emberkv.live.control.messages import Done, GateName, SetGate

BLOCK_TOKENS = 32
SMALL_PROMPT = range(1000, 1016)
"""Less than a block: no cache keeps it."""

SPIN_S = 1.5
"""vLLM's processes look for more work for a second after the last step, each on a core of its own:
a server asked before another has stopped looking shares its cores with it."""

DEADLINE_S = 120.0
MODEL_NAME = "benchmark"
SHARED_MEMORY = Path("/dev/shm")
BENCHMARKS = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class EngineSizes:
    """How large the caches of a server are, and the longest prompt."""

    device_blocks: int
    max_tokens: int
    ram_mib: int = 256
    disk_mib: int = 3072


@dataclass(frozen=True)
class Asked:
    """One request: time to first token, whole time, and where its prompt came from."""

    first_token_s: float
    total_s: float
    sources: Sources


class Engine:
    """A server on a port of its own, one request at a time."""

    def __init__(self, name: str, command: list[str], port: int, directory: Path) -> None:
        self.name = name
        self.server = Server(command, port, directory / f"{name}.log")
        self._http = httpx.Client(
            base_url=self.server.url, timeout=httpx.Timeout(300.0), trust_env=False
        )

    def start(self) -> None:
        """Start, and have it compute something once."""
        took_s = self.server.start(lambda: None)
        print(f"  {self.name} is up after {took_s:.0f} s", flush=True)
        self.ask(list(range(1000, 1200)))

    def ask(self, prompt: Sequence[int], *, output_tokens: int = 1) -> Asked:
        """Greedy, streamed. Ends the benchmark if the server does not answer."""
        before = self.page()
        body = {
            "model": MODEL_NAME,
            "prompt": list(prompt),
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        first_token_s = 0.0
        began_s = time.perf_counter()
        with self._http.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                if not first_token_s and line.startswith("data: {"):
                    first_token_s = time.perf_counter() - began_s
                    if "error" in json.loads(line.removeprefix("data: ")):
                        raise SystemExit(f"{self.name}: {line}")
        total_s = time.perf_counter() - began_s
        after = self.wait_until(lambda page: page.finished_requests > before.finished_requests)
        return Asked(first_token_s, total_s, engine_sources(before, after, len(prompt)))

    def page(self) -> Page:
        """The metrics as they stand."""
        return Page(self._http.get("/metrics").raise_for_status().text)

    def wait_until(self, condition: Callable[[Page], bool]) -> Page:
        """Read the metrics until they say so."""
        deadline_s = time.monotonic() + DEADLINE_S
        while not condition(page := self.page()):
            if time.monotonic() > deadline_s:
                raise SystemExit(f"{self.name} did not get where it should\n{self.server.tail()}")
            time.sleep(0.05)
        return page

    def reset_device(self) -> None:
        """Empty the device cache, and no tier."""
        self._http.post("/reset_prefix_cache").raise_for_status()

    def close(self) -> None:
        """End it cleanly."""
        self.server.stop()
        self._http.close()


class EmberEngine(Engine):
    """A server through `emberkv serve`."""

    def __init__(self, model: Path, directory: Path, sizes: EngineSizes) -> None:
        self._instance = f"benchmark-{uuid.uuid4().hex[:8]}"
        self._request_log = directory / "requests.jsonl"
        disk = directory / "slab"
        disk.mkdir(exist_ok=True)
        port = free_port()
        command = [
            *(str(Path(sys.executable).with_name("emberkv")), "serve", str(model)),
            *("--ram", f"{sizes.ram_mib}MiB", "--disk", str(disk)),
            *("--disk-size", f"{sizes.disk_mib}MiB", "--instance", self._instance),
            *("--request-log", str(self._request_log), "--", *flags(port, sizes)),
        ]
        super().__init__("emberkv", command, port, directory)

    def settle(self) -> None:
        """Wait until nothing is on its way to disk; small requests make the engine look."""
        deadline_s = time.monotonic() + DEADLINE_S
        while self.page().chunks_under_way("disk"):
            if time.monotonic() > deadline_s:
                raise SystemExit("write-behinds don't end")
            self.ask(SMALL_PROMPT)

    def shut(self, *, off: bool) -> None:
        """Shut all tiers, or open them again: off, the server is as if emberkv were not there."""
        with ControlClient(self._instance) as client:
            gate = GateName.OFF if off else GateName.ON
            client.ask(SetGate("ram", gate), Done)

    def last_times(self) -> tuple[float, float]:
        """How long the last request waited for its promotion, and for its load, in seconds."""
        facts = json.loads(self._request_log.read_text().splitlines()[-1])
        return facts["wait_s"], facts["load_s"]

    def device_bytes_read(self) -> int:
        """Bytes that the keeper has read from the disk: not from the page cache."""
        keeper = find_keeper(self._instance)
        return 0 if keeper is None else device_bytes_read(keeper)

    def close(self) -> None:
        super().close()
        kill_keeper(self._instance)


def plain_engine(model: Path, directory: Path, sizes: EngineSizes) -> Engine:
    """VLLM by itself."""
    port = free_port()
    return Engine("plain", [*api_server(model), *flags(port, sizes)], port, directory)


class NativeEngine(Engine):
    """A server with vLLM's own tiering manager and file tier; see `support.native_tier`."""

    def __init__(self, model: Path, directory: Path, sizes: EngineSizes) -> None:
        self._engine_id = f"benchmark-{uuid.uuid4().hex[:8]}"
        files = directory / "files"
        files.mkdir(exist_ok=True)
        transfer = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "engine_id": self._engine_id,
            "kv_connector_extra_config": {
                "spec_name": "NativeTierOnCpu",
                "spec_module_path": "support.native_tier",
                "cpu_bytes_to_use": sizes.ram_mib << 20,
                "block_size": BLOCK_TOKENS,
                "offload_prompt_only": False,
                "secondary_tiers": [{"type": "fs", "root_dir": str(files)}],
            },
        }
        port = free_port()
        words = ["--kv-transfer-config", json.dumps(transfer)]
        command = [*api_server(model), *flags(port, sizes), *words]
        super().__init__("native", command, port, directory)

    def close(self) -> None:
        super().close()
        for left in SHARED_MEMORY.glob(f"vllm_offload_{self._engine_id}*.mmap"):
            left.unlink()


def api_server(model: Path) -> list[str]:
    """The command of vLLM's server, whichever distribution carries it."""
    module = "vllm.entrypoints.openai.api_server"
    return [sys.executable, "-W", "ignore", "-m", module, "--model", str(model)]


def flags(port: int, sizes: EngineSizes) -> list[str]:
    """What all servers are told alike."""
    return [
        *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", MODEL_NAME),
        *("--dtype", "float32", "--block-size", str(BLOCK_TOKENS), "--enforce-eager"),
        *("--num-gpu-blocks-override", str(sizes.device_blocks)),
        *("--max-model-len", str(sizes.max_tokens), "--max-num-seqs", "4"),
    ]


@contextmanager
def running(*engines: Engine) -> Iterator[None]:
    """Start servers, one after the other, and end them all."""
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"  # for reset_device
    paths = [str(BENCHMARKS), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    try:
        for engine in engines:
            engine.start()
        yield
    finally:
        for engine in engines:
            engine.close()


def require(engine: Engine, asked: Asked, wanted: Sources, what: str) -> None:
    """End the benchmark if a prompt did not come from where the sample says."""
    if asked.sources != wanted:
        raise SystemExit(f"{engine.name}, {what}: {asked.sources} instead of {wanted}")
