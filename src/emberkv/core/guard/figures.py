"""Samples as multiples of their budgets, counted in bounded memory, and when they are too many.

A sample is divided by the budget of its own context length, so that samples of all lengths can be
counted together and a shift to longer prompts changes nothing. Ratios are counted in classes 1 %
wide, of which 1.0 is an edge: how many samples broke their budget is exact.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from typing import Final

WIDTH: Final = math.log(1.01)
_TOP: Final = math.ceil(math.log(1e4) / WIDTH)
ALLOWED_SHARE: Final = 0.01
"""A budget is one for the 99th percentile: one sample in a hundred may break it."""

SLICES: Final = 12
THIRDS: Final = 3


def class_of(ratio: float) -> int:
    """The class of a ratio; class n ends at 1.01 to the power of n, its end included."""
    if ratio <= 0:
        return -_TOP
    if math.isinf(ratio):
        return _TOP
    return max(-_TOP, min(_TOP, math.ceil(math.log(ratio) / WIDTH)))


class Ratios:
    """A distribution of ratios: at most a few thousand counts, whatever it has seen."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self.count = 0

    def add(self, ratio: float, count: int) -> None:
        self._counts[class_of(ratio)] += count
        self.count += count

    def merge(self, other: Ratios) -> None:
        self._counts.update(other._counts)
        self.count += other.count

    def over(self, threshold: float) -> int:
        """How many were above a threshold; it counts as the end of its class."""
        edge = class_of(threshold)
        return sum(count for at, count in self._counts.items() if at > edge)

    def p99(self) -> float:
        """The ratio that at most one in a hundred is above, by nearest rank; 0 if there are none.

        It is told as the end of its class, so at most 1 % too high.
        """
        left = self.count - math.ceil((1 - ALLOWED_SHARE) * self.count - 1e-9)
        for at in sorted(self._counts, reverse=True):
            left -= self._counts[at]
            if left < 0:
                return math.exp(at * WIDTH)
        return 0.0


class Window:
    """The ratios of the last while, in slices. Only whole slices are looked at."""

    def __init__(self, window_s: float, origin_s: float) -> None:
        self._slice_s = window_s / SLICES
        self.clear(origin_s)

    def clear(self, origin_s: float) -> None:
        """Forget everything; the window is full again a whole window after `origin_s`."""
        self._origin_s = origin_s
        self._slices: deque[tuple[int, Ratios]] = deque()

    def add(self, ratio: float, count: int, now_s: float) -> None:
        at = self._slice_at(now_s)
        if not self._slices or self._slices[-1][0] != at:
            self._slices.append((at, Ratios()))
            while self._slices[0][0] < at - SLICES:
                self._slices.popleft()
        self._slices[-1][1].add(ratio, count)

    def thirds(self, now_s: float) -> list[Ratios] | None:
        """The three thirds of the window, oldest first; None while it is not full yet."""
        end = self._slice_at(now_s)
        if end < SLICES:
            return None
        parts = [Ratios() for _ in range(THIRDS)]
        for at, ratios in self._slices:
            if end - SLICES <= at < end:
                parts[(at - (end - SLICES)) * THIRDS // SLICES].merge(ratios)
        return parts

    def _slice_at(self, now_s: float) -> int:
        return math.floor((now_s - self._origin_s) / self._slice_s)


def more_than_chance(over: int, count: int, chance: float) -> bool:
    """Whether so many of `count` samples over their budget are more than one in a hundred.

    Chernoff's bound on the binomial tail (Annals of Mathematical Statistics 23, 1952): the chance
    of `over` or more at 1 in 100 is at most exp(-count · D), D the relative entropy of the share
    that was seen to 1 %.
    """
    share = over / count if count else 0.0
    if share <= ALLOWED_SHARE:
        return False
    entropy = share * math.log(share / ALLOWED_SHARE)
    if share < 1:
        entropy += (1 - share) * math.log((1 - share) / (1 - ALLOWED_SHARE))
    return -count * entropy < math.log(chance)


def pooled(parts: list[Ratios]) -> Ratios:
    """All of them together."""
    whole = Ratios()
    for part in parts:
        whole.merge(part)
    return whole
