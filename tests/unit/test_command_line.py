"""vLLM's own command line, read as vLLM reads it: flags, and the memory they stand for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from emberkv.engines.vllm.command_line import (
    Flags,
    Launch,
    Need,
    is_cpu_build,
    require_no_other_connector,
    unstable_hash,
)
from emberkv.errors import UsageError
from emberkv.testing.model_files import LLAMA, write_model

GIB = 1 << 30
STORED_BYTES = (128 << 10) + (32 << 10)


def launch(model: Path | str = "absent/model", *arguments: str, **environment: str) -> Launch:
    return Launch(str(model), Flags(arguments), environment, on_cpu=True)


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        (["--dtype", "float32"], "float32"),
        (["--dtype=float32"], "float32"),
        (["--dtype", "half", "--dtype", "float32"], "float32"),
        (["--port", "1"], None),
        (["--dtype"], None),
    ],
)
def test_the_last_value_of_a_flag_counts(arguments: list[str], value: str | None) -> None:
    assert Flags(arguments).value("--dtype") == value


def test_underscores_and_suffixes_are_read_as_vllm_does() -> None:
    flags = Flags(["--kv_cache_memory_bytes", "2K", "--max-model-len", "25.6k"])
    assert flags.number("--kv-cache-memory-bytes", 0) == 2048
    assert flags.number("--max-model-len", 0) == 25600
    assert flags.number("--block-size", 128) == 128
    with pytest.raises(UsageError, match="--block-size must be a number"):
        Flags(["--block-size", "many"]).number("--block-size", 1)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--kv-offloading-size", "4"],
        ["--kv_offloading_size=4"],
        ["--kv-offloading-backend", "native"],
        ["--kv-offloading-s", "4"],
        ["--kv-transfer-config", "{}"],
        ["--kv-transfer-config.kv_role", "kv_both"],
        ["--kv-transfer", "{}"],
    ],
)
def test_other_connectors_are_refused_however_they_are_asked_for(arguments: list[str]) -> None:
    with pytest.raises(UsageError, match="--kv-"):
        require_no_other_connector(Flags(arguments))


def test_flags_that_only_look_alike_are_let_through() -> None:
    flags = Flags(["--kv-cache-dtype", "fp8", "--kv-events-config", "{}", "--port", "1"])
    require_no_other_connector(flags)


def test_other_connectors_are_found_in_a_configuration_file_too(tmp_path: Path) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text("port: 8000\n# kv-offloading-size: 3\n")
    require_no_other_connector(Flags(["--config", str(file)]))
    file.write_text("port: 8000\nkv_offloading_size: 3\n")
    with pytest.raises(UsageError, match="--kv-offloading-size would replace"):
        require_no_other_connector(Flags(["--config", str(file)]))
    with pytest.raises(UsageError, match="can't be read"):
        require_no_other_connector(Flags(["--config", str(tmp_path / "absent")]))


def test_hashes_with_a_random_seed_are_unstable() -> None:
    assert unstable_hash("sha256_cbor", {}) is None
    assert unstable_hash("sha256", {}) is None
    assert unstable_hash("xxhash", {"PYTHONHASHSEED": "0"}) is None
    for algorithm in ("xxhash", "xxhash_cbor"):
        assert "PYTHONHASHSEED" in (unstable_hash(algorithm, {}) or "")


def test_the_environment_can_say_that_the_engine_computes_on_the_cpu() -> None:
    assert is_cpu_build({"VLLM_TARGET_DEVICE": "cpu"})


def test_on_a_cpu_without_a_stated_cache_vllm_takes_a_share_of_the_machine() -> None:
    (need,) = launch().memory_needs(100 * GIB)
    assert need.size_bytes == 92 * GIB
    (need,) = launch("m", "--gpu-memory-utilization", "0.4").memory_needs(100 * GIB)
    assert need.size_bytes == 40 * GIB


def test_on_a_cpu_with_a_stated_cache_weights_and_cache_are_counted(tmp_path: Path) -> None:
    model = write_model(tmp_path)
    needs = launch(model, VLLM_CPU_KVCACHE_SPACE="4").memory_needs(100 * GIB)
    assert needs == [Need("weights", STORED_BYTES), Need("vLLM's KV cache", 4 * GIB)]
    needs = launch(model, "--kv-cache-memory-bytes", "2G").memory_needs(100 * GIB)
    assert needs[1] == Need("vLLM's KV cache", 2 * GIB)
    both = launch(model, "--kv-cache-memory-bytes", "2G", VLLM_CPU_KVCACHE_SPACE="4")
    assert both.memory_needs(100 * GIB)[1].size_bytes == 4 * GIB


def test_weights_are_counted_in_the_type_they_are_loaded_as(tmp_path: Path) -> None:
    model = write_model(tmp_path)
    needs = launch(model, "--dtype", "float32", VLLM_CPU_KVCACHE_SPACE="1").memory_needs(GIB)
    assert needs[0] == Need("weights", (128 << 10) + (64 << 10))


def test_every_worker_has_a_cache_of_its_own(tmp_path: Path) -> None:
    flags = ("--tensor-parallel-size", "2", "-pp", "2", "--data-parallel-size", "2")
    needs = launch(write_model(tmp_path), *flags, VLLM_CPU_KVCACHE_SPACE="1").memory_needs(GIB)
    assert [need.size_bytes for need in needs] == [2 * STORED_BYTES, 8 * GIB]


def test_a_model_that_is_not_here_counts_by_its_cache_alone() -> None:
    needs = launch(VLLM_CPU_KVCACHE_SPACE="1").memory_needs(GIB)
    assert needs == [Need("vLLM's KV cache", GIB)]
    with pytest.raises(UsageError, match=r"whole GiB, got '1\.5'"):
        launch(VLLM_CPU_KVCACHE_SPACE="1.5").memory_needs(GIB)


def test_a_damaged_model_is_the_users_to_mend(tmp_path: Path) -> None:
    model = write_model(tmp_path)
    (model / "model.safetensors").write_bytes(b"")
    with pytest.raises(UsageError, match="download the model again"):
        launch(model, VLLM_CPU_KVCACHE_SPACE="1").memory_needs(GIB)


def test_with_a_gpu_only_offloaded_weights_are_in_host_memory() -> None:
    assert Launch("m", Flags([]), {}, on_cpu=False).memory_needs(GIB) == []
    flags = Flags(["--cpu-offload-gb", "4", "--tensor-parallel-size", "2"])
    needs = Launch("m", flags, {}, on_cpu=False).memory_needs(GIB)
    assert needs == [Need("weights (--cpu-offload-gb)", 8 * GIB)]


@pytest.mark.parametrize(
    ("changes", "arguments", "per_token"),
    [
        ({}, ["--dtype", "float32"], 2 * 2 * 2 * 32 * 4),
        ({}, ["--dtype", "bfloat16"], 2 * 2 * 2 * 32 * 2),
        ({}, ["--dtype", "float32", "--kv-cache-dtype", "fp8"], 2 * 2 * 2 * 32),
        ({"head_dim": None}, ["--dtype", "half"], 2 * 2 * 2 * 32 * 2),
        ({"num_key_value_heads": None, "num_attention_heads": 4}, ["--dtype", "half"], 1024),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, ["--dtype", "half"], 2 * 576 * 2),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ["--dtype", "half"], None),
        ({"sliding_window": 512}, ["--dtype", "half"], None),
        ({"num_hidden_layers": None}, ["--dtype", "half"], None),
        ({"hidden_size": None, "head_dim": None}, ["--dtype", "half"], None),
        ({}, ["--kv-cache-dtype", "nvfp4"], None),
    ],
)
def test_kv_bytes_per_token_follow_from_the_models_configuration(
    tmp_path: Path, changes: dict[str, object], arguments: list[str], per_token: int | None
) -> None:
    model = write_model(tmp_path, dict(LLAMA) | changes)
    assert launch(model, *arguments).kv_bytes_per_token() == per_token


def test_the_text_model_of_a_larger_one_counts(tmp_path: Path) -> None:
    model = write_model(tmp_path, {"text_config": dict(LLAMA)})
    assert launch(model, "--dtype", "half").kv_bytes_per_token() == 512


def test_the_type_in_the_configuration_counts_as_the_engine_narrows_it(tmp_path: Path) -> None:
    model = write_model(tmp_path)
    assert launch(model).kv_bytes_per_token() == 2 * 2 * 2 * 32 * 2
    (model / "config.json").write_text(json.dumps({"dtype": 1}))
    assert launch(model).kv_bytes_per_token() is None


def test_the_block_is_the_engines() -> None:
    assert launch().block_tokens() == 128
    assert launch("m", "--block-size", "32").block_tokens() == 32
    assert Launch("m", Flags([]), {}, on_cpu=False).block_tokens() == 16
