"""The workload: what is asked, planned by seed, with exact shares."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberkv.app.load.workload import SHORTEST_SHARE, Workload, fitting, plan, token_ids
from emberkv.errors import UsageError

WORKLOAD = Workload(lengths=(64, 512), requests=100, returning=0.5)


def made(workload: Workload, step: int = 0) -> list[list[int]]:
    return [token_ids(prompt, workload.vocabulary) for prompt in plan(workload, step)]


def common(a: list[int], b: list[int]) -> int:
    """How many tokens two prompts begin with in common."""
    differing = (at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(differing, min(len(a), len(b)))


def test_the_same_seed_asks_the_same_and_another_nothing_of_it() -> None:
    first = made(WORKLOAD)
    assert made(WORKLOAD) == first
    for others in (made(replace(WORKLOAD, seed=1)), made(WORKLOAD, step=1)):
        assert max(common(a, b) for a in first for b in others) < 3


@given(
    lengths=st.lists(st.integers(2, 300), min_size=1, max_size=3, unique=True).map(tuple),
    requests=st.integers(1, 60),
    returning=st.floats(0, 1),
    seed=st.integers(0, 99),
)
def test_lengths_are_in_equal_shares_and_within_their_range(
    lengths: tuple[int, ...], requests: int, returning: float, seed: int
) -> None:
    workload = Workload(lengths=lengths, requests=requests, returning=returning, seed=seed)
    prompts = list(plan(workload, 0))
    assert len(prompts) == requests
    for prompt in prompts:
        ids = token_ids(prompt, workload.vocabulary)
        assert len(ids) == prompt.tokens
        assert 1000 <= min(ids) <= max(ids) < workload.vocabulary
        assert any(
            max(2, int(SHORTEST_SHARE * length)) <= prompt.tokens <= length for length in lengths
        )
    if max(lengths) * SHORTEST_SHARE > 2 * min(lengths) and len(lengths) == 2:
        counts = Counter(prompt.tokens > min(lengths) for prompt in prompts)
        assert abs(counts[True] - counts[False]) <= 1


@pytest.mark.parametrize("returning", [0.0, 0.3, 1.0])
def test_the_share_that_returns_is_kept_and_begins_with_what_was_asked(returning: float) -> None:
    workload = replace(WORKLOAD, returning=returning)
    prompts = made(workload)
    back = 0
    for at, prompt in enumerate(prompts):
        shared = max((common(prompt, earlier) for earlier in prompts[:at]), default=0)
        back += shared >= 0.5 * len(prompt)
    # The first of each length has nothing to return to.
    assert abs(back - returning * len(prompts)) <= 2


def test_a_returning_prompt_still_has_something_of_its_own() -> None:
    prompts = [prompt for prompt in plan(WORKLOAD, 0) if prompt.is_returning]
    assert prompts
    assert all(0 < prompt.shared_tokens < prompt.tokens for prompt in prompts)


@pytest.mark.parametrize(
    "wrong",
    [
        {"lengths": ()},
        {"lengths": (1,)},
        {"requests": 0},
        {"returning": 1.5},
        {"vocabulary": 10},
        {"documents": 0},
    ],
)
def test_workloads_that_make_no_sense_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        Workload(**wrong)  # type: ignore[arg-type]


def test_lengths_must_fit_the_server() -> None:
    assert fitting(None, None) == (256, 1024, 4096)
    assert fitting(None, 1500) == (256, 1024)
    assert fitting((700, 1500), 1500) == (700, 1500)
    with pytest.raises(UsageError, match="1501 is too long: the server takes 1500"):
        fitting((1501,), 1500)
    with pytest.raises(UsageError, match="give --lengths"):
        fitting(None, 100)
