"""Gates: whether a tier is read from, and by which share of requests, and whether it takes in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from emberkv.domain.types import RAM, Level, RequestId
from emberkv.errors import UsageError

Levels = frozenset[Level]
"""The tiers that a request may load from."""


@dataclass(frozen=True, slots=True)
class Gate:
    """How far a tier is open: `load_share` of requests may load from it, writes come in or not."""

    load_share: float = 1.0
    stores: bool = True

    def __post_init__(self) -> None:
        if not 0.0 <= self.load_share <= 1.0:
            raise UsageError(f"a share lies between 0 and 1, got {self.load_share}")


OPEN = Gate()
DRAINING = Gate(load_share=1.0, stores=False)
SHUT = Gate(load_share=0.0, stores=False)


@dataclass(slots=True)
class _Place:
    gate: Gate = OPEN
    due: float = 0.0  # grows by the share with every request; each whole number lets one in
    let_in: dict[RequestId, bool] = field(default_factory=dict)


class Gates:
    """The gates of all tiers. A request is let in or not once, for as long as it is there."""

    def __init__(self, count: int) -> None:
        self._places = tuple(_Place() for _ in range(count))
        self.narrowed = False

    def __getitem__(self, level: Level) -> Gate:
        return self._places[level].gate

    def set(self, level: Level, gate: Gate) -> None:
        """Open or shut a tier. RAM, through which everything passes, is shut for all of them."""
        place = self._places[level]
        place.gate, place.due = gate, 0.0
        place.let_in.clear()
        self.narrowed = any(each.gate != OPEN for each in self._places)

    def loads(self, level: Level, request: RequestId | None) -> bool:
        """Whether a request may load what is in a tier. Of a share, evenly spread ones may."""
        place = self._places[level]
        share = place.gate.load_share
        if share in (0.0, 1.0) or request is None:
            return share > 0.0
        let_in = place.let_in.get(request)
        if let_in is None:
            place.due += share
            let_in = place.let_in[request] = place.due >= 1.0
            place.due -= let_in
        return let_in

    def on_trial(self, request: RequestId) -> Sequence[Level]:
        """The tiers that are open to a share of requests and to this one."""
        return [Level(n) for n, place in enumerate(self._places) if place.let_in.get(request)]

    def stores(self, level: Level) -> bool:
        """Whether a tier takes chunks in."""
        return self._places[level].gate.stores and self._places[RAM].gate.stores

    def forget(self, request: RequestId) -> None:
        """The request is over."""
        for place in self._places:
            place.let_in.pop(request, None)
