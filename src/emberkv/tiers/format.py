"""The on-disk format of a slab: file header, records, namespace file.

A slab is a directory `emberkv-<16 hex digits of the namespace digest>` with four files:
`slab.data` (the payloads, one per slot), `slab.index` (one header, then one record per slot),
`namespace.json` and `lock`. `docs/format.md` describes every field. This module only encodes and
decodes; it opens no file.

Correctness never depends on the order in which bytes reach the device: a record names the
checksum of its payload, and every read verifies it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from emberkv.domain.types import MAX_KEY_BYTES, ChunkKey
from emberkv.errors import ConfigError, InvariantError, StorageError

FORMAT_VERSION: Final = 1
DIRECTORY_PREFIX: Final = "emberkv-"
DATA_FILE: Final = "slab.data"
INDEX_FILE: Final = "slab.index"
NAMESPACE_FILE: Final = "namespace.json"
LOCK_FILE: Final = "lock"
PROBE_FILE: Final = "probe"
OUR_FILES: Final = (DATA_FILE, PROBE_FILE, NAMESPACE_FILE, INDEX_FILE, LOCK_FILE)

ALIGNMENT_BYTES: Final = 4096
HEADER_BYTES: Final = 4096
RECORD_BYTES: Final = 128
MAX_DIGEST_BYTES: Final = 32
MAX_NAMESPACE_FILE_BYTES: Final = 1 << 20

MAX_EPOCH: Final = (1 << 63) - 1
"""It goes up by one with a reset, so that more means damage."""

MAX_SEQUENCE: Final = (1 << 64) - 1

INDEX_MAGIC: Final = b"EMBKVSLB"
RECORD_MAGIC: Final = b"EMBR"
EMPTY_RECORD: Final = bytes(RECORD_BYTES)

_IN_USE: Final = 1
_HEADER: Final = struct.Struct("<8sII32sQQQ")
_CHECKSUM: Final = struct.Struct("<Q")
_RECORD: Final = struct.Struct("<4sHBB40s40sQQQQ")
_RECORD_BODY_BYTES: Final = _RECORD.size

_RECORD_DTYPE: Final = np.dtype(
    [
        ("magic", "<u4"),
        ("flags", "<u2"),
        ("key_length", "u1"),
        ("parent_length", "u1"),
        ("key", "V40"),
        ("parent", "V40"),
        ("epoch", "<u8"),
        ("sequence", "<u8"),
        ("payload_checksum", "<u8"),
        ("slot", "<u8"),
        ("checksum", "<u8"),
    ]
)

START_AFRESH: Final = "run `emberkv purge` on the directory to start afresh"

JsonValue = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class StoredNamespace:
    """What must be equal for the bytes of a slab to be reusable.

    `digest` (8 to 32 bytes) names the directory; `fields` are what it was made from, kept beside
    the data for people and compared on opening.
    """

    digest: bytes
    fields: Mapping[str, JsonValue]

    def __post_init__(self) -> None:
        if not 8 <= len(self.digest) <= MAX_DIGEST_BYTES:
            raise ConfigError(
                f"a namespace digest has 8 to {MAX_DIGEST_BYTES} bytes, not {len(self.digest)}"
            )

    @property
    def directory_name(self) -> str:
        return DIRECTORY_PREFIX + self.digest[:8].hex()


@dataclass(frozen=True, slots=True)
class SlabGeometry:
    """How many slots a slab has, and how large their payloads are."""

    slot_count: int
    payload_bytes: int

    def __post_init__(self) -> None:
        if self.payload_bytes <= 0:
            raise ConfigError(f"a chunk must have at least one byte, not {self.payload_bytes}")
        if self.slot_count <= 0:
            raise ConfigError(f"a slab must have at least one slot, not {self.slot_count}")

    @property
    def stride_bytes(self) -> int:
        """Distance from one slot to the next in `slab.data`."""
        return stride_bytes(self.payload_bytes)

    @property
    def data_bytes(self) -> int:
        return self.slot_count * self.stride_bytes

    @property
    def index_bytes(self) -> int:
        return HEADER_BYTES + self.slot_count * RECORD_BYTES

    @property
    def total_bytes(self) -> int:
        return self.data_bytes + self.index_bytes


def stride_bytes(payload_bytes: int) -> int:
    """Bytes a payload takes on disk: rounded up to whole `ALIGNMENT_BYTES`."""
    return -(-payload_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def slots_that_fit(size_bytes: int, payload_bytes: int) -> int:
    """How many slots a slab of at most `size_bytes`, index included, can have (0 if none)."""
    if payload_bytes <= 0:
        raise ConfigError(f"a chunk must have at least one byte, not {payload_bytes}")
    return max(0, (size_bytes - HEADER_BYTES) // (stride_bytes(payload_bytes) + RECORD_BYTES))


@dataclass(frozen=True, slots=True)
class SlabHeader:
    """The first 4096 bytes of `slab.index`."""

    geometry: SlabGeometry
    epoch: int
    digest: bytes

    def encode(self) -> bytes:
        body = _HEADER.pack(
            INDEX_MAGIC,
            FORMAT_VERSION,
            len(self.digest),
            self.digest,
            self.geometry.slot_count,
            self.geometry.payload_bytes,
            self.epoch,
        )
        checksum = _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body))
        return (body + checksum).ljust(HEADER_BYTES, b"\0")


def has_index_magic(header: bytes) -> bool:
    """Whether a file that begins with `header` is an index of ours, of whatever version."""
    return header.startswith(INDEX_MAGIC)


def decode_header(header: bytes, place: str) -> SlabHeader:
    """Decode the header of the slab at `place`. Raises `StorageError` for anything not ours."""
    if not has_index_magic(header):
        raise StorageError(
            f"{place}: {INDEX_FILE} is not a file of emberkv; move it away or use another directory"
        )
    if len(header) < HEADER_BYTES:
        raise StorageError(f"{place}: {INDEX_FILE} is cut short; {START_AFRESH}")
    _, version, digest_length, digest, slot_count, payload_bytes, epoch = _HEADER.unpack_from(
        header
    )
    if version != FORMAT_VERSION:
        raise StorageError(
            f"{place}: the slab has format version {version}, this emberkv reads "
            f"{FORMAT_VERSION}; {START_AFRESH}"
        )
    (checksum,) = _CHECKSUM.unpack_from(header, _HEADER.size)
    sound = checksum == xxhash.xxh3_64_intdigest(header[: _HEADER.size])
    plausible = 8 <= digest_length <= MAX_DIGEST_BYTES and epoch <= MAX_EPOCH
    if not sound or not plausible or not slot_count * payload_bytes:
        raise StorageError(f"{place}: the header of {INDEX_FILE} is damaged; {START_AFRESH}")
    return SlabHeader(SlabGeometry(slot_count, payload_bytes), epoch, digest[:digest_length])


@dataclass(frozen=True, slots=True)
class SlotRecord:
    """What the index says of one slot in use."""

    key: ChunkKey
    parent: ChunkKey | None
    slot: int
    epoch: int
    sequence: int
    payload_checksum: int

    def encode(self) -> bytes:
        """The record's 128 bytes."""
        key, parent = self.key, self.parent or b""
        if not 0 < len(key) <= MAX_KEY_BYTES or len(parent) > MAX_KEY_BYTES:
            raise InvariantError(f"a key has 1 to {MAX_KEY_BYTES} bytes: {key!r}, {parent!r}")
        body = _RECORD.pack(
            RECORD_MAGIC,
            _IN_USE,
            len(key),
            len(parent),
            key,
            parent,
            self.epoch,
            self.sequence,
            self.payload_checksum,
            self.slot,
        )
        return body + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body))


