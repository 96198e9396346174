"""What a driver is: it carries out copies, and says how they ended, without ever blocking."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from emberkv.domain.types import Copy, Entry, Level, Outcome, Slot, TransferId
from emberkv.live.arena import Arena


@dataclass(frozen=True, slots=True)
class CopyProgress:
    """Some chunks of a copy have ended; `busy_s` is the time one thread spent on them.

    They ended `age_s` before the report was taken.
    """

    transfer: TransferId
    results: tuple[tuple[int, Outcome], ...]
    busy_s: float
    age_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Found:
    """Chunks that a tier still holds from an earlier run, oldest first; several per tier.

    `last` says that the tier has named all it has: slots not named are free.
    """

    level: Level
    entries: tuple[Entry, ...]
    last: bool


@dataclass(frozen=True, slots=True)
class Populated:
    """RAM slots `first_slot … first_slot + slot_count - 1` are backed by memory.

    Each slot is reported once; slots that `Found` names have been reported before.
    """

    first_slot: int
    slot_count: int


@dataclass(frozen=True, slots=True)
class TierDown:
    """A tier can't be used from now on; every copy that touches it has been reported."""

    level: Level
    reason: str


@dataclass(frozen=True, slots=True)
class TierUp:
    """A tier that was down can be used again; what it holds is named by `Found` from here on."""

    level: Level


Report = CopyProgress | Found | Populated | TierDown | TierUp


class Driver(Protocol):
    """The scheduler's side of whoever moves bytes between tiers. No call blocks or raises."""

    @property
    def arena(self) -> Arena: ...

    @property
    def slot_counts(self) -> tuple[int, ...]:
        """Slots per tier, RAM first."""
        ...

    def submit(self, copies: Sequence[Copy]) -> None:
        """Start copies; each chunk of each is reported once, in any order."""
        ...

    def seal(self, slots: Sequence[Slot]) -> None:
        """Have READY rows checksummed, so that a restarted engine can take them over."""
        ...

    def poll(self) -> list[Report]:
        """What has happened since the last call."""
        ...

    def reset(self) -> bool:
        """Make what the tiers hold unusable for ever, durably; False if a tier could not.

        The one call that waits (bounded): old weights' KV must be gone when it returns.
        """
        ...

    def begin_reset(self) -> None:
        """Begin what `reset` does and return; `reset_is_owed` until `poll` has heard of its end."""
        ...

    @property
    def reset_is_owed(self) -> bool:
        """Whether some tier's reset has not become durable."""
        ...

    def close(self, *, clean: bool) -> None:
        """Let go; a clean close ends what outlives a crash."""
        ...
