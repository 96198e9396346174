"""How long a request may wait, as those before it come and go."""

from __future__ import annotations

import pytest

from emberkv.core.backlog import Backlog
from emberkv.core.costs import ComputeCost
from emberkv.domain.types import RequestId

A, B, C = RequestId("a"), RequestId("b"), RequestId("c")
SECOND = 1000  # tokens
SLOWDOWN = 1.05


def backlog_of(*requests: RequestId) -> Backlog:
    """Prompts of one second each, in this order."""
    backlog = Backlog(ComputeCost([(SECOND, 1.0)]), SLOWDOWN)
    for request in requests:
        backlog.arrive(request, SECOND)
    return backlog


def park(backlog: Backlog, request: RequestId) -> None:
    backlog.park(request, SLOWDOWN * (backlog.ahead_s(request) + 1.0))


def test_nobody_waits_for_the_turn_of_who_has_gone() -> None:
    """Two before it are aborted: without us it would be computed now."""
    backlog = backlog_of(A, B, C)
    park(backlog, C)
    assert backlog.slack_s(C, 0.0) == pytest.approx(3 * SLOWDOWN - 1.0)
    backlog.ends(A)
    backlog.ends(B)
    assert backlog.slack_s(C, 0.0) == pytest.approx(SLOWDOWN - 1.0)


def test_who_goes_behind_changes_nothing() -> None:
    backlog = backlog_of(A, B)
    park(backlog, A)
    before_s = backlog.slack_s(A, 0.0)
    backlog.ends(B)
    assert backlog.slack_s(A, 0.0) == before_s


def test_a_prompt_that_was_computed_gives_nothing_back() -> None:
    """The time for it has passed."""
    backlog = backlog_of(A, B)
    park(backlog, B)
    backlog.computes(A)
    backlog.has(A, SECOND)
    assert backlog.slack_s(B, 1.0) == pytest.approx(2 * SLOWDOWN - 1.0 - 1.0)
