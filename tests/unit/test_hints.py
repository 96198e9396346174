"""What requests may say of themselves, and what is made of nonsense."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberkv.domain.hints import HINT_NAMES, NO_HINTS, Hints, TokenRange, read_hints

EVERYTHING = {
    "priority": [{"token_start": 0, "token_end": 128, "priority": 90, "duration_ms": 1500}],
    "pin": {"duration_ms": 60_000},
    "session": "chat-17",
    "end_of_session": True,
    "tool_call_pending": False,
    "no_store": False,
    "max_load_tokens": 4096,
    "max_wait_ms": 250,
    "tiers": ["ram", "disk"],
    "tenant": "a",
}


def test_every_hint_is_read() -> None:
    assert set(EVERYTHING) == set(HINT_NAMES)
    read = read_hints(EVERYTHING)
    assert read.unusable == ()
    assert read.hints == Hints(
        priority=(TokenRange(0, 128, 90, 1.5),),
        pin_s=60.0,
        session="chat-17",
        end_of_session=True,
        max_load_tokens=4096,
        max_wait_s=0.25,
        tiers=frozenset({"ram", "disk"}),
        tenant="a",
    )


def test_a_number_is_a_priority_for_everything() -> None:
    assert read_hints({"priority": 80}).hints.priority == (TokenRange(0, None, 80),)


@pytest.mark.parametrize("said", [None, {}])
def test_nothing_said_is_no_hint(said: object) -> None:
    assert read_hints(said).hints == NO_HINTS


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("priority", 101),
        ("priority", -1),
        ("priority", "high"),
        ("priority", True),
        ("priority", [{"priority": 50, "from": 3}]),
        ("priority", [{"token_start": 10, "token_end": 3, "priority": 50}]),
        ("priority", [{"priority": 50}] * 65),
        ("pin", True),
        ("pin", {"duration_ms": -1}),
        ("pin", {"duration_ms": float("nan")}),
        ("session", ""),
        ("session", "x" * 129),
        ("session", 7),
        ("end_of_session", 1),
        ("no_store", "yes"),
        ("max_load_tokens", 1.5),
        ("max_load_tokens", -1),
        ("max_wait_ms", float("inf")),
        ("tiers", "ram"),
        ("tiers", [["ram"]]),
        ("tiers", ["ram", "Disk"]),
        ("tenant", None),
    ],
)
def test_an_ill_typed_hint_is_left_out_and_the_others_count(name: str, value: object) -> None:
    read = read_hints(EVERYTHING | {name: value})
    assert read.unusable == (("invalid", name),)
    other = "session" if name != "session" else "tenant"
    assert getattr(read.hints, other) == EVERYTHING[other]


def test_an_unknown_hint_is_named() -> None:
    read = read_hints({"priorty": 80, "session": "s"})
    assert read.unusable == (("unknown", "priorty"),)
    assert read.hints.session == "s"


def test_a_client_writes_no_lines_of_its_own_into_the_log() -> None:
    ((_, name),) = read_hints({"x\nERROR disk tier damaged": 1}).unusable
    assert name == "x\\nERROR disk tier damaged"
    assert read_hints({"größe": 1}).unusable == (("unknown", "größe"),)


def test_hints_must_be_an_object() -> None:
    assert read_hints([1, 2]).unusable == (("invalid", "emberkv"),)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(HINT_NAMES) | st.text(max_size=4), json_values))
def test_no_nonsense_raises(said: dict[str, object]) -> None:
    read = read_hints(said)
    for name in said:
        known = name in HINT_NAMES
        shown = name if name.isprintable() else name.encode("unicode_escape").decode()
        assert known or ("unknown", shown) in read.unusable
