"""What makes one vLLM engine's KV bytes reusable by another: the namespace, from vLLM's own config.

vLLM's block hashes name tokens, adapters and salts, not the model; its offloading configuration
tells little more than the model's name. So the namespace is made where the whole `VllmConfig` is at
hand: in the scheduler's connector and in each worker, which must come to the same digest.

Only facts that are equal in every process of one engine are used: files on disk and the arguments,
never the live model configuration, which models change while they are built.
"""

from __future__ import annotations

import functools
import json
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from emberkv.domain.namespace import Namespace
from emberkv.engines.model_files import (
    SAFETENSORS,
    WEIGHT_SUFFIXES,
    digest_descriptions,
    digest_weights,
    find_snapshot,
    weight_files,
)
from emberkv.engines.vllm.command_line import SEED_VARIABLE, unstable_hash
from emberkv.errors import StorageError
from emberkv.tiers.format import FORMAT_VERSION

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig, VllmConfig
    from vllm.v1.kv_offload.config import OffloadingConfig

LAYOUT_GENERATION: Final = "1"
"""Raised when a tested minor version of vLLM writes other bytes for the same configuration."""

# Weight files by load format, the preferred first. Formats that are not here read from elsewhere.
_LOADED_SUFFIXES: Final = {
    "auto": WEIGHT_SUFFIXES,
    "hf": WEIGHT_SUFFIXES,
    "safetensors": (SAFETENSORS,),
    "fastsafetensors": (SAFETENSORS,),
    "instanttensor": (SAFETENSORS,),
    "mistral": (SAFETENSORS,),
    "runai_streamer": (SAFETENSORS,),
    "runai_streamer_sharded": (SAFETENSORS,),
    "sharded_state": (SAFETENSORS,),
    "npcache": (".bin",),
    "pt": (".pt",),
}
# These take a part of their weights from other repositories or folders.
_WEIGHTS_FROM_ELSEWHERE: Final = frozenset(
    {"ClefOmniForJointSchema", "MoonshotKimiaForCausalLM", "UltravoxModel"}
)
_DRAFTS_WITHOUT_KV: Final = frozenset({"medusa", "mlp_speculator", "ngram", "ngram_gpu", "suffix"})

_CURE: Final = "name the model and its version as model_identity in the configuration"


@dataclass(frozen=True, slots=True)
class Identity:
    """The namespace of an engine, and whether its bytes may outlive the engine.

    If not `persistent`, disk and takeover stay off, `reason` says why and what to do, and the
    namespace only serves to compare scheduler and workers.
    """

    namespace: Namespace
    persistent: bool
    reason: str | None


@dataclass(slots=True)
class _Facts:
    """Fields in reading order, and what stands against keeping bytes beyond the engine."""

    fields: dict[str, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)  # the user can vouch for these
    unstable: list[str] = field(default_factory=list)  # and not for these

    def add(self, name: str, value: object) -> None:
        self.fields[name] = value if isinstance(value, str) else self._text(name, value)

    def _text(self, name: str, value: object) -> str:
        """A text that is the same in every process; what has none is noted as unknown."""

        def other(item: object) -> str | list[str]:
            if isinstance(item, set | frozenset):
                return sorted(map(str, item))
            text = str(item)
            function = getattr(item, "__qualname__", None)
            if callable(item) and function and "<" not in function:
                return f"{item.__module__}.{function}"
            if callable(item) or " at 0x" in text:
                self.unknown.append(f"{name} holds code that has no name to compare")
                return type(item).__qualname__
            return text

        return json.dumps(value, sort_keys=True, default=other)


def identify(
    vllm_config: VllmConfig, offloading: OffloadingConfig, model_identity: str | None = None
) -> Identity:
    """The identity of an engine, the same in its scheduler and in each of its workers.

    Call it once the KV layout is resolved: at or after the making of the connector. Reads the
    model's small files and samples of its weights: well under a second.
    """
    facts = _Facts()
    facts.add("engine", "vllm")
    facts.add("engine.layout_generation", LAYOUT_GENERATION)
    facts.add("engine.model_runner", "v2" if vllm_config.use_v2_model_runner else "v1")
    _add_model(facts, "model", vllm_config.model_config, vllm_config.load_config)
    facts.add("model.identity", model_identity or "")
    _add_variants(facts, vllm_config)
    _add_kv(facts, vllm_config, offloading)
    _add_parallel(facts, vllm_config)
    _add_device(facts, vllm_config)
    _add_hash(facts, vllm_config.cache_config.prefix_caching_hash_algo)
    facts.add("format", str(FORMAT_VERSION))
    if facts.unstable:
        reason = facts.unstable[0]
    elif facts.unknown and not model_identity:
        reason = f"{facts.unknown[0]}; {_CURE}"
    else:
        return Identity(Namespace.of(facts.fields), persistent=True, reason=None)
    return Identity(Namespace.of(facts.fields), persistent=False, reason=reason)


