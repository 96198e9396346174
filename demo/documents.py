"""Three long reports full of facts, made from a seed, and questions about them.

Each report opens with a line of its own, so that no two share a first block of tokens. The texts
are plain English; equal seeds give equal texts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

CountTokens = Callable[[str], int]

DOCUMENT_TOKENS: Final = 2_000
QUESTION_COUNT: Final = 8

# fmt: off
_MONTHS: Final = ("January", "February", "March", "April", "May", "June", "July", "August",
                  "September", "October", "November", "December")
_FIRST_NAMES: Final = ("Ada", "Bruno", "Clara", "Dmitri", "Elena", "Farid", "Greta", "Henrik",
                       "Ines", "Jonas", "Katya", "Luis")
_LAST_NAMES: Final = ("Abbott", "Berg", "Costa", "Dahl", "Ekman", "Fuchs", "Grieg", "Haas",
                      "Ivers", "Jansen", "Kern", "Lund")
# fmt: on


@dataclass(frozen=True, slots=True)
class Document:
    """A report and the questions that are asked about it, one a turn."""

    name: str
    text: str
    questions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Passage:
    """A few sentences on one fact, and a question that they answer."""

    text: str
    question: str


def make_documents(count_tokens: CountTokens, seed: int = 1) -> tuple[Document, ...]:
    """The harbour's, the orchard's and the observatory's report, about 2,000 tokens each."""
    subjects = (
        ("harbour", "Report of the harbour office at Norwick.", _harbour),
        ("orchard", "Year book of the Ellmere orchard estate.", _orchard),
        ("observatory", "Log of the observatory on Mount Tarn.", _observatory),
    )
    return tuple(
        _compose(name, opening, passages(random.Random(f"{seed} {name}")), count_tokens)
        for name, opening, passages in subjects
    )


def _compose(
    name: str, opening: str, passages: Iterator[_Passage], count_tokens: CountTokens
) -> Document:
    """Passages until the text is long enough; questions from all over it, the last one first."""
    used: list[_Passage] = []
    text = opening
    while count_tokens(text) < DOCUMENT_TOKENS:
        used.append(next(passages))
        text = f"{text}\n\n{used[-1].text}"
    step = len(used) // QUESTION_COUNT
    asked = [used[-1 - turn * step].question for turn in range(QUESTION_COUNT)]
    return Document(name, text, tuple(asked))


def _person(chance: random.Random) -> str:
    return f"{chance.choice(_FIRST_NAMES)} {chance.choice(_LAST_NAMES)}"


def _dates(chance: random.Random) -> Iterator[str]:
    """Days in order, a few weeks' worth of weeks apart, year after year."""
    year = chance.randint(1951, 1969)
    while True:
        for month in _MONTHS:
            for first, last in ((1, 9), (10, 18), (19, 28)):
                yield f"{chance.randint(first, last)} {month} {year}"
        year += 1


def _harbour(chance: random.Random) -> Iterator[_Passage]:
    ships = [f"{a} {b}" for a in ("Amber", "Grey", "Northern", "Silver", "Swift", "Winter")
             for b in ("Gull", "Heron", "Lantern", "Maiden", "Tern", "Whale")]  # fmt: skip
    chance.shuffle(ships)
    for date, ship in zip(_dates(chance), ships, strict=False):
        master, tons = _person(chance), chance.randint(120, 980)
        cargo = chance.choice(("barley", "coal", "cork", "slate", "timber", "wool"))
        origin = chance.choice(("Bergen", "Danzig", "Leith", "Lisbon", "Riga", "Tallinn"))
        hours, depth = chance.randint(5, 40), chance.randint(41, 79) / 10
        text = (
            f"On {date} the {ship} came in from {origin} under {master} with {tons} tons of "
            f"{cargo}. She lay at berth {chance.randint(1, 14)}, where the water stood at "
            f"{depth} metres, and was unloaded in {hours} hours by a gang of "
            f"{chance.randint(8, 26)} men. The harbour dues came to {chance.randint(31, 260)} "
            f"crowns, and the pilot wrote that the wind was {chance.choice(_WINDS)}."
        )
        yield _Passage(text, f"What did the {ship} carry when she came in, and from where?")


def _orchard(chance: random.Random) -> Iterator[_Passage]:
    kinds = [f"{a} {b}" for a in ("Autumn", "Bishop's", "Early", "Golden", "Old", "Red")
             for b in ("Beauty", "Costard", "Pippin", "Reinette", "Russet", "Warden")]  # fmt: skip
    chance.shuffle(kinds)
    for date, kind in zip(_dates(chance), kinds, strict=False):
        grower, trees = _person(chance), chance.randint(14, 240)
        crates, price = chance.randint(30, 900), chance.randint(11, 48)
        pest = chance.choice(("canker", "codling moth", "mildew", "scab", "woolly aphid"))
        text = (
            f"The {kind} was picked on {date} from {trees} trees in plot "
            f"{chance.randint(1, 30)}, which {grower} has kept since "
            f"{chance.randint(1921, 1949)}. It gave {crates} crates, sold at {price} pence each, "
            f"mostly to {chance.choice(('Hale', 'Marlow', 'Oakham', 'Penrith', 'Wells'))}. Some "
            f"{chance.randint(2, 19)} in a hundred were lost to {pest}, after "
            f"{chance.randint(12, 90)} millimetres of rain in the month before."
        )
        yield _Passage(text, f"How many crates did the {kind} give, and who keeps that plot?")


def _observatory(chance: random.Random) -> Iterator[_Passage]:
    numbers = chance.sample(range(100, 999), 48)
    for date, number in zip(_dates(chance), numbers, strict=False):
        observer, plates = _person(chance), chance.randint(3, 28)
        thing = chance.choice(("a comet", "a double star", "a minor planet", "a nova", "a nebula"))
        text = (
            f"Night {number}, {date}. {observer} worked at the {chance.choice(_TELESCOPES)} from "
            f"{chance.randint(19, 22)}:{chance.randint(10, 59)} and exposed {plates} plates of "
            f"{chance.randint(4, 55)} minutes each. {thing.capitalize()} was measured at "
            f"magnitude {chance.randint(61, 159) / 10}. The dome stood at "
            f"{chance.randint(-14, 16)} degrees, the seeing was "
            f"{chance.choice(('fair', 'good', 'poor', 'steady', 'very good'))}, and the clock "
            f"was found {chance.randint(2, 88)} hundredths of a second fast."
        )
        yield _Passage(text, f"Who worked on night {number}, and what was measured?")


_WINDS: Final = ("light from the west", "fresh from the north", "strong, with sleet", "calm")
_TELESCOPES: Final = ("great refractor", "meridian circle", "twin astrograph", "small reflector")
