"""What the guard is told of the engine's requests, and the gates that follow from it.

A sample per first token, per token after it and per wait; once a second the guard decides.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

from emberkv.core.gates import SHUT, Gate
from emberkv.core.guard import Guard, Signal
from emberkv.core.stack import TierStack
from emberkv.domain.types import TIER_NAMES, Level, RequestId
from emberkv.live.requests import RequestState
from emberkv.observe.tally import Tally

DECIDE_EVERY_S: Final = 1.0

logger = logging.getLogger(__name__)


class Watch:
    """A guard beside a stack. Without a guard it costs nothing and does nothing."""

    def __init__(self, stack: TierStack, tally: Tally, guard: Guard | None) -> None:
        self._stack = stack
        self._tally = tally
        self._guard = guard
        self._decided_s: float | None = None
        self._gaps: dict[tuple[float, int, bool], tuple[int, int]] = {}

    def token(self, state: RequestState, now_s: float) -> None:
        """A request has got a token; before its state notes that."""
        if self._guard is None:
            return
        facts = state.facts
        if facts.first_token_s is None:
            self._observe(Signal.FIRST_TOKEN, now_s - state.arrived_s, state, now_s)
        elif state.token_s is not None:
            # The requests of a step have waited alike: one sample stands for all of a length.
            tokens = (facts.prompt_tokens or 0) + facts.output_tokens
            at = round(now_s - state.token_s, 4), tokens.bit_length(), self._on_trial(state)
            self._gaps[at] = tokens, self._gaps.get(at, (0, 0))[1] + 1

    def step_done(self, now_s: float) -> None:
        """All tokens of a step have been told."""
        if self._guard is None:
            return
        for (gap_s, _, on_trial), (tokens, count) in self._gaps.items():
            self._guard.observe(
                Signal.INTER_TOKEN,
                gap_s,
                now_s,
                context_tokens=tokens,
                on_trial=on_trial,
                count=count,
            )
        self._gaps.clear()

    def waited(self, state: RequestState, wait_s: float, now_s: float) -> None:
        """A request has stopped waiting for its promotion."""
        if self._guard is not None:
            self._observe(Signal.PROMOTION_WAIT, wait_s, state, now_s)

    def decide(self, now_s: float) -> None:
        """Set the gates that the guard decides on; about once a second."""
        if self._guard is None:
            return
        if self._decided_s is not None and now_s - self._decided_s < DECIDE_EVERY_S:
            return
        self._decided_s = now_s
        for change in self._guard.decide(now_s):
            self._stack.set_gate(change.level, change.gate)
            self._tally.guard_changed(change)
            logger.warning(
                "guard: the %s tier is read by %.0f %% of requests and %s: %s",
                TIER_NAMES[change.level],
                100 * change.gate.load_share,
                "written" if change.gate.stores else "not written",
                change.reason,
            )

    def by_hand(self, level: Level, gate: Gate, now_s: float) -> None:
        """An operator sets a gate; the guard leaves it alone until it is open again."""
        self._stack.set_gate(level, gate)
        if self._guard is not None:
            self._guard.by_hand(level, gate, now_s)
            self._tally.guard_changed(self._guard.history[-1])

    def take_out(self, level: Level, reason: str) -> None:
        """A tier is wrong: shut it until an operator opens it."""
        logger.error("the %s tier is shut: %s", TIER_NAMES[level], reason)
        self.by_hand(level, SHUT, self._decided_s or 0.0)

    def facts(self) -> Mapping[str, object]:
        """For status."""
        return {} if self._guard is None else self._guard.as_facts()

    def _observe(self, signal: Signal, value_s: float, state: RequestState, now_s: float) -> None:
        assert self._guard is not None
        self._guard.observe(
            signal,
            value_s,
            now_s,
            context_tokens=state.facts.prompt_tokens,
            on_trial=self._on_trial(state),
        )

    def _on_trial(self, state: RequestState) -> bool:
        """Whether a request has had anything from a tier that is open to a share of requests."""
        facts = state.facts
        if not (facts.disk_tokens or facts.ram_tokens or facts.wait_s):
            return False
        return bool(self._stack.gates.on_trial(RequestId(facts.request)))
