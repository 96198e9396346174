"""Slabs made ready for a measurement, without writing what the measurement does not need."""

from __future__ import annotations

from pathlib import Path

from emberkv.domain.types import ChunkKey
from emberkv.tiers.format import HEADER_BYTES, INDEX_FILE, SlotRecord, StoredNamespace
from support.chains import chain_of
from support.tiers import NAMESPACE

CHAIN_CHUNKS = 1000


def fill_index(root_dir: Path, chunk_bytes: int, slots: int) -> None:
    """Give every slot of a closed slab a sound record: chains of 1,000 chunks. No payload."""
    stored = StoredNamespace(bytes.fromhex(NAMESPACE.digest), dict(NAMESPACE.fields))
    keys = chain_of("index", slots)
    rows = b"".join(
        SlotRecord(
            ChunkKey(keys[slot]),
            ChunkKey(keys[slot - 1]) if slot % CHAIN_CHUNKS else None,
            slot,
            1,
            slot + 1,
            0,
        ).encode()
        for slot in range(slots)
    )
    with (root_dir / stored.directory_name / INDEX_FILE).open("r+b") as index:
        index.seek(HEADER_BYTES)
        index.write(rows)
