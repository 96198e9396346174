"""Junk in every file of a slab: refused with the error that is documented, or read truly."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from junk import damaged, resealed

from emberkv.domain.types import MAX_KEY_BYTES, ChunkKey, Outcome
from emberkv.errors import EmberError, StorageError
from emberkv.testing.storage import chunk_key, get, payload_of, put
from emberkv.tiers.format import (
    DATA_FILE,
    HEADER_BYTES,
    INDEX_FILE,
    MAX_EPOCH,
    MAX_SEQUENCE,
    NAMESPACE_FILE,
    RECORD_BYTES,
    SlabGeometry,
    SlabHeader,
    SlotRecord,
    StoredNamespace,
    damaged_slots,
    decode_header,
    decode_namespace,
    decode_record,
    decode_records,
    encode_namespace,
    find_payload_checksum,
)
from emberkv.tiers.payload_file import PayloadFile
from emberkv.tiers.slab_directory import SlabDirectory, describe_slab, find_slabs, purge_slab
from emberkv.tiers.slab_verify import verify_slab

PAYLOAD_BYTES = 100
SLOTS = 6
GEOMETRY = SlabGeometry(SLOTS, PAYLOAD_BYTES)
NAMESPACE = StoredNamespace(bytes(range(16)), {"model": "tiny", "chunk_tokens": 32})
EPOCH = 7

epochs = st.integers(0, MAX_EPOCH)
u64 = st.integers(0, 2**64 - 1)
keys = st.binary(min_size=1, max_size=MAX_KEY_BYTES).map(ChunkKey)
positive = st.integers(1, 2**63)
headers = st.builds(
    lambda slots, size, epoch, digest: SlabHeader(
        SlabGeometry(slots, size), epoch, digest
    ).encode(),
    positive,
    positive,
    epochs,
    st.binary(min_size=8, max_size=32),
)
records = st.builds(
    SlotRecord,
    keys,
    st.none() | keys,
    st.integers(0, SLOTS),
    st.just(EPOCH) | epochs,
    u64,
    u64,
).map(SlotRecord.encode)

HEADER_FIELDS = ((0, 8), (8, 4), (12, 4), (16, 8), (48, 8), (56, 8), (64, 8))
RECORD_FIELDS = (
    (0, 4),
    (4, 2),
    (6, 1),
    (7, 1),
    (8, 8),
    (48, 8),
    (88, 8),
    (96, 8),
    (104, 8),
    (112, 8),
)
junk_headers = (
    st.binary(max_size=HEADER_BYTES)
    | damaged(headers)
    | resealed(headers, HEADER_FIELDS, 72)
    | headers
)
junk_records = (
    st.binary(max_size=RECORD_BYTES)
    | damaged(records)
    | resealed(records, RECORD_FIELDS, 120)
    | records
)


def require_one_line(error: EmberError) -> None:
    assert "\n" not in str(error)


@given(junk_headers)
def test_a_header_is_refused_or_is_one(raw: bytes) -> None:
    try:
        header = decode_header(raw, "here")
    except StorageError as error:
        require_one_line(error)
        return
    assert decode_header(header.encode(), "here") == header
    assert header.encode()[48:72] == raw[48:72]
    assert header.geometry.total_bytes > 0
    # A reset must still be possible.
    SlabHeader(header.geometry, header.epoch + 1, header.digest).encode()


@given(st.lists(junk_records, max_size=5), st.integers(0, 3))
def test_records_one_by_one_and_together_are_judged_alike(
    rows: list[bytes], first_slot: int
) -> None:
    raw = b"".join(row.ljust(RECORD_BYTES, b"\0")[:RECORD_BYTES] for row in rows)
    found, broken = [], []
    for at in range(len(rows)):
        row, slot = raw[at * RECORD_BYTES : (at + 1) * RECORD_BYTES], first_slot + at
        try:
            record = decode_record(row, slot)
        except StorageError:
            broken.append(slot)
            with pytest.raises(StorageError):
                find_payload_checksum(row, slot, ChunkKey(b"k"), EPOCH)
            continue
        if record is None:
            continue
        assert record.slot == slot
        assert 0 < len(record.key) <= MAX_KEY_BYTES
        assert find_payload_checksum(row, slot, record.key, record.epoch) is not None
        assert find_payload_checksum(row, slot, record.key, record.epoch ^ 1) is None
        if record.epoch == EPOCH:
            found.append(record)
    assert decode_records(raw, first_slot, EPOCH) == found
    assert damaged_slots(raw, first_slot) == broken


@given(st.binary(max_size=RECORD_BYTES - 1))
def test_a_cut_record_is_refused(raw: bytes) -> None:
    with pytest.raises(StorageError):
        decode_record(raw, 0)
    assert decode_records(raw, 0, EPOCH) == []
    assert damaged_slots(raw, 0) == []


valid_namespaces = st.builds(
    StoredNamespace,
    st.binary(min_size=8, max_size=32),
    st.dictionaries(st.text(), st.text() | st.integers()),
).map(encode_namespace)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)
documents = st.fixed_dictionaries(
    {},
    optional={
        "format_version": st.just(1) | json_values,
        "digest": st.just("00" * 16) | json_values,
        "fields": json_values,
    },
).map(lambda document: json.dumps(document).encode())


@given(
    st.binary()
    | damaged(valid_namespaces)
    | documents
    | json_values.map(json.dumps).map(str.encode)
)
@example(b"[" * 100_000)
@example(b'{"a":' * 100_000)
@example(b"1" * 10_000)
@example(b'{"format_version": 1, "digest": "\\ud800", "fields": {}}')
def test_a_namespace_file_is_refused_or_is_one(text: bytes) -> None:
    try:
        namespace = decode_namespace(text, "here")
    except StorageError as error:
        require_one_line(error)
        return
    assert 8 <= len(namespace.digest) <= 32
    assert json.loads(text)["fields"].keys() == namespace.fields.keys()


# ── a whole slab ─────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a closed slab that holds a chunk in all slots but the last."""
    root_dir = tmp_path_factory.mktemp("filled")
    slab = SlabDirectory(root_dir, GEOMETRY.total_bytes).open_slab(NAMESPACE, PAYLOAD_BYTES)
    for _ in range(EPOCH - 1):
        slab.reset()
    for number in range(SLOTS - 1):
        assert put(slab, number, number) is Outcome.OK
    slab.close()
    return root_dir / NAMESPACE.directory_name


