"""The canary's comparison: two payloads as the numbers they hold, part by part.

    kept row       [rank 0: layer 0 | layer 1 | …][rank 1: …]     what a tier would have served
    recomputed row [rank 0: layer 0 | layer 1 | …][rank 1: …]     what the engine computed instead
                            │ relative distance of each part
                            ▼
                    core.canary.Canary.judge

The order of values inside a part is the engine's own business and the same in both rows. Comparing
costs a pass over both rows in float32, a few hundred MB/s a thread: `Comparer` does it off the
scheduler's thread.
"""

from __future__ import annotations

import enum
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from emberkv.core.canary import Compared
from emberkv.domain.types import ChunkKey, Level, Slot
from emberkv.errors import ConfigError
from emberkv.live.arena import Arena

Values = npt.NDArray[np.float32]
Raw = npt.NDArray[np.uint8]

PIECE_BYTES: Final = 1 << 20
"""Parts are compared in pieces of this size: the temporaries stay in the processor's cache."""


class KvType(enum.Enum):
    """How the values of a KV cache are written."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FP8_E4M3 = "fp8_e4m3"
    FP8_E5M2 = "fp8_e5m2"

    @property
    def value_bytes(self) -> int:
        return _VALUE_BYTES[self]

    @property
    def precision(self) -> float:
        """The relative step from one value to the next."""
        return _PRECISION[self]


_VALUE_BYTES: Final = {
    KvType.FLOAT32: 4,
    KvType.FLOAT16: 2,
    KvType.BFLOAT16: 2,
    KvType.FP8_E4M3: 1,
    KvType.FP8_E5M2: 1,
}
_PRECISION: Final = {
    KvType.FLOAT32: 2.0**-23,
    KvType.FLOAT16: 2.0**-10,
    KvType.BFLOAT16: 2.0**-7,
    KvType.FP8_E4M3: 2.0**-3,
    KvType.FP8_E5M2: 2.0**-2,
}
_ALIASES: Final = {"half": "float16", "float": "float32", "fp8": "fp8_e4m3"}


def kv_type_of(name: str) -> KvType:
    """The type by an engine's name for it, `torch.` in front or not.

    Raises `ConfigError` for a type whose bytes are not plain numbers.
    """
    bare = name.removeprefix("torch.").replace("float8_", "fp8_").removesuffix("fn")
    try:
        return KvType(_ALIASES.get(bare, bare))
    except ValueError:
        known = ", ".join(each.value for each in KvType)
        raise ConfigError(
            f"canary can't compare a KV cache of type {name}; known: {known}"
        ) from None


def _fp8_table(exponent_bits: int, mantissa_bits: int, *, has_infinity: bool) -> Values:
    """The value of each of the 256 bytes; NaN where there is none."""
    bias = (1 << (exponent_bits - 1)) - 1
    top = (1 << exponent_bits) - 1
    table = np.zeros(256, dtype=np.float32)
    for byte in range(256):
        exponent = byte >> mantissa_bits & top
        fraction = (byte & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
        if exponent == 0:
            size = fraction * 2.0 ** (1 - bias)
        else:
            size = (1 + fraction) * 2.0 ** (exponent - bias)
        if has_infinity and exponent == top:
            size = np.nan if fraction else np.inf
        elif not has_infinity and byte & 0x7F == 0x7F:
            size = np.nan
        table[byte] = -size if byte & 0x80 else size
    return table


_FP8_TABLES: Final = {
    KvType.FP8_E4M3: _fp8_table(4, 3, has_infinity=False),
    KvType.FP8_E5M2: _fp8_table(5, 2, has_infinity=True),
}


def values_of(raw: Raw, kv_type: KvType) -> Values:
    """The numbers that bytes hold, as float32; little-endian, as every machine here is."""
    match kv_type:
        case KvType.FLOAT32:
            return raw.view("<f4")
        case KvType.FLOAT16:
            return raw.view("<f2").astype(np.float32)
        case KvType.BFLOAT16:
            # A bfloat16 is the upper half of a float32.
            return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
        case KvType.FP8_E4M3 | KvType.FP8_E5M2:
            return _FP8_TABLES[kv_type][raw]


def distance(kept: Raw, computed: Raw, kv_type: KvType) -> float:
    """The relative distance of two parts: L2 of the difference over the larger L2 of the two.

    0 for equal bytes, whatever they mean; infinite for others of which some are no finite number.
    """
    if np.array_equal(kept, computed):
        return 0.0
    difference = size_kept = size_computed = 0.0
    for start in range(0, len(kept), PIECE_BYTES):
        piece = slice(start, start + PIECE_BYTES)
        one, other = values_of(kept[piece], kv_type), values_of(computed[piece], kv_type)
        if not (np.isfinite(one).all() and np.isfinite(other).all()):
            return float("inf")
        one, other = one.astype(np.float64), other.astype(np.float64)
        difference += float(np.square(one - other).sum())
        size_kept += float(np.square(one).sum())
        size_computed += float(np.square(other).sum())
    # Different bytes of equal value, the two zeros, are no difference.
    return float(np.sqrt(difference / max(size_kept, size_computed))) if difference else 0.0


def distances(
    kept: memoryview, computed: memoryview, kv_type: KvType, parts: int
) -> tuple[float, ...]:
    """The distance of each of the equal parts that two payloads consist of."""
    mine, theirs = (np.frombuffer(each, dtype=np.uint8) for each in (kept, computed))
    if len(mine) != len(theirs) or len(mine) % (parts * kv_type.value_bytes):
        raise ConfigError(
            f"payloads of {len(mine)} and {len(theirs)} bytes are not {parts} equal parts of "
            f"{kv_type.value}"
        )
    pairs = zip(np.split(mine, parts), np.split(theirs, parts), strict=True)
    return tuple(distance(one, other, kv_type) for one, other in pairs)


@dataclass(frozen=True, slots=True)
class KvRows:
    """What an arena's rows hold: so many equal parts, a layer of a rank each, of one type."""

    kv_type: KvType
    parts: int


@dataclass(frozen=True, slots=True)
class Pair:
    """A chunk's kept row and the spare row that its recomputation was written to.

    Both slots must stay as they are until the pair is back from `Comparer.poll`.
    """

    key: ChunkKey
    origin: Level
    kept: Slot
    spare: Slot


class Comparer:
    """Compares rows of an arena on a thread of its own. `submit` and `poll` never block."""

    def __init__(self, arena: Arena, kv_type: KvType, parts: int) -> None:
        self._arena = arena
        self._kv_type = kv_type
        self._parts = parts
        self._jobs: queue.SimpleQueue[Sequence[Pair] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[Pair, Compared]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="emberkv-canary", daemon=True)
        self._thread.start()

    def submit(self, pairs: Sequence[Pair]) -> None:
        """Have rows compared soon."""
        self._jobs.put(tuple(pairs))

    def poll(self) -> list[tuple[Pair, Compared]]:
        """What has been compared since the last time; the slots are the caller's again."""
        found: list[tuple[Pair, Compared]] = []
        while True:
            try:
                found.append(self._done.get_nowait())
            except queue.Empty:
                return found

    def close(self) -> None:
        """End the thread after what it is at; wait for it, since it reads the arena."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (pairs := self._jobs.get()) is not None:
            for pair in pairs:
                rows = (self._arena.row(pair.kept), self._arena.row(pair.spare))
                apart = distances(*rows, self._kv_type, self._parts)
                self._done.put((pair, Compared(pair.key, pair.origin, apart)))