def decode_record(raw: bytes, slot: int) -> SlotRecord | None:
    """The record in `raw`, or None for an empty slot. Raises `StorageError` if damaged."""
    if raw == EMPTY_RECORD:
        return None
    key, parent, epoch, sequence, payload_checksum = _unpack_sound(raw, slot)
    return SlotRecord(
        ChunkKey(key), ChunkKey(parent) if parent else None, slot, epoch, sequence, payload_checksum
    )


def find_payload_checksum(raw: bytes, slot: int, key: ChunkKey, epoch: int) -> int | None:
    """The payload's checksum if the record in `raw` is of `key` and `epoch`, else None.

    As `decode_record`, without making the record. Raises `StorageError` if damaged.
    """
    if raw == EMPTY_RECORD:
        return None
    own_key, _, own_epoch, _, payload_checksum = _unpack_sound(raw, slot)
    return payload_checksum if own_key == key and own_epoch == epoch else None


def _unpack_sound(raw: bytes, slot: int) -> tuple[bytes, bytes, int, int, int]:
    """Key, parent's key, epoch, sequence and payload checksum of a record that is whole."""
    if len(raw) != RECORD_BYTES:
        raise StorageError(f"the record of slot {slot} is cut short")
    magic, flags, key_length, parent_length, key, parent, epoch, sequence, payload, own_slot = (
        _RECORD.unpack_from(raw)
    )
    (checksum,) = _CHECKSUM.unpack_from(raw, _RECORD_BODY_BYTES)
    if (
        checksum != xxhash.xxh3_64_intdigest(raw[:_RECORD_BODY_BYTES])
        or magic != RECORD_MAGIC
        or flags != _IN_USE
        or own_slot != slot
        or not 0 < key_length <= MAX_KEY_BYTES
        or parent_length > MAX_KEY_BYTES
    ):
        raise StorageError(f"the record of slot {slot} is damaged")
    return key[:key_length], parent[:parent_length], epoch, sequence, payload