@contextlib.contextmanager
def copied(directory: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="fuzz-slab-") as made:
        yield Path(shutil.copytree(directory, Path(made) / directory.name))


def serves_only_the_truth(directory: Path) -> None:
    """Open the slab and use it as an owner does: refused as documented, or true and usable."""
    root_dir = directory.parent
    describe_slab(directory)
    with contextlib.suppress(StorageError):
        verify_slab(directory, lambda _done, _total: None)
    try:
        slab = SlabDirectory(root_dir, GEOMETRY.total_bytes).open_slab(NAMESPACE, PAYLOAD_BYTES)
    except EmberError as error:
        require_one_line(error)
        for found in find_slabs(root_dir):
            purge_slab(found)
        return
    try:
        for entry in slab.entries():
            assert 0 <= entry.slot < SLOTS
        for slot in range(SLOTS):
            outcome, payload = get(slab, slot, slot)
            assert outcome is not Outcome.OK or payload == payload_of(slot, PAYLOAD_BYTES)
        assert put(slab, 50, 2) is Outcome.OK
        assert get(slab, 50, 2) == (Outcome.OK, payload_of(50, PAYLOAD_BYTES))
        assert chunk_key(50) in {entry.key for entry in slab.entries()}
        slab.reset()
        assert list(slab.entries()) == []
        assert get(slab, 50, 2)[0] is Outcome.ABSENT
    finally:
        slab.close()


