"""The bytes of the format: stable, and every damaged bit noticed."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberkv.domain.types import MAX_KEY_BYTES, ChunkKey
from emberkv.errors import ConfigError, InvariantError, StorageError
from emberkv.tiers.format import (
    EMPTY_RECORD,
    HEADER_BYTES,
    RECORD_BYTES,
    SlabGeometry,
    SlabHeader,
    SlotRecord,
    StoredNamespace,
    decode_header,
    decode_namespace,
    decode_record,
    decode_records,
    encode_namespace,
    slots_that_fit,
    stride_bytes,
)

u64 = st.integers(0, 2**64 - 1)
keys = st.binary(min_size=1, max_size=MAX_KEY_BYTES).map(ChunkKey)
records = st.builds(SlotRecord, keys, st.none() | keys, u64, u64, u64, u64)
HEADER = SlabHeader(SlabGeometry(10, 5000), 7, bytes(range(16)))
RECORD = SlotRecord(ChunkKey(b"key" * 8), ChunkKey(b"parent"), 3, 7, 11, 2**64 - 5)

GOLDEN_HEADER = (
    "454d424b56534c420100000010000000000102030405060708090a0b0c0d0e0f0000000000000000"
    "00000000000000000a000000000000008813000000000000070000000000000077b21eaeec63cb8e"
)
GOLDEN_RECORD = (
    "454d4252010018066b65796b65796b65796b65796b65796b65796b65796b65790000000000000000"
    "0000000000000000706172656e740000000000000000000000000000000000000000000000000000"
    "000000000000000007000000000000000b00000000000000fbffffffffffffff0300000000000000"
    "8e04f03db6f4d3e8"
)
GOLDEN_NAMESPACE = "a6283d3c63d60cfaacd8692b92894a7c34faccfbdba9325fd25475c75035e3ed"


@given(records)
def test_a_record_comes_back(record: SlotRecord) -> None:
    raw = record.encode()
    assert len(raw) == RECORD_BYTES
    assert decode_record(raw, record.slot) == record
    if record.slot < 2**63:
        assert decode_records(raw, record.slot, record.epoch) == [record]
        assert decode_records(raw, record.slot, record.epoch ^ 1) == []
        assert decode_records(raw, record.slot + 1, record.epoch) == []


def test_every_flipped_bit_of_a_record_is_noticed() -> None:
    raw = RECORD.encode()
    for bit in range(8 * RECORD_BYTES):
        flipped = bytearray(raw)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(StorageError, match="damaged"):
            decode_record(bytes(flipped), RECORD.slot)
        assert decode_records(bytes(flipped), RECORD.slot, RECORD.epoch) == []


def test_every_flipped_bit_of_a_header_is_noticed() -> None:
    raw = HEADER.encode()
    assert decode_header(raw, "here") == HEADER
    for bit in range(8 * 80):
        flipped = bytearray(raw)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(StorageError):
            decode_header(bytes(flipped), "here")


def test_an_empty_record_is_no_record() -> None:
    assert decode_record(EMPTY_RECORD, 0) is None
    assert decode_records(EMPTY_RECORD * 5, 0, 0) == []
    with pytest.raises(StorageError, match="cut short"):
        decode_record(RECORD.encode()[:-1], RECORD.slot)


@given(st.lists(st.none() | records, max_size=20), st.integers(0, 1000))
def test_many_records_decode_as_one_by_one(
    given_records: list[SlotRecord | None], first_slot: int
) -> None:
    placed = [
        record
        and SlotRecord(
            record.key, record.parent, first_slot + at, 5, record.sequence, record.payload_checksum
        )
        for at, record in enumerate(given_records)
    ]
    raw = b"".join(record.encode() if record else EMPTY_RECORD for record in placed)
    assert decode_records(raw, first_slot, 5) == [record for record in placed if record]


def test_the_bytes_do_not_change_unnoticed() -> None:
    """If this fails, the format changed: give it a new version and update docs/format.md."""
    header, record = HEADER.encode(), RECORD.encode()
    assert len(header) == HEADER_BYTES
    assert header[:80].hex() == GOLDEN_HEADER
    assert record.hex() == GOLDEN_RECORD
    namespace = encode_namespace(StoredNamespace(bytes(range(16)), {"model": "tiny", "tokens": 32}))
    assert hashlib.sha256(namespace).hexdigest() == GOLDEN_NAMESPACE


@pytest.mark.parametrize("key", [b"", b"x" * 41])
def test_a_key_of_the_wrong_length_is_our_own_defect(key: bytes) -> None:
    with pytest.raises(InvariantError):
        SlotRecord(ChunkKey(key), None, 0, 1, 1, 0).encode()
    with pytest.raises(InvariantError):
        SlotRecord(ChunkKey(b"k"), ChunkKey(b"x" * 41), 0, 1, 1, 0).encode()


@given(st.binary(min_size=8, max_size=32), st.dictionaries(st.text(), st.text() | st.integers()))
def test_a_namespace_comes_back(digest: bytes, fields: dict[str, str | int]) -> None:
    namespace = StoredNamespace(digest, fields)
    assert decode_namespace(encode_namespace(namespace), "here") == namespace


@pytest.mark.parametrize("length", [0, 7, 33])
def test_a_digest_has_a_length(length: int) -> None:
    with pytest.raises(ConfigError, match="digest"):
        StoredNamespace(bytes(length), {})


@given(st.integers(1, 2**40), st.integers(1, 2**24))
def test_as_many_slots_as_fit(size_bytes: int, payload_bytes: int) -> None:
    slots = slots_that_fit(size_bytes, payload_bytes)
    assert stride_bytes(payload_bytes) % 4096 == 0
    assert stride_bytes(payload_bytes) - payload_bytes in range(4096)
    if slots:
        assert SlabGeometry(slots, payload_bytes).total_bytes <= size_bytes
    assert SlabGeometry(slots + 1, payload_bytes).total_bytes > size_bytes


@pytest.mark.parametrize(("slots", "payload"), [(0, 1), (-1, 1), (1, 0), (1, -5)])
def test_a_geometry_has_slots_and_bytes(slots: int, payload: int) -> None:
    with pytest.raises(ConfigError, match="at least one"):
        SlabGeometry(slots, payload)
