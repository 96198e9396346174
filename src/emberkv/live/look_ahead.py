"""Look-ahead: requests that wait for their turn in the engine get their chunks brought up."""

from __future__ import annotations

from typing import Final

from emberkv.core.stack import TierStack
from emberkv.domain.types import RequestId
from emberkv.live.requests import RequestState

PER_STEP: Final = 4
"""Chains looked through in one step: each costs a look-up of all its chunks."""


class LookAhead:
    """The requests that have arrived and were not yet asked for, first come first served.

    A request that the engine asks for in the step it came in is never looked ahead for: it is
    promoted in that step.
    """

    def __init__(self, stack: TierStack) -> None:
        self._stack = stack
        self._fresh: dict[RequestId, RequestState] = {}

    def add(self, state: RequestState) -> None:
        """A request has arrived, and its keys are known."""
        self._fresh[RequestId(state.facts.request)] = state

    def remove(self, request: RequestId) -> None:
        """The engine asks for a request, or it is over."""
        self._fresh.pop(request, None)

    def step(self, now_s: float) -> None:
        """Begin promotions for the first of those that the step has left waiting."""
        for request in list(self._fresh)[:PER_STEP]:
            state = self._fresh.pop(request)
            tokens = state.facts.prompt_tokens
            if state.keys is not None and tokens is not None:
                # The engine always computes a prompt's last token itself.
                loadable = (tokens - 1) // self._stack.terms.tokens_per_chunk
                self._stack.look_ahead(request, state.keys()[:loadable], now_s)
