"""The configuration: frozen, explicit, and strict about keys it does not know."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from emberkv import config_guard
from emberkv import config_values as values
from emberkv.config_guard import GuardSettings
from emberkv.errors import ConfigError

EVICTION_POLICY_NAMES: Final = ("lru", "arc")
ON_BUSY_DISK: Final = ("serve_without", "refuse")

OWN_KEYS: Final = (
    "cpu_bytes_to_use",
    "eviction_policy",
    "secondary_tiers",
    "instance",
    "keep_s",
    "max_wait_s",
    "max_stall_s",
    "max_slowdown",
    "look_ahead_share",
    "offload_min_priority",
    "pin_share",
    "raised_share",
    "tenants",
    "model_identity",
    "request_log",
    "on_busy_disk",
    "control",
    "canary",
    "baseline",
    "guard",
)
TIER_KEYS: Final = ("type", "root_dir", "size_bytes", "n_read_threads", "n_write_threads")

ENGINE_KEYS: Final = (
    "spec_name",
    "spec_module_path",
    "block_size",
    "blocks_per_chunk",
    "offload_prompt_only",
    "self_describing_kv_events",
)
"""Keys that the engine's own connector reads; they pass through."""

NATIVE_KEYS_NOT_HERE: Final = {
    "store_threshold": "emberkv has no admission by count yet",
    "canonical_layout": "emberkv keeps each rank's own layout",
    "backpressure": "emberkv bounds its queues itself",
    "cache_policy_module_path": f"choose eviction_policy from {', '.join(EVICTION_POLICY_NAMES)}",
}
_INSTANCE: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
NATIVE_TIER_TYPES_NOT_HERE: Final = ("obj", "p2p", "kvcr")


@dataclass(frozen=True, slots=True)
class DiskConfig:
    """A tier on local disk: one preallocated slab per namespace under `root_dir`."""

    root_dir: Path
    size_bytes: int
    size_is_default: bool = False
    read_threads: int = 8
    write_threads: int = 4


@dataclass(frozen=True, slots=True)
class Config:
    """Everything a server's tiers are told."""

    ram_bytes: int
    disk: DiskConfig | None = None
    eviction_policy: str = "lru"
    instance: str | None = None
    keep_s: float = 600.0
    max_wait_s: float = 30.0
    max_stall_s: float = 1.0
    max_slowdown: float = 1.05
    look_ahead_share: float = 0.25
    offload_min_priority: int = 35
    pin_share: float = 0.25
    raised_share: float = 0.5
    tenants: tuple[tuple[str, float], ...] = ()
    model_identity: str | None = None
    request_log: Path | None = None
    on_busy_disk: str = "serve_without"
    control: bool = True
    canary: float = 0.0
    baseline: Path | None = None
    guard: GuardSettings | None = None


def parse(extra_config: Mapping[str, object]) -> Config:
    """The configuration from the keys of the engine's `kv_connector_extra_config`.

    Sizes are totals over all ranks, in bytes. Raises `ConfigError`, naming the key.
    """
    for key in extra_config:
        _check_key(key)
    if "cpu_bytes_to_use" not in extra_config:
        raise ConfigError("cpu_bytes_to_use is missing: say how many bytes of RAM the tier gets")
    ram_bytes = _size("cpu_bytes_to_use", extra_config["cpu_bytes_to_use"])
    return Config(
        ram_bytes=ram_bytes,
        disk=_disk(extra_config.get("secondary_tiers"), ram_bytes),
        eviction_policy=values.choice(
            extra_config, "eviction_policy", EVICTION_POLICY_NAMES, "lru"
        ),
        instance=_instance(extra_config),
        keep_s=values.seconds(extra_config, "keep_s", 600.0, minimum=0.0),
        max_wait_s=values.seconds(extra_config, "max_wait_s", 30.0, minimum=0.001),
        max_stall_s=values.seconds(extra_config, "max_stall_s", 1.0, minimum=0.001),
        max_slowdown=values.number(extra_config, "max_slowdown", 1.05, low=1.0, high=10.0),
        look_ahead_share=values.number(extra_config, "look_ahead_share", 0.25, low=0.0, high=0.5),
        offload_min_priority=_priority(extra_config, "offload_min_priority", 35),
        pin_share=values.number(extra_config, "pin_share", 0.25, low=0.0, high=0.9),
        raised_share=values.number(extra_config, "raised_share", 0.5, low=0.0, high=0.9),
        tenants=_tenants(extra_config.get("tenants")),
        model_identity=values.text(extra_config, "model_identity"),
        request_log=values.path(extra_config, "request_log"),
        on_busy_disk=values.choice(extra_config, "on_busy_disk", ON_BUSY_DISK, "serve_without"),
        control=values.flag(extra_config, "control", True),
        canary=values.number(extra_config, "canary", 0.0, low=0.0, high=1.0),
        baseline=values.path(extra_config, "baseline"),
        guard=config_guard.parse(extra_config),
    )


