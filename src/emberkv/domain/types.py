"""Ids and small values that every layer speaks in.

Words are those of the glossary: a *chunk* is what we keep and move, a *key* names the whole
prefix up to the chunk's end, a *level* is a tier's place (0 = host RAM), a *slot* is a chunk's
fixed place inside a tier.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final, NewType

ChunkKey = NewType("ChunkKey", bytes)
"""Opaque name of a chunk; at most `MAX_KEY_BYTES` long; equal keys mean equal whole prefixes."""

RequestId = NewType("RequestId", str)
TransferId = NewType("TransferId", int)
VisitId = NewType("VisitId", int)
TenantName = NewType("TenantName", str)
Level = NewType("Level", int)
Slot = NewType("Slot", int)

RAM: Final = Level(0)
DISK: Final = Level(1)

MAX_KEY_BYTES: Final = 40

TIER_NAMES: Final = ("ram", "disk")
"""What people call the levels."""


class Outcome(enum.Enum):
    """How the transfer of one chunk ended."""

    OK = "ok"
    ABSENT = "absent"  # the place holds another chunk, or none
    CORRUPT = "corrupt"  # the bytes do not match their checksum
    FAILED = "failed"  # the device or file system returned an error
    FULL = "full"  # no space left
    SHED = "shed"  # not tried: queue full, tier off, or shutting down


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy a run of chunks from one tier to another; the source stays.

    `keys`, `parents`, `source_slots` and `target_slots` run in parallel, head first. A parent is
    the key of the chunk before, or None for the head of a chain.
    """

    transfer: TransferId
    source: Level
    target: Level
    keys: tuple[ChunkKey, ...]
    parents: tuple[ChunkKey | None, ...]
    source_slots: tuple[Slot, ...]
    target_slots: tuple[Slot, ...]


@dataclass(frozen=True, slots=True)
class Drop:
    """Forget chunks of a tier: their slots no longer hold anything."""

    level: Level
    keys: tuple[ChunkKey, ...]
    slots: tuple[Slot, ...]


Effect = Copy | Drop


@dataclass(frozen=True, slots=True)
class Entry:
    """A chunk found in a tier at start: what a tier's own records say of it."""

    key: ChunkKey
    parent: ChunkKey | None
    slot: Slot
