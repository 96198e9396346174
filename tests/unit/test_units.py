"""Sizes read and written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberkv.domain.units import format_size, parse_size, size_argument
from emberkv.errors import UsageError


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("16GiB", 16 << 30),
        ("512MiB", 512 << 20),
        ("1.5GB", 1_500_000_000),
        ("1.5gib", 3 << 29),
        (" 2 TiB ", 2 << 40),
        ("4096", 4096),
        ("7 B", 7),
        ("0.1KiB", 102),
    ],
)
def test_sizes_are_read(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "0", "0GiB", "1e9", "1,5GB", "ten", "5XB"])
def test_what_is_no_size_is_an_error(text: str) -> None:
    with pytest.raises(UsageError, match=r"16GiB|greater than 0"):
        parse_size(text)


def test_a_unit_with_two_meanings_is_asked_back() -> None:
    with pytest.raises(UsageError, match=r"16GiB \(1024\) or 16GB \(1000\)"):
        parse_size("16g")


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (16 << 30, "16.0 GiB")],
)
def test_sizes_are_shown(size_bytes: int, text: str) -> None:
    assert format_size(size_bytes) == text


@given(st.integers(1, 1 << 58))
def test_a_size_as_an_argument_is_never_more_than_it_was(size_bytes: int) -> None:
    again = parse_size(size_argument(size_bytes))
    assert again <= size_bytes
    assert again >= size_bytes * 0.9
