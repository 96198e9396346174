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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fake_model import VOCABULARY, DeviceMemory, Text, kv_cache_config, mix, next_token
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    OffloadingManager,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from emberkv.core.audit import AuditedStack
from emberkv.core.counts import Event
from emberkv.engines.vllm.build import build_manager
from emberkv.engines.vllm.spec import EmberOffloadingSpec
from emberkv.live.arena import Arena, ArenaGeometry
from emberkv.live.manager import TierManager
from emberkv.testing.driver import InlineDriver
from emberkv.tiers.base import SlotStorage

STEP_S = 0.001
"""What a step takes on the rig's clock."""

BLOCK_TOKENS = 32
BLOCK_BYTES = BLOCK_TOKENS * 2 * 8

MODEL_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "float32",
}


@dataclass(frozen=True)
class Setup:
    """What a test varies. Sizes in blocks and chunks; `entry` is spec, connector or native.

    `late_by` is by how many steps copies between device and RAM come late, as a GPU's may.
    """

    entry: str = "spec"
    async_scheduling: bool = False
    device_blocks: int = 64
    blocks_per_chunk: int = 1
    ram_chunks: int = 64
    storage: SlotStorage | None = None
    max_batched_tokens: int = 4096
    max_running: int = 32
    prefix_caching: bool = True
    extra: dict[str, Any] = field(default_factory=dict)
    late_by: int = 0

    @property
    def chunk_bytes(self) -> int:
        return BLOCK_BYTES * self.blocks_per_chunk

    @property
    def geometry(self) -> ArenaGeometry:
        return ArenaGeometry(self.ram_chunks, self.chunk_bytes)


class RigClock:
    """Seconds that pass only when the rig steps."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Parts:
    """What the spec of one rig finds in place of the process-wide driver and clock."""

    driver: InlineDriver
    clock: RigClock
    late_by: int


class LateWorker(OffloadingWorker):
    """Copies as `inner` does, but only when its results have been asked for a few times more.

    Stores keep their order, and so do loads; `wait` ends what it names and what was before it.
    """

    def __init__(self, inner: OffloadingWorker, late_by: int) -> None:
        self._inner = inner
        self._late_by = late_by
        self._asked = 0
        self._queues: tuple[deque[_Job], deque[_Job]] = (deque(), deque())

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self._queues[0].append((self._asked, job_id, self._inner.submit_store, src_spec, dst_spec))
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self._queues[1].append((self._asked, job_id, self._inner.submit_load, src_spec, dst_spec))
        return True

    def get_finished(self) -> list[TransferResult]:
        self._asked += 1
        for queue in self._queues:
            while queue and queue[0][0] + self._late_by < self._asked:
                self._copy_first(queue)
        return self._inner.get_finished()

    def wait(self, job_ids: set[int]) -> None:
        for queue in self._queues:
            while any(job[1] in job_ids for job in queue):
                self._copy_first(queue)

    @staticmethod
    def _copy_first(queue: deque[_Job]) -> None:
        _, job_id, submit, source, target = queue.popleft()
        assert submit(job_id, source, target)


_Job = tuple[int, int, Callable[..., bool], Any, Any]
_PARTS: dict[str, Parts] = {}


class RigSpec(EmberOffloadingSpec):
    """Our spec over the driver of its rig, with a stack that audits each call."""

    def open_driver(self) -> InlineDriver:
        driver = _PARTS[self.config.engine_id].driver
        assert driver.arena.geometry == self.geometry
        return driver

    def open_arena(self, rank: int) -> tuple[Arena, Callable[[], None]]:
        return _PARTS[self.config.engine_id].driver.arena, lambda: None

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        inner = super().get_worker(kv_caches)
        late_by = _PARTS[self.config.engine_id].late_by
        return LateWorker(inner, late_by) if late_by else inner

    def get_manager(self) -> OffloadingManager:
        return build_manager(
            self.open_driver(),
            self.settings,
            tokens_per_chunk=self.tokens_per_chunk,
            clock=_PARTS[self.config.engine_id].clock,
            make_stack=AuditedStack,
        )


_ENTRIES = {
    "spec": {"kv_connector": "OffloadingConnector"},
    "connector": {
        "kv_connector": "EmberConnector",
        "kv_connector_module_path": "emberkv.engines.vllm.connector",
    },
    "native": {"kv_connector": "OffloadingConnector"},
}
_SPECS = {
    "spec": ("RigSpec", "scheduler_rig"),
    "connector": ("RigSpec", "scheduler_rig"),
    "native": ("NativeTierOnCpu", "native_tier"),
}


def configure(setup: Setup, model_dir: Path, engine_id: str, ram_bytes: int) -> VllmConfig:
    """The engine's own configuration of a server with this setup."""
    name, module = _SPECS[setup.entry]
    extra = {
        "spec_name": name,
        "spec_module_path": module,
        "cpu_bytes_to_use": ram_bytes,
        "blocks_per_chunk": setup.blocks_per_chunk,
        **setup.extra,
    }
    (model_dir / "config.json").write_text(json.dumps(MODEL_CONFIG))
    config = EngineArgs(
        model=str(model_dir),
        skip_tokenizer_init=True,
        dtype="float32",
        block_size=BLOCK_TOKENS,
        enforce_eager=True,
        enable_prefix_caching=setup.prefix_caching,
        max_num_batched_tokens=setup.max_batched_tokens,
        max_num_seqs=setup.max_running,
        max_model_len=16384,
        kv_transfer_config={
            "kv_role": "kv_both",
            "engine_id": engine_id,
            "kv_connector_extra_config": extra,
            **_ENTRIES[setup.entry],
        },
    ).create_engine_config()
    config.scheduler_config.async_scheduling = setup.async_scheduling  # the CPU platform forbids it
    config.cache_config.num_gpu_blocks = setup.device_blocks
    config.cache_config.kv_cache_layout = "LBHNC"
    return config


