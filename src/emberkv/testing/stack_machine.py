"""A state machine for Hypothesis that plays every call on a tier stack in every order.

    class TestMyStack(StackMachine.TestCase): ...

What it does and what it tests is in `emberkv.testing.stack_player`.
"""

from __future__ import annotations

import sys
from random import Random
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from emberkv.core.stack import TierStack
from emberkv.domain.types import Outcome
from emberkv.policy.eviction import EVICTION_POLICIES
from emberkv.testing.stack_player import Shape, StackPlayer
from emberkv.testing.toy_requests import MAX_DEPTH, Act, Trouble

branches = st.sampled_from([0, 0, 0, 1])  # so that most requests share a prefix
paths = st.lists(branches, min_size=1, max_size=MAX_DEPTH)
picks = st.integers(0, 63)
counts = st.integers(1, MAX_DEPTH)
outcomes = st.sampled_from([Outcome.OK] * 12 + list(Outcome))
few = st.sampled_from([1, 2, 4, 8])
names = st.sampled_from(sorted(EVICTION_POLICIES))


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Stacks of one to three tiers with a few slots each."""
    below = draw(st.lists(st.integers(1, 12), max_size=2))
    slot_counts = [draw(st.integers(1, 6)), *below]
    policies = draw(st.tuples(*[names] * len(slot_counts)))
    return Shape(tuple(slot_counts), policies, draw(few), draw(few))


class StackMachine(RuleBasedStateMachine):
    """Set `stack_class` to play with another tier stack."""

    stack_class: ClassVar[type[TierStack]] = TierStack

    def __init__(self) -> None:
        super().__init__()
        self.player: StackPlayer | None = None

    @property
    def play(self) -> StackPlayer:
        assert self.player is not None
        return self.player

    @initialize(shape=shapes())
    def build(self, shape: Shape) -> None:
        self.player = StackPlayer(self.stack_class, shape)

    @rule(seed=st.integers(0, 2**32 - 1), acts=st.integers(10, 80))
    def bustle(self, seed: int, acts: int) -> None:
        self.play.bustle(Random(seed), acts)

    @rule(path=paths, want=counts, leave=st.booleans())
    def arrive(self, path: list[int], want: int, leave: bool) -> None:
        self.play.arrive(path, want, leave)

    @rule(path=paths, copies=st.integers(0, 8))
    def serve(self, path: list[int], copies: int) -> None:
        self.play.serve(path, copies)

    @precondition(lambda self: self.play.requests)
    @rule(act=st.sampled_from(Act), pick=picks, count=counts, leave=st.booleans())
    def go_on(self, act: Act, pick: int, count: int, leave: bool) -> None:
        self.play.go_on(act, pick, count, leave)

    @rule(
        seconds=st.sampled_from([0.1, 0.1, 0.1, 0.6, 1.1]),
        pause=st.booleans(),
        skip=st.integers(0, 3),
        leave=st.booleans(),
    )
    def engine_step(self, seconds: float, pause: bool, skip: int, leave: bool) -> None:
        self.play.engine_step(seconds, pause, skip, leave)

    @precondition(lambda self: self.play.toy.transfers)
    @rule(pick=picks, first=picks, wishes=st.lists(outcomes, min_size=1, max_size=MAX_DEPTH))
    def copy_ends(self, pick: int, first: int, wishes: list[Outcome]) -> None:
        self.play.copy_ends(pick, first, wishes)

    @precondition(lambda self: self.play.untaken)
    @rule()
    def take_effects(self) -> None:
        self.play.take_effects()

    @precondition(lambda self: self.play.names > 2)
    @rule(
        trouble=st.sampled_from([Trouble.DAMAGE, Trouble.DAMAGE, *Trouble]),
        pick=picks,
        keep_ram=st.booleans(),
    )
    def fail_somehow(self, trouble: Trouble, pick: int, keep_ram: bool) -> None:
        self.play.fail(trouble, pick, keep_ram)

    @precondition(lambda self: self.play.toy.engine_touches)
    @rule()
    def unfence(self) -> None:
        self.play.unfence()

    @invariant()
    def rules_hold(self) -> None:
        if self.player is not None:
            self.player.rules_hold()

    def teardown(self) -> None:
        if self.player is not None and sys.exc_info()[0] is None:
            self.player.finish()  # else what has just failed is reported, not what follows
