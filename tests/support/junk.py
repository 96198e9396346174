"""Junk for parsers: raw bytes, and valid bytes that were damaged in a way that hurts."""

from __future__ import annotations

import struct

import msgspec
import xxhash
from hypothesis import strategies as st

EXTREMES = (0, 1, 2**7, 2**8 - 1, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1)
WIDE_EXTREMES = (*EXTREMES, 2**32, 2**40, 2**48, 2**48 + 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1)


@st.composite
def damaged(draw: st.DrawFn, valid: st.SearchStrategy[bytes]) -> bytes:
    """Valid bytes after a few of: a flip, a cut, an insertion, a repetition, a number changed."""
    raw = bytearray(draw(valid))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(raw)))
        match draw(st.integers(0, 5)):
            case 0 if at < len(raw):
                raw[at] ^= 1 << draw(st.integers(0, 7))
            case 1:
                del raw[at:]
            case 2:
                raw[at:at] = draw(st.binary(max_size=20))
            case 3:
                raw[at:at] = raw[at : at + draw(st.integers(0, 40))]
            case 4:
                size = draw(st.sampled_from([1, 2, 4, 8]))
                value = draw(st.sampled_from(WIDE_EXTREMES)) % 256**size
                order = draw(st.sampled_from(["big", "little"]))
                raw[at : at + size] = value.to_bytes(size, order)
            case _:
                del raw[at : at + draw(st.integers(1, 8))]
    return bytes(raw)


@st.composite
def resealed(
    draw: st.DrawFn, valid: st.SearchStrategy[bytes], fields: tuple[tuple[int, int], ...], end: int
) -> bytes:
    """Valid bytes with fields (offset, size) set to extremes and a checksum at `end` that fits."""
    raw = bytearray(draw(valid))
    for offset, size in draw(st.lists(st.sampled_from(fields), min_size=1, max_size=4)):
        value = draw(st.sampled_from(WIDE_EXTREMES) | st.integers(0, 2**64 - 1))
        raw[offset : offset + size] = (value % 256**size).to_bytes(size, "little")
    raw[end : end + 8] = struct.pack("<Q", xxhash.xxh3_64_intdigest(raw[:end]))
    return bytes(raw)


plain_values = st.recursive(
    st.none()
    | st.booleans()
    | st.sampled_from(WIDE_EXTREMES)
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=12)
    | st.binary(max_size=50),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=15,
)


@st.composite
def reshaped(draw: st.DrawFn, messages: st.SearchStrategy[msgspec.Struct]) -> bytes:
    """A message in which some part, however deep, was replaced, removed, repeated or nested."""
    tree = msgspec.msgpack.decode(msgspec.msgpack.encode(draw(messages)))
    spots: list[tuple[list[object], int]] = []

    def walk(node: object) -> None:
        if isinstance(node, list):
            for at, child in enumerate(node):
                spots.append((node, at))
                walk(child)

    walk(tree)
    for _ in range(draw(st.integers(1, 3))):
        parent, at = draw(st.sampled_from(spots))
        if at >= len(parent):
            continue
        match draw(st.integers(0, 4)):
            case 0:
                parent[at] = draw(plain_values)
            case 1:
                del parent[at]
            case 2:
                parent.insert(at, parent[at])
            case 3:
                parent[at] = [parent[at]]
            case _:
                parent[at] = draw(st.sampled_from(WIDE_EXTREMES))
    return msgspec.msgpack.encode(tree)


def nested(depth: int) -> bytes:
    """A message with something in it that is nested this deep."""
    return b"\x92\xa7status?" + b"\x91" * depth + b"\x90"
