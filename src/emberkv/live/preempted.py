"""Requests that were preempted: whether they may have run since.

An engine says who starts and who is preempted, and not who is resumed. If a request is preempted
between two steps, it is looked up before the step that says so ends, and an engine fails if a
request loads in the very step that calls it preempted.
"""

from __future__ import annotations

from emberkv.domain.types import RequestId
from emberkv.live.requests import RequestState
from emberkv.live.steps import StepWork


class Preempted:
    """The requests that have been preempted and were not seen to run since."""

    def __init__(self) -> None:
        self._waiting: dict[RequestId, None] = {}
        self._steps_are_told = False

    def add(self, request: RequestId, state: RequestState, step: int) -> None:
        """A step has said that a request was put back: from here on it waits."""
        state.may_run = False
        state.waits_step = step
        self._waiting[request] = None

    def resumed(self, work: StepWork) -> list[RequestId]:
        """Those that a step runs, for engines that tell what steps compute. O(waiting)."""
        self._steps_are_told = True
        found = [each for each in self._waiting if each in work.pieces or each in work.decoding]
        for request in found:
            del self._waiting[request]
        return found

    def forget(self, request: RequestId) -> None:
        """The request is over."""
        self._waiting.pop(request, None)

    def may_have_run(self, state: RequestState, step: int) -> bool:
        """Whether nothing is known of a request since it last had to wait.

        It is not put off until it is known: whoever comes behind it would take the device's blocks
        from it, time and again. It loads nothing.
        """
        if self._steps_are_told or not state.facts.preemptions:
            return False
        return state.waits_step != step - 1
