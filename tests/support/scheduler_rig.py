"""vLLM's real scheduler and real offloading connector, on both sides, over a fake model.

    Rig ── add, step, abort, reset ──► Scheduler (vLLM) ── SchedulerOutput ──► FakeWorker
                                          │  connector, scheduler side            │  connector,
                                          ▼                                       ▼  worker side
                                       our manager ── driver ── arena rows ◄── device tensors

Nothing of vLLM or of ours is replaced; only the model computes nothing (see `fake_model`). Before
every forward pass the worker compares all KV that the request builds on with what it must be.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fake_model import DeviceMemory, kv_cache_config
from fake_worker import FakeWorker
from rig_parts import BLOCK_TOKENS, COMPUTE_S, PARTS, STEP_S, Parts, RigClock, Setup, configure
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from emberkv.core.counts import Event
from emberkv.live.manager import TierManager
from emberkv.testing.driver import InlineDriver


class Rig:
    """One engine. `step` is one turn of its loop; a test drives it as vLLM's engine core does."""

    def __init__(self, setup: Setup, model_dir: Path) -> None:
        self.setup = setup
        self.engine_id = f"rig-{uuid.uuid4()}"
        self.clock = RigClock()
        below = () if setup.storage is None else (setup.storage,)
        self.driver: InlineDriver | None = None
        ram_bytes = setup.ram_chunks * 4096 * -(-setup.chunk_bytes // 4096)
        if setup.entry != "native":
            self.driver = InlineDriver(setup.geometry, below)
            PARTS[self.engine_id] = Parts(self.driver, self.clock, setup.late_by)
            ram_bytes = setup.geometry.total_bytes
        config = configure(setup, model_dir, self.engine_id, ram_bytes)
        self._hash = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        kv_config = kv_cache_config(setup.device_blocks, BLOCK_TOKENS)
        with set_current_vllm_config(config):
            worker_side = KVConnectorFactory.create_connector(
                config, KVConnectorRole.WORKER, kv_config
            )
            self.worker = FakeWorker(worker_side, DeviceMemory(setup.device_blocks, BLOCK_TOKENS))
            self.scheduler = config.scheduler_config.get_scheduler_cls()(
                vllm_config=config,
                kv_cache_config=kv_config,
                structured_output_manager=StructuredOutputManager(config),
                block_size=BLOCK_TOKENS,
                hash_block_size=BLOCK_TOKENS,
                log_stats=True,
            )
        self._take_images()
        init_none_hash(self._hash)
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, self._hash)
        self._in_flight: deque[SchedulerOutput] = deque()
        self.requests: dict[str, Request] = {}
        self.prefill: dict[str, Any] = {}
        self.outputs: dict[str, list[int]] = {}
        self.finished: dict[str, str] = {}
        self.counters: Counter[tuple[str, tuple[str, ...]]] = Counter()
        self.amounts: list[float] = []
        self.during: Callable[[], None] | None = None
        self.steps = 0

    def _take_images(self) -> None:
        """Room for images, which a text model's scheduler has none of."""
        self.scheduler.max_num_encoder_input_tokens = 4096
        self.scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=4096)

    # ── requests ─────────────────────────────────────────────────────────────────────────────

    def add(
        self,
        name: str,
        prompt: Sequence[int],
        max_tokens: int = 1,
        *,
        salt: str | None = None,
        adapter: str | None = None,
        image: str | None = None,
        transfer: dict[str, Any] | None = None,
    ) -> Request:
        """A request arrives. `image` stands at the prompt's first eight tokens.

        `transfer` are the request's own `kv_transfer_params`.
        """
        features = []
        if image is not None:
            place = PlaceholderRange(offset=0, length=8)
            features = [MultiModalFeatureSpec(None, "image", image, place)]
        more = {"salt": salt, "kv_transfer_params": transfer}
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=more)
        request = Request(
            request_id=name,
            prompt_token_ids=list(prompt),
            sampling_params=params,
            pooling_params=None,
            mm_features=features,
            lora_request=LoRARequest(adapter, 1 + len(adapter), "/adapter") if adapter else None,
            cache_salt=salt,
            block_hasher=self._hasher,
        )
        self.requests[name] = request
        self.prefill[name] = request.prefill_stats
        self.outputs[name] = []
        self.scheduler.add_request(request)
        return request

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        self.finished[name] = "abort"

    def status(self, name: str) -> RequestStatus:
        return self.requests[name].status

    def external_tokens(self, name: str) -> int:
        """Prompt tokens that the tiers gave a request at its first admission."""
        return int(self.prefill[name].num_external_cached_tokens)

    def expected(self, name: str) -> list[int]:
        """What the model answers to a request's prompt, by definition."""
        request = self.requests[name]
        text = self.worker.text_of(request)
        text.kv_until(len(request.prompt_token_ids) + request.max_tokens)
        start = len(request.prompt_token_ids)
        return text.tokens[start : start + request.max_tokens]

    # ── the engine's loop ────────────────────────────────────────────────────────────────────

    @property
    def busy(self) -> bool:
        return bool(self._in_flight) or self.scheduler.has_requests()

    def step(self) -> None:
        """Schedule, execute, take the output; with async scheduling the output of the step before.

        A step is executed as late as the engine may: after the next one has been scheduled.
        """
        self.steps += 1
        self.clock.now_s += STEP_S
        depth = 2 if self.setup.async_scheduling else 1
        if self.scheduler.has_requests():
            self._in_flight.append(self.scheduler.schedule())
            if len(self._in_flight) < depth and self.scheduler.has_requests():
                return
        if self._in_flight:
            self._finish_step()

    def _finish_step(self) -> None:
        """Let the worker carry out the first step in flight, and take its output."""
        scheduled = self._in_flight.popleft()
        executed = self.worker.execute(scheduled)
        self.clock.now_s += COMPUTE_S * max(scheduled.num_scheduled_tokens.values(), default=0)
        if self.during is not None:  # what reaches the engine while the model runs
            self.during()
        taken = self.scheduler.update_from_output(scheduled, executed)
        for outputs in taken.values():
            if outputs.scheduler_stats and outputs.scheduler_stats.kv_connector_stats:
                self._count(outputs.scheduler_stats.kv_connector_stats)
            for each in outputs.outputs:
                self.outputs[each.request_id] += each.new_token_ids
                if each.finish_reason is not None:
                    self.finished.setdefault(each.request_id, str(each.finish_reason))

    def finish_steps(self) -> None:
        """Take the output of every step in flight and schedule none, as the engine's pause does."""
        while self._in_flight:
            self._finish_step()

    def _count(self, stats: dict[str, Any]) -> None:
        """Add up the connector's counters, as vLLM's front end does."""
        for name, kind in stats["types"].items():
            if kind == "counter":
                for labels, amount in stats["data"][name].items():
                    self.amounts.append(amount)
                    self.counters[name, tuple(labels)] += amount

    def chunks(self, tier: str, event: Event) -> int:
        """How many chunks the metrics say something happened to."""
        return int(self.counters["emberkv:chunks", (tier, event.value)])

    def run(self, max_steps: int = 400) -> None:
        """Step until nothing is left to do; fails if that takes too many steps."""
        self.run_until(lambda: not self.busy, max_steps)

    def run_until(self, done: Callable[[], bool], max_steps: int = 400) -> None:
        """Step until `done`; fails if that takes too many steps."""
        for _ in range(max_steps):
            if done():
                return
            self.step()
        waiting = {n: r.status.name for n, r in self.requests.items() if n not in self.finished}
        raise AssertionError(f"not done after {max_steps} steps: {waiting}")

    def serve(self, name: str, prompt: Sequence[int], max_tokens: int = 1, **extra: Any) -> int:
        """One request from arrival to end; returns the tokens that the tiers gave it."""
        self.add(name, prompt, max_tokens, **extra)
        self.run()
        assert self.outputs[name] == self.expected(name)
        return self.external_tokens(name)

    def tick(self) -> None:
        """A request too short to be kept: the manager takes note of what the driver has done."""
        self.serve(f"tick-{self.steps}", [1, 2, 3])

    def forget_device(self) -> None:
        """Drop the device's prefix cache, and nothing else."""
        assert self.scheduler.reset_prefix_cache()

    def new_weights(self, *, preempt: bool = True) -> bool:
        """Let the worker finish, drop every cache, load new weights: as the engine does."""
        self.finish_steps()
        done = self.scheduler.reset_prefix_cache(
            reset_running_requests=preempt, reset_connector=True
        )
        self.worker.weights += 1
        return bool(done)

    @property
    def manager(self) -> Any:
        """The offloading manager, ours or native."""
        return self.scheduler.connector.connector_scheduler.manager

    @property
    def tiers(self) -> TierManager:
        tiers: TierManager = self.manager.tiers
        return tiers

    def close(self) -> None:
        self.scheduler.shutdown()
        self.worker.connector.shutdown()
        PARTS.pop(self.engine_id, None)


class RequestLines(logging.Handler):
    """Collects the request log: one dictionary per ended request, by request id."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.of: dict[str, dict[str, Any]] = {}

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Collect for the time of a block."""
        log = logging.getLogger("emberkv.requests")
        level = log.level
        log.setLevel(logging.INFO)
        log.addHandler(self)
        try:
            yield
        finally:
            log.removeHandler(self)
            log.setLevel(level)

    def emit(self, record: logging.LogRecord) -> None:
        line = json.loads(record.getMessage())
        self.of[line["request"]] = line
