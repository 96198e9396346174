"""The prompts that the engine has still to compute: what a request would wait for without us.

    arrived ─► parked: waiting for a promotion, or loading ─► computing ─► its prompt is done
          └───────────────────────────────────────────────────┘

A parked prompt has a deadline: when it would have been done without us, and a little more. Its
slack is what is left until then, less what the engine computes now, less what is left of the
prompt itself. It waits as long as it has slack. A request that came later would take the engine
from it: it may begin only if the slack of everyone who came earlier covers its own prompt. Without
us it would have come after them anyway.
"""

from __future__ import annotations

from math import inf

from emberkv.core.costs import ComputeCost
from emberkv.domain.types import RequestId


class _Prompt:
    __slots__ = ("deadline_s", "done", "left_s", "tokens")

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.done = 0
        self.left_s = 0.0
        self.deadline_s: float | None = None


class Backlog:
    """Prompts in the order of their arrival, with what is left of each in seconds."""

    def __init__(self, compute: ComputeCost, max_slowdown: float) -> None:
        self._compute = compute
        self._max_slowdown = max_slowdown
        self._prompts: dict[RequestId, _Prompt] = {}
        self._computing: dict[RequestId, _Prompt] = {}
        self._parked: dict[RequestId, _Prompt] = {}

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

    def park(self, request: RequestId, deadline_s: float) -> None:
        """A request waits for its chunks, and must have been computed by then."""
        prompt = self._prompts.get(request)
        if prompt is not None:
            prompt.deadline_s = deadline_s
            self._parked[request] = prompt

    def is_parked(self, request: RequestId) -> bool:
        return request in self._parked

    def computes(self, request: RequestId) -> None:
        """The engine has taken the request up."""
        self._parked.pop(request, None)
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
        """The request's prompt is done, or nobody wants it any more.

        What is left of it then would not have been computed without us either: who came later would
        have been done so much sooner.
        """
        prompt = self._prompts.get(request)
        if prompt is not None and prompt.left_s and self._parked:
            sooner_s = self._max_slowdown * prompt.left_s
            behind = False
            for each, other in self._prompts.items():
                if behind and other.deadline_s is not None:
                    other.deadline_s -= sooner_s
                behind = behind or each == request
        for prompts in (self._prompts, self._parked, self._computing):
            prompts.pop(request, None)

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

    def slack_s(self, request: RequestId, now_s: float) -> float:
        """For how long a request can still wait; endless if it is not parked."""
        prompt = self._parked.get(request)
        if prompt is None or prompt.deadline_s is None:
            return inf
        return prompt.deadline_s - now_s - self.computing_s() - prompt.left_s

    def may_begin(self, request: RequestId, has_tokens: int, now_s: float) -> bool:
        """Whether a request can be computed now without making an earlier one late. O(prompts).

        `has_tokens` of its prompt are there. Who is late already is not waited for.
        """
        mine = self._prompts.get(request)
        if mine is None or not self._parked:
            return True
        left_s = self._compute.seconds(has_tokens, mine.tokens)
        computing_s = self.computing_s()
        for each, prompt in self._prompts.items():
            if each == request:
                break
            if prompt.deadline_s is None or each not in self._parked:
                continue
            slack_s = prompt.deadline_s - now_s - computing_s - prompt.left_s
            if 0.0 <= slack_s < left_s:
                return False
        return True
