"""What emberkv must know of `vllm serve`'s command line: flags, and what they mean for memory.

Imports no engine: only arguments, environment variables and the model's own files are read.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from emberkv.engines.model_files import (
    Snapshot,
    find_snapshot,
    read_config,
    weight_files,
    weights_bytes,
)
from emberkv.errors import StorageError, UsageError

GIB: Final = 1 << 30
DEFAULT_UTILIZATION: Final = 0.92
DEFAULT_HASH: Final = "sha256"
SEEDED_HASHES: Final = ("sha256", "sha256_cbor")
PORTABLE_HASH: Final = "sha256_cbor"
HASHES: Final = (*SEEDED_HASHES, "xxhash", "xxhash_cbor")

OFFLOADING_FLAGS: Final = ("--kv-offloading-size", "--kv-offloading-backend")
TRANSFER_FLAG: Final = "--kv-transfer-config"
HASH_FLAG: Final = "--prefix-caching-hash-algo"
WEIGHT_OFFLOADING_FLAG: Final = "--cpu-offload-gb"
KV_SPACE_VARIABLE: Final = "VLLM_CPU_KVCACHE_SPACE"
SEED_VARIABLE: Final = "PYTHONHASHSEED"

_BYTES_OF_TYPE: Final = {
    "half": 2, "float16": 2, "bfloat16": 2, "float": 4, "float32": 4,
}  # fmt: skip
_BYTES_OF_KV_TYPE: Final = {"float16": 2, "bfloat16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
_CPU_BLOCK_TOKENS: Final = 128
_BLOCK_TOKENS: Final = 16
_SHORTEST_ABBREVIATION: Final = len("--kv-o")
_NUMBER: Final = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT]?)")
_FACTORS: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12} | {
    "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40,
}  # fmt: skip


class Flags:
    """The arguments meant for `vllm serve`, as its own parser reads them."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self.arguments = tuple(arguments)

    def value(self, flag: str) -> str | None:
        """The last value given for a flag, or None. Underscores count as dashes."""
        found = None
        for place, argument in enumerate(self.arguments):
            name, equals, value = argument.partition("=")
            if _name(name) != flag:
                continue
            following = self.arguments[place + 1 : place + 2]
            found = value if equals else (following[0] if following else None)
        return found

    def mentions(self, flag: str) -> bool:
        """Whether a flag, a key below it (`--flag.key`) or an abbreviation of it is given."""
        for argument in self.arguments:
            name = _name(argument.partition("=")[0])
            if name == flag or name.startswith(flag + "."):
                return True
            if len(name) >= _SHORTEST_ABBREVIATION and flag.startswith(name):
                return True
        return False

    def number(self, flag: str, default: float) -> float:
        """A flag's value as a number. Raises `UsageError`."""
        text = self.value(flag)
        if text is None:
            return default
        match = _NUMBER.fullmatch(text.strip())
        if match is None:
            raise UsageError(f"{flag} must be a number, got '{text}'")
        return float(match[1]) * _FACTORS[match[2]]

    def config_text(self) -> str:
        """The text of the file given as `--config`, or nothing. Raises `UsageError`."""
        path = self.value("--config")
        if path is None:
            return ""
        try:
            return Path(path).read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise UsageError(f"--config {path} can't be read: {error.strerror}") from error


def _name(argument: str) -> str:
    return argument.replace("_", "-") if argument.startswith("--") else argument


def require_no_other_connector(flags: Flags) -> None:
    """Refuse flags that would replace emberkv's connector. Raises `UsageError`."""
    file_text = flags.config_text().replace("_", "-")
    for flag in (*OFFLOADING_FLAGS, TRANSFER_FLAG):
        in_file = re.search(rf"^\s*{flag.removeprefix('--')}\b", file_text, re.MULTILINE)
        if not flags.mentions(flag) and not in_file:
            continue
        if flag == TRANSFER_FLAG:
            raise UsageError(f"{flag} is what `emberkv serve` writes itself; leave it out")
        raise UsageError(f"{flag} would replace emberkv's tiers by vLLM's own; give --ram instead")


def unstable_hash(algorithm: str, environment: Mapping[str, str]) -> str | None:
    """Why block hashes of an algorithm differ from start to start; None if they do not."""
    if algorithm in SEEDED_HASHES or environment.get(SEED_VARIABLE) is not None:
        return None
    return (
        f"{HASH_FLAG} {algorithm} has a new random seed at every start, so nothing kept could be "
        f"found again; use {PORTABLE_HASH}, or set {SEED_VARIABLE}"
    )


def is_cpu_build(environment: Mapping[str, str]) -> bool:
    """Whether the vLLM beside this Python computes on the CPU."""
    if environment.get("VLLM_TARGET_DEVICE") == "cpu":
        return True
    try:
        return "cpu" in importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return _is_installed("vllm-cpu")


