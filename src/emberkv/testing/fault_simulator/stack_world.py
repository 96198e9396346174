"""A world of a tier stack alone, with up to three tiers: every call on it, in every order."""

from __future__ import annotations

from random import Random

import xxhash

from emberkv.core.stack import TierStack
from emberkv.policy.eviction import EVICTION_POLICIES
from emberkv.testing.stack_player import Shape, StackPlayer


class StackWorld:
    """Plays `emberkv.testing.stack_player` by one seed, audited at every call."""

    loaded_chunks = 0

    def __init__(self, seed: int, stack_class: type[TierStack] = TierStack) -> None:
        self._chance = Random(f"stack {seed}")
        self._player = StackPlayer(stack_class, shape_of(self._chance))
        self._digest = xxhash.xxh3_64()
        self._noted = self._player.log
        self._noted_lines = 0

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    @property
    def tail(self) -> list[str]:
        return self._player.log

    def step(self) -> None:
        """One act."""
        self._player.bustle(self._chance, 1)
        self._note()

    def finish(self) -> None:
        """Let everything end, and play the log again."""
        self._player.finish()
        self._note()

    def close(self) -> None:
        """Nothing is held."""

    def _note(self) -> None:
        log = self._player.log
        if log is not self._noted:  # a restart begins a new one
            self._noted, self._noted_lines = log, 0
        for line in log[self._noted_lines :]:
            self._digest.update(line.encode())
        self._noted_lines = len(log)


def shape_of(chance: Random) -> Shape:
    """A small stack of one to three tiers."""
    slot_counts = [chance.randint(1, 6)]
    slot_counts += [chance.randint(1, 12) for _ in range(chance.choice((0, 1, 1, 2, 2)))]
    names = sorted(EVICTION_POLICIES)
    return Shape(
        tuple(slot_counts),
        tuple(chance.choice(names) for _ in slot_counts),
        chance.choice((1, 2, 4, 8)),
        chance.choice((1, 2, 4, 8)),
    )
