"""The tier stack keeps its rules whatever is called in whatever order."""

from __future__ import annotations

from hypothesis import settings

from emberkv.testing.stack_machine import StackMachine

TestStack = StackMachine.TestCase
TestStack.settings = settings(stateful_step_count=20)  # one step may be sixty acts