def has_own_command() -> bool:
    """Whether `vllm` starts: it looks for a distribution of its name, which the CPU build lacks."""
    return _is_installed("vllm") or not _is_installed("vllm-cpu")


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Need:
    """Host memory that the engine takes for one purpose."""

    purpose: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Launch:
    """An engine about to be started: its model, flags and environment."""

    model: str
    flags: Flags
    environment: Mapping[str, str]
    on_cpu: bool

    def snapshot(self) -> Snapshot | None:
        """The model's local directory, or None: nothing is downloaded to find out."""
        return find_snapshot(
            self.model, self.flags.value("--revision"), self.flags.value("--download-dir")
        )

    def engines(self) -> int:
        """Replicas on this machine."""
        count = self.flags.number("--data-parallel-size", self.flags.number("-dp", 1))
        return int(self.flags.number("--data-parallel-size-local", count))

    def ranks(self) -> int:
        """Workers of one replica."""
        tensor = self.flags.number("--tensor-parallel-size", self.flags.number("-tp", 1))
        pipeline = self.flags.number("--pipeline-parallel-size", self.flags.number("-pp", 1))
        return int(tensor * pipeline)

    def block_tokens(self) -> int:
        """Tokens of one block of the device's cache."""
        default = _CPU_BLOCK_TOKENS if self.on_cpu else _BLOCK_TOKENS
        return int(self.flags.number("--block-size", default))

    def kv_bytes_per_token(self) -> int | None:
        """KV bytes of one token over all layers and ranks.

        Known for a plain decoder with full attention or latent attention in every layer, else
        None.
        """
        snapshot = self.snapshot()
        config = read_config(snapshot.directory) if snapshot else None
        return None if config is None else _kv_bytes_per_token(config, self._type_bytes(config))

    def _type_bytes(self, config: Mapping[str, object]) -> int | None:
        """Bytes of one value of the KV cache."""
        kv_type = self.flags.value("--kv-cache-dtype")
        if kv_type not in (None, "auto"):
            return _BYTES_OF_KV_TYPE.get(str(kv_type))
        model_type = self.flags.value("--dtype")
        if model_type in (None, "auto"):
            stored = config.get("dtype", config.get("torch_dtype"))
            return None if stored is None else min(2, _BYTES_OF_TYPE.get(str(stored), 2))
        return _BYTES_OF_TYPE.get(str(model_type))

    def memory_needs(self, machine_bytes: int) -> list[Need]:
        """Host memory that the engine takes beside emberkv's, on a machine with `machine_bytes`.

        With a GPU only what is moved off it on purpose; on a CPU the weights and the cache.
        """
        if self.on_cpu:
            return self._cpu_needs(machine_bytes)
        offloaded_gib = self.flags.number(WEIGHT_OFFLOADING_FLAG, 0)
        size_bytes = int(offloaded_gib * GIB) * self.ranks() * self.engines()
        return [Need(f"weights ({WEIGHT_OFFLOADING_FLAG})", size_bytes)] if size_bytes else []

    def _cpu_needs(self, machine_bytes: int) -> list[Need]:
        workers = self.ranks() * self.engines()
        cache_bytes = self._explicit_cache_bytes()
        if cache_bytes is None:
            share = self.flags.number("--gpu-memory-utilization", DEFAULT_UTILIZATION)
            purpose = f"vLLM's share of the RAM (--gpu-memory-utilization {share:g})"
            return [Need(purpose, int(machine_bytes * share) * workers)]
        needs = [Need("vLLM's KV cache", cache_bytes * workers)]
        loaded_bytes = self._weights_bytes()
        if loaded_bytes is not None:
            needs.insert(0, Need("weights", loaded_bytes * self.engines()))
        return needs

    def _explicit_cache_bytes(self) -> int | None:
        """The device cache of one worker, if it is said; the variable wins, as in vLLM."""
        space = self.environment.get(KV_SPACE_VARIABLE)
        if space:
            if not space.isdigit():
                raise UsageError(f"{KV_SPACE_VARIABLE} must be whole GiB, got '{space}'")
            return int(space) * GIB
        if self.flags.value("--kv-cache-memory-bytes") is None:
            return None
        return int(self.flags.number("--kv-cache-memory-bytes", 0))

    def _weights_bytes(self) -> int | None:
        snapshot = self.snapshot()
        if snapshot is None:
            return None
        try:
            files = weight_files(snapshot.directory)
            return weights_bytes(files, _BYTES_OF_TYPE.get(self.flags.value("--dtype") or ""))
        except StorageError as error:
            raise UsageError(str(error)) from error


def _kv_bytes_per_token(config: Mapping[str, object], type_bytes: int | None) -> int | None:
    text = config.get("text_config")
    if isinstance(text, Mapping):
        config = text
    kinds = config.get("layer_types") or ()
    if not isinstance(kinds, Sequence) or any(kind != "full_attention" for kind in kinds):
        return None
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        return None
    layers = _count(config, "num_hidden_layers")
    if layers is None or type_bytes is None:
        return None
    latent, rope = _count(config, "kv_lora_rank"), _count(config, "qk_rope_head_dim")
    if latent is not None and rope is not None:
        return layers * (latent + rope) * type_bytes
    heads = _count(config, "num_attention_heads")
    kv_heads = _count(config, "num_key_value_heads") or heads
    hidden = _count(config, "hidden_size")
    width = _count(config, "head_dim") or (hidden // heads if hidden and heads else None)
    if kv_heads is None or width is None:
        return None
    return 2 * layers * kv_heads * width * type_bytes


def _count(config: Mapping[str, object], name: str) -> int | None:
    value = config.get(name)
    return value if isinstance(value, int) and value > 0 else None
