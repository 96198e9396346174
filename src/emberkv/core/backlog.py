"""The prompts that the engine has still to compute: what a request would wait for without us.

arrived ─► waiting for a promotion ─► computing ─► its prompt is done
      └──────────────────────────────────┘
"""

from __future__ import annotations

from emberkv.core.costs import ComputeCost
from emberkv.domain.types import RequestId


class _Prompt:
    __slots__ = ("computing", "done", "left_s", "tokens")

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.done = 0
        self.left_s = 0.0
        self.computing = False


class Backlog:
    """Prompts in the order of their arrival, with what is left of each in seconds."""

    def __init__(self, compute: ComputeCost) -> None:
        self._compute = compute
        self._prompts: dict[RequestId, _Prompt] = {}
        self._computing: dict[RequestId, _Prompt] = {}

    def arrive(self, request: RequestId, tokens: int) -> None:
        """A request with a prompt of `tokens` has come."""
        if request not in self._prompts:
            self._prompts[request] = _Prompt(tokens)
            self.has(request, 0)

    def tokens(self, request: RequestId) -> int | None:
        """The length of a request's prompt, while it is not done."""
        prompt = self._prompts.get(request)
        return None if prompt is None else prompt.tokens

    def has(self, request: RequestId, tokens: int) -> None:
        """The first `tokens` of a prompt are there, from wherever."""
        prompt = self._prompts.get(request)
        if prompt is None or tokens < prompt.done:
            return
        prompt.done = tokens
        prompt.left_s = self._compute.seconds(tokens, prompt.tokens)
        if tokens >= prompt.tokens:
            self.ends(request)

    def computes(self, request: RequestId) -> None:
        """The engine has taken the request up."""
        prompt = self._prompts.get(request)
        if prompt is not None:
            self._computing[request] = prompt

    def stops(self, request: RequestId) -> None:
        """The engine has put the request back: all of its prompt is due again."""
        prompt = self._computing.pop(request, None)
        if prompt is not None:
            prompt.done = 0
            self.has(request, 0)

    def ends(self, request: RequestId) -> None:
        """The request's prompt is done, or nobody wants it any more."""
        self._prompts.pop(request, None)
        self._computing.pop(request, None)

    def ahead_s(self, request: RequestId) -> float:
        """What was there before a request came, and is not done. O(prompts)."""
        total_s = 0.0
        for each, prompt in self._prompts.items():
            if each == request:
                break
            total_s += prompt.left_s
        return total_s

    def computing_s(self) -> float:
        """What is left of the prompts that the engine computes now. O(those)."""
        return sum(prompt.left_s for prompt in self._computing.values())