def _check_key(key: str) -> None:
    if key in NATIVE_KEYS_NOT_HERE:
        raise ConfigError(f"{key} is not implemented: {NATIVE_KEYS_NOT_HERE[key]}")
    if key not in OWN_KEYS and key not in ENGINE_KEYS:
        raise ConfigError(f"unknown key '{key}'{values.nearest(key, OWN_KEYS + ENGINE_KEYS)}")


def _disk(tiers: object, ram_bytes: int) -> DiskConfig | None:
    if tiers is None:
        return None
    if not isinstance(tiers, Sequence) or isinstance(tiers, str):
        raise ConfigError("secondary_tiers must be a list of tiers")
    if len(tiers) > 1:
        raise ConfigError("secondary_tiers may name one tier at present, of type 'fs'")
    if not tiers:
        return None
    tier = tiers[0]
    if not isinstance(tier, Mapping):
        raise ConfigError("each of secondary_tiers must be an object with a 'type'")
    kind = tier.get("type")
    if kind in NATIVE_TIER_TYPES_NOT_HERE:
        raise ConfigError(f"a tier of type '{kind}' is not implemented; use 'fs'")
    if kind != "fs":
        raise ConfigError(f"unknown tier type '{kind}'{values.nearest(str(kind), ('fs',))}")
    for key in tier:
        if key not in TIER_KEYS:
            raise ConfigError(f"unknown key '{key}' of a tier{values.nearest(str(key), TIER_KEYS)}")
    root_dir = tier.get("root_dir")
    if not isinstance(root_dir, str) or not root_dir or "\0" in root_dir:
        raise ConfigError("root_dir of a tier must name a directory")
    size = tier.get("size_bytes")
    return DiskConfig(
        root_dir=Path(root_dir),
        size_bytes=4 * ram_bytes if size is None else _size("size_bytes", size),
        size_is_default=size is None,
        read_threads=_count("n_read_threads", tier.get("n_read_threads", 8)),
        write_threads=_count("n_write_threads", tier.get("n_write_threads", 4)),
    )


def _size(key: str, value: object) -> int:
    if not values.is_finite(value) or value != int(value):
        raise ConfigError(f"{key} must be a whole number of bytes, got {value!r}")
    if value <= 0:
        raise ConfigError(f"{key} must be greater than 0, got {value!r}")
    return int(value)


def _count(key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 256:
        raise ConfigError(f"{key} must be a whole number from 1 to 256, got {value!r}")
    return value


def _priority(config: Mapping[str, object], key: str, default: int) -> int:
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 100:
        raise ConfigError(f"{key} must be a whole number from 0 to 100, got {value!r}")
    return value


def _tenants(value: object) -> tuple[tuple[str, float], ...]:
    """Each tenant's protected share of every tier; together at most 0.9."""
    if value is None:
        return ()
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise ConfigError(f"tenants must be an object of names and shares, got {value!r}")
    shares = tuple(
        (str(name), values.number(value, str(name), 0.0, low=0.0, high=0.9)) for name in value
    )
    if sum(share for _, share in shares) > 0.9:
        raise ConfigError("tenants: the protected shares must not exceed 0.9 together")
    return shares


def require_instance(instance: str) -> None:
    """Raise `ConfigError` unless `instance` can be part of a keeper's address."""
    if not _INSTANCE.fullmatch(instance):
        raise ConfigError(
            f"instance must be 1 to 64 letters, digits, '.', '_' or '-', got {instance!r}"
        )


def _instance(config: Mapping[str, object]) -> str | None:
    value = values.text(config, "instance")
    if value is not None:
        require_instance(value)
    return value
