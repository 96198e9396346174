"""The namespace of a vLLM engine: whatever changes KV bytes changes it, on both sides alike."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.kv_offload.config import OffloadingConfig

from emberkv.engines.vllm.identity import Identity, current_identity, identify
from emberkv.testing.model_files import LLAMA, write_model

pytestmark = pytest.mark.engine

LAYOUT = "LBHNC"


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def configure(model_dir: Path, **arguments: object) -> VllmConfig:
    """The engine's own configuration of a server of this model, its KV layout resolved."""
    transfer = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": arguments.pop("extra", {"cpu_bytes_to_use": 1 << 20}),
    }
    given = {
        "model": str(model_dir),
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "block_size": 32,
        "enforce_eager": True,
        "kv_transfer_config": transfer,
    } | arguments
    config = EngineArgs(**given).create_engine_config()
    config.cache_config.kv_cache_layout = LAYOUT
    return config


def offloading(config: VllmConfig) -> OffloadingConfig:
    """What the engine tells a connector, for one group of full attention."""
    spec = FullAttentionSpec(
        block_size=config.cache_config.block_size,
        num_kv_heads=2,
        head_size=32,
        dtype=config.model_config.dtype,
    )
    group = KVCacheGroupSpec(["layers.0", "layers.1"], spec)
    kv_cache = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[group])
    return build_offloading_config(config, kv_cache)


def identity(model_dir: Path, model_identity: str | None = None, **arguments: object) -> Identity:
    config = configure(model_dir, **arguments)
    return identify(config, offloading(config), model_identity)


def test_the_same_server_started_again_has_the_same_namespace(model_dir: Path) -> None:
    first, second = identity(model_dir), identity(model_dir)
    assert first == second
    assert first.namespace.digest == second.namespace.digest
    assert first.persistent
    assert first.reason is None


def test_every_field_has_a_text(model_dir: Path) -> None:
    fields = dict(identity(model_dir).namespace.fields)
    assert all(isinstance(value, str) for value in fields.values())
    assert " at 0x" not in str(fields)
    assert fields["engine"] == "vllm"
    assert fields["kv.layout"] == LAYOUT
    assert fields["device.instruction_set"]