def current_identity(offloading: OffloadingConfig, model_identity: str | None = None) -> Identity:
    """`identify` in a worker, where the engine's configuration is the current one."""
    from vllm.config import get_current_vllm_config

    return identify(get_current_vllm_config(), offloading, model_identity)


def _add_model(facts: _Facts, name: str, model: ModelConfig, load: LoadConfig) -> None:
    """Who the model is and which content it has, from its files on this machine."""
    suffixes = _LOADED_SUFFIXES.get(load.load_format)
    snapshot = None
    if model.model_weights:
        facts.unknown.append(f"{model.model_weights} is streamed from an object store")
    elif suffixes is None:
        facts.unknown.append(f"weights of load format '{load.load_format}' can't be compared")
    else:
        revision = getattr(model.revision, "resolved", model.revision)
        snapshot = find_snapshot(model.model, revision, load.download_dir)
        if snapshot is None:
            facts.unknown.append(f"the files of {model.model} are not on this machine")
    facts.add(f"{name}.name", snapshot.name if snapshot else model.model)
    facts.add(f"{name}.revision", (snapshot and snapshot.revision) or str(model.revision or ""))
    if snapshot and suffixes:
        directory, code = snapshot.directory, bool(model.trust_remote_code)
        digest_files = functools.partial(_digest_loaded, directory, suffixes)
        _add_digest(facts, f"{name}.weights", digest_files)
        describe = functools.partial(digest_descriptions, directory, with_code=code)
        _add_digest(facts, f"{name}.config", describe)
    facts.add(f"{name}.load", [load.load_format, load.model_loader_extra_config])
    facts.add(f"{name}.dtype", str(model.dtype).removeprefix("torch."))
    facts.add(f"{name}.quantization", [model.quantization, model.quantization_config])
    facts.add(f"{name}.max_tokens", str(model.max_model_len))


def _digest_loaded(directory: Path, suffixes: tuple[str, ...]) -> str:
    files = weight_files(directory, suffixes)
    if not files:
        raise StorageError(f"{directory} has no weight file that can be compared")
    return digest_weights(files)


def _add_digest(facts: _Facts, name: str, compute: Callable[[], str]) -> None:
    try:
        facts.add(name, compute())
    except StorageError as error:
        facts.unknown.append(str(error))


def _add_variants(facts: _Facts, vllm_config: VllmConfig) -> None:
    """What else changes the computation: overrides, other sources, drafts, adapters, inputs."""
    model = vllm_config.model_config
    facts.add("model.overrides", model.hf_overrides)
    if model.hf_config_path and model.hf_config_path != model.model:
        _add_config_source(facts, model.hf_config_path, code=bool(model.trust_remote_code))
    facts.add(
        "model.implementation",
        [model.model_impl, model.config_format, model.model_class_overrides, model.code_revision],
    )
    facts.add("model.sliding_window", "off" if model.disable_sliding_window else "as configured")
    elsewhere = _WEIGHTS_FROM_ELSEWHERE.intersection(model.architectures or ())
    if elsewhere:
        facts.unknown.append(f"{min(elsewhere)} loads weights from other places too")
    if multimodal := model.multimodal_config:
        names = (
            "media_io_kwargs",
            "mm_processor_kwargs",
            "mm_device_do_normalize",
            "mm_hasher_algorithm",
            "mm_encoder_attn_dtype",
            "mm_encoder_fp8_scale_path",
            "video_pruning_rate",
        )
        facts.add("model.multimodal", {name: getattr(multimodal, name, None) for name in names})
    speculative = vllm_config.speculative_config
    draft = speculative.draft_model_config if speculative else None
    if speculative and draft and speculative.method not in _DRAFTS_WITHOUT_KV:
        load = speculative.draft_load_config or vllm_config.load_config
        facts.add("draft.method", str(speculative.method))
        _add_model(facts, "draft", draft, load)
    if lora := vllm_config.lora_config:
        facts.add("lora", [lora.max_lora_rank, str(lora.lora_dtype), lora.target_modules])
        facts.unknown.append("LoRA is on, and an adapter's key names its path, not its content")


