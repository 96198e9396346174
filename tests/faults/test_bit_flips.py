"""Every class of byte positions that emberkv reads back, with single bits flipped."""

from __future__ import annotations

import random

import pytest
from bit_flips import ArenaFlips, FlipClass, SlabFlips


@pytest.fixture(scope="module")
def slab_classes(tmp_path_factory: pytest.TempPathFactory) -> list[FlipClass]:
    return SlabFlips(tmp_path_factory.mktemp("slab"), random.Random(0)).all()


@pytest.fixture(scope="module")
def arena_classes() -> list[FlipClass]:
    flips = ArenaFlips(random.Random(0))
    classes = flips.all()
    flips.close()
    return classes


def all_noticed(classes: list[FlipClass]) -> None:
    wrong = [line for each in classes for line in each.wrong]
    assert not wrong, "\n".join(wrong[:20])
    for each in classes:
        print(f"{each.name}: {each.detected} detected, {each.harmless} harmless of {each.flips}")
        assert each.detected + each.harmless == each.flips > 0
        if not each.why_harmless:
            assert each.harmless == 0


def test_a_flipped_bit_of_the_slab_is_noticed_or_changes_nothing(
    slab_classes: list[FlipClass],
) -> None:
    all_noticed(slab_classes)
    assert sum(each.flips for each in slab_classes) > 7000


def test_a_flipped_bit_of_the_arena_is_noticed_or_changes_nothing(
    arena_classes: list[FlipClass],
) -> None:
    all_noticed(arena_classes)
    assert sum(each.flips for each in arena_classes) > 6000


def test_whoever_looks_would_see_a_wrong_byte() -> None:
    """The counting itself: another chunk's bytes, a lost neighbour, nothing noticed."""
    key, other = b"k", b"o"
    before = ((key, None, 0, b"x"), (other, None, 1, b"y"))
    found = FlipClass("one")
    found.count("bytes", before, ((key, None, 0, b"z"), before[1]), {0})
    found.count("key", before, ((b"q", None, 0, b"x"), before[1]), {0})
    found.count("neighbour", before, before[:1], {0})
    found.count("nothing", before, before, {0})
    found.count("more", before, (*before, (b"n", None, 2, b"n")), {2})
    assert [line.split(":")[0] for line in found.wrong] == [
        "bytes",
        "key",
        "neighbour",
        "nothing",
        "more",
    ]
    found.count("hit", before, before[1:], {0})
    assert (found.detected, len(found.wrong)) == (1, 5)