def decode_records(raw: bytes, first_slot: int, epoch: int) -> list[SlotRecord]:
    """The sound records of `epoch` in a stretch of the index that begins at `first_slot`.

    Damaged records and those of another epoch are left out. About a microsecond per record.
    """
    count = len(raw) // RECORD_BYTES
    table = np.frombuffer(raw, dtype=_RECORD_DTYPE, count=count)
    chosen = np.flatnonzero(_plausible(table, first_slot, epoch))
    view = memoryview(raw)
    found: list[SlotRecord] = []
    columns = table[chosen]
    rows = zip(
        chosen.tolist(),
        columns["key_length"].tolist(),
        columns["parent_length"].tolist(),
        columns["sequence"].tolist(),
        columns["payload_checksum"].tolist(),
        columns["checksum"].tolist(),
        strict=True,
    )
    for row, key_length, parent_length, sequence, payload_checksum, checksum in rows:
        at = row * RECORD_BYTES
        if xxhash.xxh3_64_intdigest(view[at : at + _RECORD_BODY_BYTES]) != checksum:
            continue
        key = raw[at + 8 : at + 8 + key_length]
        parent = raw[at + 48 : at + 48 + parent_length] if parent_length else None
        found.append(
            SlotRecord(
                ChunkKey(key),
                None if parent is None else ChunkKey(parent),
                first_slot + row,
                epoch,
                sequence,
                payload_checksum,
            )
        )
    return found


def _plausible(table: npt.NDArray[np.void], first_slot: int, epoch: int) -> npt.NDArray[np.bool_]:
    """Which rows look like records of `epoch` in their own place, before their checksum is read."""
    magic = int.from_bytes(RECORD_MAGIC, "little")
    slots = np.arange(first_slot, first_slot + len(table), dtype=np.uint64)
    plausible: npt.NDArray[np.bool_] = (
        (table["magic"] == magic)
        & (table["flags"] == _IN_USE)
        & (table["epoch"] == np.uint64(epoch))
        & (table["slot"] == slots)
        & (table["key_length"] > 0)
        & (table["key_length"] <= MAX_KEY_BYTES)
        & (table["parent_length"] <= MAX_KEY_BYTES)
    )
    return plausible


def damaged_slots(raw: bytes, first_slot: int) -> list[int]:
    """Slots of a stretch of the index whose record is neither empty nor sound, of any epoch."""
    count = len(raw) // RECORD_BYTES
    table = np.frombuffer(raw, np.uint8, count * RECORD_BYTES).reshape(count, RECORD_BYTES)
    found: list[int] = []
    for row in np.flatnonzero(table.any(axis=1)).tolist():
        try:
            decode_record(raw[row * RECORD_BYTES : (row + 1) * RECORD_BYTES], first_slot + row)
        except StorageError:
            found.append(first_slot + row)
    return found


def encode_namespace(namespace: StoredNamespace) -> bytes:
    """The text of `namespace.json`."""
    document = {
        "format_version": FORMAT_VERSION,
        "digest": namespace.digest.hex(),
        "fields": dict(namespace.fields),
    }
    return (json.dumps(document, indent=2, sort_keys=True) + "\n").encode()


def decode_namespace(text: bytes, place: str) -> StoredNamespace:
    """Decode `namespace.json`. Raises `StorageError` if it is not what emberkv writes."""
    damaged = StorageError(f"{place}: {NAMESPACE_FILE} is damaged; {START_AFRESH}")
    try:
        document = json.loads(text)
        version = document["format_version"]
        digest = bytes.fromhex(document["digest"])
        fields = document["fields"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise damaged from error
    if version != FORMAT_VERSION or not isinstance(fields, dict):
        raise damaged
    if not 8 <= len(digest) <= MAX_DIGEST_BYTES:
        raise damaged
    return StoredNamespace(digest, fields)
