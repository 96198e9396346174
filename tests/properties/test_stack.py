"""The tier stack keeps its rules whatever is called in whatever order."""

from __future__ import annotations

from emberkv.testing.stack_machine import StackMachine

TestStack = StackMachine.TestCase
