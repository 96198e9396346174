"""What a rig is made of: its setup, vLLM's configuration, and our spec over its own driver."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fake_model import VOCABULARY
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    OffloadingManager,
    OffloadingWorker,
    TransferResult,
)

from emberkv.core.audit import AuditedStack
from emberkv.engines.vllm.build import build_manager
from emberkv.engines.vllm.spec import EmberOffloadingSpec
from emberkv.live.arena import Arena, ArenaGeometry
from emberkv.testing.driver import InlineDriver
from emberkv.tiers.base import SlotStorage

STEP_S = 0.001
"""What a step takes on the rig's clock, apart from computing."""

COMPUTE_S = 0.0005
"""What computing takes per token: so much that loading is always worth it."""

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
PARTS: dict[str, Parts] = {}


class RigSpec(EmberOffloadingSpec):
    """Our spec over the driver of its rig, with a stack that audits each call."""

    def open_driver(self) -> InlineDriver:
        driver = PARTS[self.config.engine_id].driver
        assert driver.arena.geometry == self.geometry
        return driver

    def open_arena(self, rank: int) -> tuple[Arena, Callable[[], None]]:
        return PARTS[self.config.engine_id].driver.arena, lambda: None

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        inner = super().get_worker(kv_caches)
        late_by = PARTS[self.config.engine_id].late_by
        return LateWorker(inner, late_by) if late_by else inner

    def get_manager(self) -> OffloadingManager:
        return build_manager(
            self.open_driver(),
            self.settings,
            tokens_per_chunk=self.tokens_per_chunk,
            clock=PARTS[self.config.engine_id].clock,
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
    "spec": ("RigSpec", "rig_parts"),
    "connector": ("RigSpec", "rig_parts"),
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
        **({} if setup.entry == "native" else {"max_slowdown": 10.0}),
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