def _add_config_source(facts: _Facts, path: str, *, code: bool) -> None:
    snapshot = find_snapshot(path)
    if snapshot is None:
        facts.unknown.append(f"the configuration of {path} is not on this machine")
        return
    describe = functools.partial(digest_descriptions, snapshot.directory, with_code=code)
    _add_digest(facts, "model.config_source", describe)


def _add_kv(facts: _Facts, vllm_config: VllmConfig, offloading: OffloadingConfig) -> None:
    """Type, quantisation, layout and granularity of the KV cache."""
    cache, attention = vllm_config.cache_config, vllm_config.attention_config
    facts.add("kv.dtype", str(cache.cache_dtype))
    facts.add("kv.unquantized_layers", sorted(cache.kv_cache_dtype_skip_layers))
    facts.add("kv.indexer_dtype", str(attention.indexer_kv_dtype))
    at_run_time = bool(getattr(cache, "calculate_kv_scales", False))
    facts.add("kv.scales", "run time" if at_run_time else "weights")
    if at_run_time:
        facts.unstable.append("KV scales computed at run time differ from start to start")
    facts.add(
        "kv.mamba",
        [cache.mamba_cache_dtype, cache.mamba_ssm_cache_dtype, cache.mamba_cache_mode],
    )
    layout = offloading.kv_cache_layout or cache.kv_cache_layout
    facts.add("kv.layout", layout or "")
    if not layout:
        facts.unstable.append("the engine does not tell the layout of its KV cache")
    facts.add("kv.replicated", "yes" if offloading.replicated_layout else "no")
    facts.add("kv.tokens_per_block", [group.tokens_per_block for group in offloading.groups])
    facts.add("kv.blocks_per_chunk", str(offloading.cache.blocks_per_chunk))
    facts.add("kv.tokens_per_hash", str(offloading.cache.tokens_per_hash))
    backend = attention.backend
    facts.add("attention.backend", backend.name if backend else "auto")
    kinds = {kind: choice.name for kind, choice in attention.backend_per_kind.items()}
    facts.add("attention.backend_per_kind", kinds)


def _add_parallel(facts: _Facts, vllm_config: VllmConfig) -> None:
    """How one chunk is cut into the parts of the ranks. Replicas are not told apart."""
    parallel = vllm_config.parallel_config
    facts.add("parallel.tensor", str(parallel.tensor_parallel_size))
    facts.add("parallel.pipeline", str(parallel.pipeline_parallel_size))
    context = (
        parallel.prefill_context_parallel_size,
        parallel.decode_context_parallel_size,
        parallel.cp_kv_cache_interleave_size,
    )
    facts.add("parallel.context", context)
    facts.add("parallel.ranks", str(parallel.world_size))


def _add_device(facts: _Facts, vllm_config: VllmConfig) -> None:
    """The device where the bytes inside a page depend on it."""
    from vllm.platforms import current_platform

    capability = current_platform.get_device_capability()
    version = f" {capability.major}.{capability.minor}" if capability else ""
    facts.add("device", f"{current_platform.device_type}{version}")
    if current_platform.is_cpu():
        facts.add("device.instruction_set", _cpu_instruction_set(vllm_config))


def _cpu_instruction_set(vllm_config: VllmConfig) -> str:
    """CPU attention packs keys for the instruction set it finds: a page suits no other."""
    import torch
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    model, cache = vllm_config.model_config, vllm_config.cache_config
    amx = "amx" if torch.cpu._is_amx_tile_supported() else "no-amx"
    chosen = _get_attn_isa(
        model.dtype, cache.block_size, model.get_head_size(), str(cache.cache_dtype)
    )
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {amx} {chosen}"


def _add_hash(facts: _Facts, algorithm: str) -> None:
    """The block hash: equal prefixes must get equal keys in the next process too."""
    seed = os.environ.get(SEED_VARIABLE)
    reason = unstable_hash(algorithm, os.environ)
    if reason:
        facts.unstable.append(reason)
        seed = "random"
    facts.add("hash.algorithm", algorithm)
    facts.add("hash.seed", "engine" if seed is None else seed)