@given(data=st.data())
def test_a_slab_with_a_strange_index_serves_only_the_truth(
    filled: Path, data: st.DataObject
) -> None:
    valid = (filled / INDEX_FILE).read_bytes()
    header, rows = valid[:HEADER_BYTES], valid[HEADER_BYTES:]
    if data.draw(st.booleans()):
        kinds = damaged(st.just(header)) | resealed(st.just(header), HEADER_FIELDS, 72)
        header = data.draw(kinds).ljust(HEADER_BYTES, b"\0")[:HEADER_BYTES]
    if data.draw(st.booleans()):
        slot = data.draw(st.integers(0, SLOTS - 1))
        row = data.draw(
            junk_records
            | resealed(st.just(rows[:RECORD_BYTES]), RECORD_FIELDS, 120)
            | st.just(rows[:RECORD_BYTES])
        )
        row = row.ljust(RECORD_BYTES, b"\0")[:RECORD_BYTES]
        rows = rows[: slot * RECORD_BYTES] + row + rows[(slot + 1) * RECORD_BYTES :]
    raw = header + rows
    if data.draw(st.integers(0, 4)) == 0:
        raw = raw[: data.draw(st.integers(0, len(raw)))]
    with copied(filled) as directory:
        (directory / INDEX_FILE).write_bytes(raw)
        serves_only_the_truth(directory)


@given(
    name=st.sampled_from([DATA_FILE, NAMESPACE_FILE, "lock"]),
    size=st.none() | st.integers(0, GEOMETRY.data_bytes),
    data=st.data(),
)
def test_a_slab_with_another_strange_file_serves_only_the_truth(
    filled: Path, name: str, size: int | None, data: st.DataObject
) -> None:
    raw = data.draw(damaged(st.just((filled / name).read_bytes())))
    with copied(filled) as directory:
        (directory / name).write_bytes(raw if size is None else raw[:size])
        serves_only_the_truth(directory)


@given(slot_count=st.sampled_from([2**20, 2**40, 2**63]), payload_bytes=st.sampled_from([1, 2**62]))
@settings(max_examples=6)
def test_a_header_that_promises_too_much_costs_no_time(
    filled: Path, slot_count: int, payload_bytes: int
) -> None:
    header = SlabHeader(SlabGeometry(slot_count, payload_bytes), EPOCH, NAMESPACE.digest)
    with copied(filled) as directory:
        raw = (directory / INDEX_FILE).read_bytes()
        (directory / INDEX_FILE).write_bytes(header.encode() + raw[HEADER_BYTES:])
        assert "truncated" in (describe_slab(directory).problem or "")
        with pytest.raises(StorageError, match="truncated"):
            verify_slab(directory, lambda _done, _total: None)
        with pytest.raises(StorageError):
            SlabDirectory(directory.parent, GEOMETRY.total_bytes).open_slab(
                NAMESPACE, PAYLOAD_BYTES
            )


@given(
    size=st.integers(0, GEOMETRY.data_bytes + 5000),
    first_slot=st.integers(0, SLOTS + 2),
    count=st.integers(1, 4),
)
def test_payloads_of_a_file_of_any_size_are_read_or_left(
    size: int, first_slot: int, count: int
) -> None:
    """What lies before the file's end comes back; behind it is undefined, and no error."""
    content = payload_of(1, size)
    with tempfile.TemporaryFile(buffering=0) as file:
        file.write(content)
        for payload_bytes in (PAYLOAD_BYTES, 4096):
            geometry = SlabGeometry(SLOTS, payload_bytes)
            rooms = [bytearray(payload_bytes) for _ in range(count)]
            payloads = PayloadFile(file.fileno(), geometry, direct_io=False)
            payloads.read(first_slot, [memoryview(room) for room in rooms])
            for at, room in enumerate(rooms, first_slot):
                start = at * geometry.stride_bytes
                if start + geometry.stride_bytes <= size:
                    assert room == content[start : start + payload_bytes]


def test_an_epoch_that_no_slab_reaches_is_damage() -> None:
    raw = SlabHeader(GEOMETRY, MAX_EPOCH + 1, NAMESPACE.digest).encode()
    with pytest.raises(StorageError, match="damaged"):
        decode_header(raw, "here")


def test_after_the_last_sequence_writes_go_on(filled: Path) -> None:
    last = SlotRecord(chunk_key(9), None, SLOTS - 1, EPOCH, MAX_SEQUENCE, 0)
    with copied(filled) as directory:
        raw = (directory / INDEX_FILE).read_bytes()
        (directory / INDEX_FILE).write_bytes(raw[:-RECORD_BYTES] + last.encode())
        serves_only_the_truth(directory)