@pytest.mark.parametrize(
    ("arguments", "changed"),
    [
        ({"dtype": "bfloat16"}, {"model.dtype", "device.instruction_set"}),
        (
            {"hf_overrides": {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}},
            {"model.overrides"},
        ),
        ({"block_size": 64}, {"kv.tokens_per_block", "kv.tokens_per_hash"}),
        ({"extra": {"cpu_bytes_to_use": 1, "blocks_per_chunk": 4}}, {"kv.blocks_per_chunk"}),
        ({"prefix_caching_hash_algo": "sha256_cbor"}, {"hash.algorithm"}),
        ({"kv_cache_dtype": "fp8"}, {"kv.dtype"}),
        ({"max_model_len": 512}, {"model.max_tokens"}),
        ({"tensor_parallel_size": 2}, {"parallel.tensor", "parallel.ranks"}),
        ({"attention_backend": "CPU_ATTN"}, {"attention.backend"}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_changes_the_bytes_changes_the_namespace(
    model_dir: Path, arguments: dict[str, object], changed: set[str]
) -> None:
    before, after = identity(model_dir), identity(model_dir, **arguments)
    differences = set(before.namespace.differences(after.namespace))
    assert differences <= changed
    assert before.namespace.digest != after.namespace.digest
    assert after.persistent


def test_the_layout_changes_the_namespace_and_an_unknown_one_is_not_kept(model_dir: Path) -> None:
    config = configure(model_dir)
    before = identify(config, offloading(config))
    config.cache_config.kv_cache_layout = "LBNHC"
    after = identify(config, offloading(config))
    assert before.namespace.differences(after.namespace) == ("kv.layout",)
    config.cache_config.kv_cache_layout = None
    assert not identify(config, offloading(config), "my model 1").persistent


def test_the_hash_seed_changes_the_namespace(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = identity(model_dir)
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    after = identity(model_dir)
    assert before.namespace.differences(after.namespace) == ("hash.seed",)


def replace_values_in_place(model_dir: Path) -> None:
    """Other weights of equal size, written into the same file, its time set back."""
    path = model_dir / "model.safetensors"
    before = path.stat()
    content = bytearray(path.read_bytes())
    content[-4:] = b"\0\0\0\1"
    with path.open("r+b") as file:
        file.write(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def touch_weights(model_dir: Path) -> None:
    os.utime(model_dir / "model.safetensors", ns=(1, 1))


def edit_config(model_dir: Path) -> None:
    (model_dir / "config.json").write_text(json.dumps(dict(LLAMA) | {"rms_norm_eps": 1e-5}))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (replace_values_in_place, "model.weights"),
        (touch_weights, "model.weights"),
        (edit_config, "model.config"),
    ],
)
def test_a_model_changed_in_place_has_another_namespace(
    model_dir: Path, change: Callable[[Path], None], field: str
) -> None:
    before = identity(model_dir)
    change(model_dir)
    after = identity(model_dir)
    assert before.namespace.differences(after.namespace) == (field,)


def test_scheduler_and_worker_agree(model_dir: Path, tmp_path: Path) -> None:
    """The worker has a copy of the configuration in a process of its own, and another rank."""
    config = configure(model_dir, tensor_parallel_size=2, hf_overrides={"rope_theta": 5.0})
    pickled = tmp_path / "config"
    ours = identify(config, offloading(config))
    config.parallel_config.rank = 1
    pickled.write_bytes(pickle.dumps((config, offloading(config))))
    code = f"""
import pathlib, pickle
from vllm.config import set_current_vllm_config
from emberkv.engines.vllm.identity import current_identity
config, offloading = pickle.loads(pathlib.Path({str(pickled)!r}).read_bytes())
with set_current_vllm_config(config):
    print(current_identity(offloading).namespace.digest)
"""
    worker = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    )
    assert worker.stdout.split()[-1] == ours.namespace.digest


def test_what_a_model_does_to_its_configuration_while_it_is_built_does_not_count(
    model_dir: Path,
) -> None:
    config = configure(model_dir)
    before = identify(config, offloading(config))
    config.model_config.hf_config.rope_parameters["rope_type"] = "deepseek_yarn"
    with set_current_vllm_config(config):
        assert current_identity(offloading(config)) == before


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"load_format": "dummy"}, "load format 'dummy'"),
        ({"enable_lora": True}, "LoRA"),
    ],
)
def test_what_can_not_be_known_is_not_kept_unless_the_user_vouches_for_it(
    model_dir: Path, arguments: dict[str, object], reason: str
) -> None:
    unknown = identity(model_dir, **arguments)
    assert not unknown.persistent
    assert reason in (unknown.reason or "")
    assert "model_identity" in (unknown.reason or "")
    vouched = identity(model_dir, "tuned-7b release 3", **arguments)
    assert vouched.persistent
    assert unknown.namespace.differences(vouched.namespace) == ("model.identity",)


def test_a_draft_model_counts_and_a_draft_without_a_model_does_not(
    model_dir: Path, tmp_path: Path
) -> None:
    alone = identity(model_dir)
    ngram = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    assert identity(model_dir, speculative_config=ngram) == alone
    draft = write_model(tmp_path / "draft")
    drafting = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 2}
    before = identity(model_dir, speculative_config=drafting)
    assert before.persistent
    touch_weights(draft)
    after = identity(model_dir, speculative_config=drafting)
    assert before.namespace.differences(after.namespace) == ("draft.weights",)


def test_a_model_without_weight_files_is_not_kept(model_dir: Path) -> None:
    (model_dir / "model.safetensors").unlink()
    unknown = identity(model_dir)
    assert not unknown.persistent
    assert "no weight file" in (unknown.reason or "")


def test_overrides_by_nameless_code_are_not_kept(model_dir: Path) -> None:
    unknown = identity(model_dir, hf_overrides=lambda config: config)
    assert not unknown.persistent
    assert "model.overrides" in (unknown.reason or "")


def test_a_random_hash_can_not_be_vouched_for(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unstable = identity(model_dir, "my model 1", prefix_caching_hash_algo="xxhash")
    assert not unstable.persistent
    assert "sha256_cbor" in (unstable.reason or "")
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert identity(model_dir, prefix_caching_hash_algo="xxhash").persistent
