"""The baseline file: how quick a server is without tiers, which budgets can be given relative to.

JSON, one document, with a version; a file of another version, or with a field that is not known
here, is refused. Times are in seconds. Context lengths are prompt tokens, in classes that double:
up to 128, 256, 512, … tokens.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from emberkv.errors import UsageError

VERSION: Final = 1
CLASS_BOUNDS: Final = tuple(128 << power for power in range(12))
"""Upper ends of the context-length classes: 128 to 262,144 tokens; what is longer has none."""

P99_SAMPLES: Final = 100
"""A 99th percentile of fewer samples is only their largest, which others often exceed."""


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A part of the file: immutable, strict."""


class Quantiles(Record, frozen=True, kw_only=True):
    """A distribution of times."""

    count: int
    p50_s: float
    p95_s: float
    p99_s: float


class Latencies(Record, frozen=True, kw_only=True):
    """What requests felt. None: not known."""

    requests: int
    first_token: Quantiles | None = None
    inter_token: Quantiles | None = None
    end_to_end: Quantiles | None = None


class LengthClass(Record, frozen=True, kw_only=True):
    """The requests of one class of context lengths, `up_to_tokens` included."""

    up_to_tokens: int | None
    latencies: Latencies


class Step(Record, frozen=True, kw_only=True):
    """What was seen with so many requests at a time."""

    concurrency: int
    overall: Latencies
    classes: tuple[LengthClass, ...]


class Concurrency(Record, frozen=True, kw_only=True):
    """Requests in the server at a time, running and waiting."""

    mean: float
    highest: float


class PrefillPoint(Record, frozen=True, kw_only=True):
    """A single request with nothing cached: its prompt's length, and time to first token."""

    tokens: int
    seconds: float


class DeviceCache(Record, frozen=True, kw_only=True):
    """The engine's own KV cache. None: the engine's metrics do not tell."""

    preemptions: int | None = None
    evictions: int | None = None  # sampled by the engine; only with its --kv-cache-metrics
    usage_mean: float | None = None
    usage_highest: float | None = None


class ServerFacts(Record, frozen=True, kw_only=True):
    """The server that was measured, as it tells itself."""

    url: str
    model: str
    engine_version: str | None = None
    max_model_tokens: int | None = None
    block_tokens: int | None = None
    device_blocks: int | None = None
    has_tiers: bool = False


class Baseline(Record, frozen=True, kw_only=True):
    """Everything that was recorded."""

    version: int = VERSION
    recorded_at: str
    command: str
    how: str  # "workload": requests of our own; "watched": the engine's metrics alone
    server: ServerFacts
    overall: Latencies
    classes: tuple[LengthClass, ...] = ()
    steps: tuple[Step, ...] = ()
    lengths: dict[str, int] = {}  # class of prompt length → requests
    concurrency: Concurrency | None = None
    prefill: tuple[PrefillPoint, ...] = ()
    reused_share: float | None = None  # of prompt tokens, from the engine's own prefix cache
    device_cache: DeviceCache = DeviceCache()
    notes: tuple[str, ...] = ()  # what could not be known, and why


def class_bound(tokens: int) -> int | None:
    """The upper end of the class of a context length; None for what is longer than all."""
    return next((bound for bound in CLASS_BOUNDS if tokens <= bound), None)


def class_name(up_to_tokens: int | None) -> str:
    """A class as people read it: `257-512`."""
    if up_to_tokens is None:
        return f"over {CLASS_BOUNDS[-1]}"
    if up_to_tokens not in CLASS_BOUNDS[1:]:
        return f"up to {up_to_tokens}"
    return f"{up_to_tokens // 2 + 1}-{up_to_tokens}"


def quantile(ordered: Sequence[float], share: float) -> float:
    """A quantile of sorted values by nearest rank: one of them, never in between."""
    return ordered[max(0, math.ceil(share * len(ordered) - 1e-9) - 1)]


def quantiles(values: Sequence[float]) -> Quantiles | None:
    """The quantiles that a baseline holds; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    p50_s, p95_s, p99_s = (round(quantile(ordered, share), 6) for share in (0.5, 0.95, 0.99))
    return Quantiles(count=len(ordered), p50_s=p50_s, p95_s=p95_s, p99_s=p99_s)


def write_baseline(path: Path, baseline: Baseline) -> None:
    """Write the file whole or not at all. Raises `UsageError` where it can't be written."""
    text = msgspec.json.format(msgspec.json.encode(baseline), indent=2)
    part = path.with_name(path.name + ".part")
    try:
        part.write_bytes(text + b"\n")
        os.replace(part, path)
    except OSError as error:
        raise UsageError(f"can't write {path}: {error.strerror}") from error


def read_baseline(path: Path) -> Baseline:
    """Read a file. Raises `UsageError` if it is none, or of another version."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"can't read the baseline {path}: {error.strerror}") from error
    try:
        version = msgspec.json.decode(data, type=_OnlyVersion).version
        if version != VERSION:
            raise UsageError(
                f"{path} is a baseline of version {version}, and this emberkv reads version "
                f"{VERSION}: record it again with emberkv baseline"
            )
        return msgspec.json.decode(data, type=Baseline)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is no baseline of emberkv: {error}") from error


class _OnlyVersion(msgspec.Struct):
    version: int
