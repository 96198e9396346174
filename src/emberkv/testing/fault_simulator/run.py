"""Runs worlds by seed, says where one failed, and holds what was seen against what must be.

A run of `steps` steps from a seed plays the worlds of that seed, the next one, and so on, each for
at most `WORLD_STEPS` steps; so a failure, which names a world's seed and a step, is played again
in a moment.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Protocol, Self

import xxhash

from emberkv.core.counts import Event
from emberkv.core.stack import TierStack
from emberkv.domain.types import Outcome
from emberkv.testing.fault_simulator.setting import Answer, Fault, Seen, WorldPlan
from emberkv.testing.fault_simulator.stack_world import StackWorld
from emberkv.testing.fault_simulator.world import World

WORLD_STEPS: Final = 1000
STACK_WORLDS: Final = 8
"""Every so many-th world is a tier stack alone, called in ways that no engine would."""

TAIL_LINES: Final = 15


class SimulatedWorld(Protocol):
    """What can be played."""

    def step(self) -> None: ...

    def finish(self) -> None: ...

    def close(self) -> None: ...

    @property
    def digest(self) -> str:
        """Of every call and decision so far."""
        ...

    @property
    def tail(self) -> list[str]:
        """The last calls, in words."""
        ...


class SimulationError(AssertionError):
    """A world broke a rule. `seed` and `step` play it again, `tail` are the last calls."""

    def __init__(self, seed: int, step: int, cause: BaseException, tail: list[str]) -> None:
        self.seed = seed
        self.step = step
        self.tail = tail
        calls = "\n  ".join(tail)
        super().__init__(
            f"seed {seed}, step {step}: {type(cause).__name__}: {cause}\n"
            f"again: python -m emberkv.testing.fault_simulator --seed {seed} --steps {step}\n"
            f"the last calls:\n  {calls}"
        )


@dataclass(slots=True)
class Report:
    """What a run has seen. `loaded_chunks` were compared byte by byte, none was wrong."""

    steps: int = 0
    worlds: int = 0
    loaded_chunks: int = 0
    digest: str = ""
    seen: Seen = field(default_factory=Seen)

    @property
    def faults(self) -> dict[str, int]:
        """How often each fault was injected."""
        return {fault.value: self.seen.counts[fault] for fault in Fault}

    def unseen(self, least: int) -> list[str]:
        """Everything that must be seen `least` times and was not: a simulator must not go blind."""
        return [
            f"{type(what).__name__}.{what.name}: {self.seen.counts[what]}"
            for what in must_be_seen()
            if self.seen.counts[what] < least
        ]


def must_be_seen() -> Iterator[enum.Enum]:
    """Each fault, each outcome, each event, each branch of the protocol."""
    yield from Fault
    yield from Outcome
    yield from Answer
    yield from Event


class _Located:
    """Says where in a run an exception came from."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.step = 0
        self.world: SimulatedWorld | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, Exception):
            tail = [] if self.world is None else self.world.tail[-TAIL_LINES:]
            raise SimulationError(self.seed, self.step, error, tail) from error


def simulate(seed: int, steps: int, stack_class: type[TierStack] = TierStack) -> Report:
    """Play `steps` steps from a seed on.

    Raises `SimulationError` at the first that breaks a rule. Same seed, same code: same report.
    About 5,000 steps a second on one core.
    """
    report = Report()
    digest = xxhash.xxh3_64()
    left = steps
    while left > 0:
        count = min(left, WORLD_STEPS)
        digest.update(_play(report, seed + report.worlds, count, stack_class).encode())
        left -= count
    report.digest = digest.hexdigest()
    return report


def _play(report: Report, seed: int, steps: int, stack_class: type[TierStack]) -> str:
    """Play one world to its end; returns its digest."""
    with _Located(seed) as place:
        world = place.world = _world_of(seed, report.seen, stack_class)
        for _ in range(steps):
            place.step += 1
            world.step()
        world.finish()
        world.close()
    report.steps += steps
    report.worlds += 1
    report.loaded_chunks += world.loaded_chunks
    return world.digest


def _world_of(seed: int, seen: Seen, stack_class: type[TierStack]) -> World | StackWorld:
    if seed % STACK_WORLDS == STACK_WORLDS - 1:
        return StackWorld(seed, stack_class)
    return World(WorldPlan.of_seed(seed), seen, stack_class)