class _Running:
    """What the worker knows of one request."""

    def __init__(self, text: Text, blocks: list[int]) -> None:
        self.text = text
        self.blocks = blocks
        self.known_tokens = len(text.tokens)


class FakeWorker:
    """The worker side of an engine, in the order of vLLM's own model runner."""

    def __init__(self, connector: Any, memory: DeviceMemory) -> None:
        self.connector = connector
        self.memory = memory
        self.weights = 1
        self._running: dict[str, _Running] = {}
        connector.register_kv_caches(memory.kv_caches)

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Carry out one scheduled step."""
        metadata = output.kv_connector_metadata
        self.connector.handle_preemptions(metadata)
        self._update(output)
        self.connector.bind_connector_metadata(metadata)
        assert not output.has_sync_kv_loads
        names = list(output.num_scheduled_tokens)
        first = self._first_positions(output)
        sampled = [
            self._forward(name, first[name], output.num_scheduled_tokens[name]) for name in names
        ]
        self.connector.start_load_kv(None)
        self.connector.wait_for_save()
        result = self.connector.get_transfer_results(output.finished_req_ids)
        transfers = KVConnectorOutput(
            finished_sending=result.finished_sending,
            finished_recving=result.finished_recving,
            kv_connector_stats=self.connector.get_kv_connector_stats(),
            kv_connector_worker_meta=self.connector.build_connector_worker_meta(),
        )
        self.connector.clear_connector_metadata()
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: at for at, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=transfers,
        )

    def _update(self, output: SchedulerOutput) -> None:
        for name in output.finished_req_ids:
            self._running.pop(name, None)
        for new in output.scheduled_new_reqs:
            text = self.text_of(new)
            self._running[new.req_id] = _Running(text, list(new.block_ids[0]))
        cached = output.scheduled_cached_reqs
        for at, name in enumerate(cached.req_ids):
            running = self._running[name]
            if name in cached.all_token_ids:
                tokens = list(cached.all_token_ids[name])
                old = running.text
                running.text = Text(
                    tokens, self._seeded(old.seed_parts), old.seed_parts, old.images
                )
                running.known_tokens = len(tokens)
            blocks = cached.new_block_ids[at]
            if name in cached.resumed_req_ids:
                assert blocks is not None
                running.blocks = list(blocks[0])
            elif blocks is not None:
                running.blocks += blocks[0]

    def text_of(self, request: Any) -> Text:
        """A request's prompt, with everything that its KV depends on."""
        adapter = "" if request.lora_request is None else request.lora_request.lora_name
        arguments = request.sampling_params.extra_args or {}
        parts = (adapter, arguments.get("salt") or "")
        images = {
            position: hash(image.identifier) & 0xFFFF_FFFF
            for image in request.mm_features
            for position in range(
                image.mm_position.offset, image.mm_position.offset + image.mm_position.length
            )
        }
        return Text(list(request.prompt_token_ids), self._seeded(parts), parts, images)

    def _seeded(self, parts: tuple[str, ...]) -> int:
        seed = self.weights
        for byte in "\0".join(parts).encode():
            seed = mix(seed, byte)
        return seed

    @staticmethod
    def _first_positions(output: SchedulerOutput) -> dict[str, int]:
        first = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        first.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        return first

    def _forward(self, name: str, first: int, count: int) -> list[int]:
        """Check what is built on, compute `count` more positions, and sample if all is read."""
        running = self._running[name]
        end = first + count
        right = running.text.kv_until(end)
        if first:
            found = self.memory.read(running.blocks, 0, first)
            wrong = (found != [right[:first]]).any(axis=0).nonzero()[0]
            assert not len(wrong), (
                f"{name}: KV of {len(wrong)} of {first} positions is wrong, first {wrong[0]}"
            )
            assert int(found[0][-1]) == right[first - 1]
        self.memory.write(running.blocks, first, right[first:end])
        if end < running.known_tokens:
            return []
        running.known_tokens = end + 1
        return [next_token(right[end - 1])]


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
            _PARTS[self.engine_id] = Parts(self.driver, self.clock, setup.late_by)
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
    ) -> Request:
        """A request arrives. `image` stands at the prompt's first eight tokens."""
        features = []
        if image is not None:
            place = PlaceholderRange(offset=0, length=8)
            features = [MultiModalFeatureSpec(None, "image", image, place)]
        params = SamplingParams(
            max_tokens=max_tokens, ignore_eos=True, extra_args={"salt": salt} if salt else None
        )
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
        _PARTS.pop(self.engine_id, None)


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
