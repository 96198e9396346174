"""Namespaces: equal facts give equal digests, and a difference can be named."""

from __future__ import annotations

import dataclasses

import pytest

from emberkv.domain.namespace import Namespace
from emberkv.errors import InvariantError


def test_the_digest_does_not_depend_on_the_order_of_the_fields() -> None:
    one = Namespace((("model", "m"), ("dtype", "float32")))
    other = Namespace((("dtype", "float32"), ("model", "m")))
    assert one.digest == other.digest
    assert one.differences(other) == ()


def test_the_digest_is_the_same_in_every_process_and_release() -> None:
    """A golden value: changing it orphans every tier on every disk."""
    namespace = Namespace.of({"model": "m", "dtype": "flöat32"})
    assert namespace.digest == "202d2ffa469e62e32486b6d4606dade7fcad01e68bc5cc221815064702c8fe0d"
    assert namespace.short == namespace.digest[:16]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": "1", "b": "2"}, {"a": "1", "b": "3"}),
        ({"a": "1"}, {"a": "1", "b": ""}),
        ({"a": "1b", "c": "2"}, {"a": "1", "bc": "2"}),
        ({"a": '1","b":"2'}, {"a": "1", "b": "2"}),
    ],
)
def test_different_facts_have_different_digests(one: dict[str, str], other: dict[str, str]) -> None:
    assert Namespace.of(one).digest != Namespace.of(other).digest


def test_differences_are_named_in_reading_order() -> None:
    mine = Namespace.of({"model": "m", "dtype": "float32", "layout": "a"})
    theirs = Namespace.of({"isa": "amx", "dtype": "bfloat16", "model": "m"})
    assert mine.differences(theirs) == ("dtype", "layout", "isa")
    assert theirs.differences(mine) == ("isa", "dtype", "layout")


def test_a_field_is_named_once() -> None:
    with pytest.raises(InvariantError, match="each field once"):
        Namespace((("model", "m"), ("model", "n")))
    with pytest.raises(InvariantError, match="each field once"):
        Namespace((("", "m"),))


def test_a_namespace_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Namespace(()).fields = (("model", "m"),)  # type: ignore[misc]
