"""What loading and computing cost, learned while serving; the planner's only knowledge of time.

Three estimates, each fed by what has just happened and each on the careful side: too low a price
for computing and too high a one for loading cost a hit; the other way round they cost a request
its latency.

    ComputeCost  seconds to compute tokens, by their position in the prompt
    ReadCost     seconds until chunks have come up from a tier, behind those under way
    LoadCost     seconds to copy a chunk from RAM to the device
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from math import exp2, inf
from typing import Final

Piece = tuple[int, int]
"""Tokens `first` … `end - 1` of some prompt."""

SAMPLES: Final = 16
CAREFUL: Final = 0.25
"""The quantile of recent samples that counts: other work in a step only ever makes it longer."""

MIN_LEARNT_TOKENS: Final = 32
"""Fewer prompt tokens in a step, and it is other work that the step's time tells of."""

_FIRST_EDGE: Final = 512
_EDGES: Final = (0, *(round(_FIRST_EDGE * 2 ** (half / 2)) for half in range(27)))
_FADE_CHUNKS: Final = 256.0
_FRESH: Final = 0.3
_MOST_WORSE: Final = 4.0
"""One slow answer of a tier counts as at most so much slower than usual: it may be a hiccup."""

_HICCUP_S: Final = 0.001
LEAST_LOADS: Final = 3
LOAD_FADE_S: Final = 30.0
"""What is known of loads halves in so long without any."""


def _careful(samples: Sequence[float]) -> float:
    return sorted(samples)[int(len(samples) * CAREFUL)]


class ComputeCost:
    """Seconds that the engine needs for tokens, by position, as a rate per half octave of it.

    A step gives one duration for all the pieces of prompts it computed. It is shared out in the
    ratio that the present estimate gives, and moves every rate that had a part in it: pieces at
    different positions tell the rates apart, whatever the shape of the curve. The lower quartile
    of a rate's last 16 values is its estimate, since decoding, loading and neighbours only add.
    """

    def __init__(self, seeds: Sequence[tuple[int, float]] = ()) -> None:
        """`seeds` are (prompt tokens, seconds) of prompts computed alone, from a calibration."""
        self._samples: list[deque[float]] = [deque(maxlen=SAMPLES) for _ in _EDGES]
        self._rates: list[float | None] = [None] * len(_EDGES)
        self._filled: list[float] = []
        self._sow(sorted(seeds))

    @property
    def known(self) -> bool:
        """Whether anything has been learned."""
        return bool(self._filled)

    def seconds(self, first: int, end: int) -> float:
        """What tokens `first` … `end - 1` cost; 0 as long as nothing is known."""
        if end <= first or not self._filled:
            return 0.0
        total = 0.0
        at = bisect_right(_EDGES, first) - 1
        while first < end:
            edge = _EDGES[at + 1] if at + 1 < len(_EDGES) else end
            upto = min(edge, end)
            total += (upto - first) * self._filled[at]
            first = upto
            at += 1
        return total

    def observe(self, pieces: Sequence[Piece], others: int, seconds: float) -> None:
        """A step has computed these pieces of prompts and `others` tokens beside, in `seconds`."""
        tokens = sum(end - first for first, end in pieces)
        if tokens < max(MIN_LEARNT_TOKENS, 4 * others) or not 0.0 < seconds < inf:
            return
        expected = sum(self.seconds(first, end) for first, end in pieces)
        scale = seconds / expected if expected else None
        flat = seconds / tokens
        touched = {at for first, end in pieces for at in _bins(first, end)}
        for at in touched:
            rate = flat if scale is None else self._filled[at] * scale
            self._samples[at].append(rate)
            self._rates[at] = _careful(self._samples[at])
        self._fill()

    def facts(self) -> dict[str, float]:
        """Seconds per 1,000 tokens, by the position where a known rate begins."""
        return {
            str(edge): round(rate * 1000, 6)
            for edge, rate in zip(_EDGES, self._rates, strict=True)
            if rate is not None
        }

    def _sow(self, seeds: Sequence[tuple[int, float]]) -> None:
        before_tokens, before_s = 0, 0.0
        for tokens, seconds in seeds:
            if tokens <= before_tokens or seconds <= before_s:
                continue
            rate = (seconds - before_s) / (tokens - before_tokens)
            for at in _bins(before_tokens, tokens):
                self._samples[at].append(rate)
            before_tokens, before_s = tokens, seconds
        for at, samples in enumerate(self._samples):
            if samples:
                self._rates[at] = sum(samples) / len(samples)
        if any(rate is not None for rate in self._rates):
            self._fill()

    def _fill(self) -> None:
        """Give every position a rate: one that is not known has that of the known one below it."""
        last = next(rate for rate in self._rates if rate is not None)
        filled: list[float] = []
        for rate in self._rates:
            last = rate if rate is not None else last
            filled.append(last)
        self._filled = filled


def _bins(first: int, end: int) -> range:
    """The bins that a piece has a part in, but for slivers at its ends."""
    low = bisect_right(_EDGES, first) - 1
    high = bisect_right(_EDGES, end - 1) - 1
    if low < high:
        if _EDGES[low + 1] - first < (end - first) // 16:
            low += 1
        if end - _EDGES[high] < (end - first) // 16:
            high -= 1
    return range(low, high + 1)


class ReadCost:
    """When chunks will have come up from a tier: a first one's delay, then a steady pace.

    As long as one of the two is not known it counts as nothing: the tier gets its chance, and
    every request has a budget for that (see `emberkv.core.economy`). For the same reason a tier
    that is quicker than before is believed at once, and one that is slower by and by.
    """

    def __init__(self) -> None:
        self.under_way = 0
        self.last_end_s = -inf
        self._began_s = 0.0
        self._moved_s = 0.0
        self._first_due = False
        self._came = 0
        self._first_s: float | None = None
        self._pace_s = 0.0
        self._pace_chunks = 0.0

    def started(self, count: int, now_s: float) -> None:
        """`count` more chunks are asked for."""
        if not self.under_way:
            self._began_s = self._moved_s = now_s
            self._first_due = True
            self._came = 0
        self.under_way += count

    def ended(self, count: int, came: int, at_s: float) -> None:
        """`count` chunks have ended, `came` of them well; `at_s` is when, not when it was heard."""
        self.under_way -= count
        took_s = max(0.0, at_s - self._moved_s)
        self._moved_s = max(self._moved_s, at_s)
        self.last_end_s = max(self.last_end_s, at_s)
        if not came:
            return
        self._came += came
        since_s = max(0.0, at_s - self._began_s)
        if self._first_due:
            self._first_due = False
            old_s = since_s if self._first_s is None else self._first_s
            counted_s = min(since_s, _MOST_WORSE * max(old_s, _HICCUP_S))
            self._first_s = min(since_s, old_s + _FRESH * (counted_s - old_s))
        else:
            fade = 0.5 ** (came / _FADE_CHUNKS)
            self._pace_s = self._pace_s * fade + took_s
            self._pace_chunks = self._pace_chunks * fade + came
        if self.chunk_s > since_s / self._came:  # no pace is slower than the average with delay
            self._pace_s, self._pace_chunks = since_s, float(self._came)

    def dropped(self, count: int) -> None:
        """`count` chunks that were asked for will not be read after all."""
        self.under_way -= count

    @property
    def first_s(self) -> float:
        """How long an idle tier takes to bring anything."""
        return self._first_s or 0.0

    @property
    def chunk_s(self) -> float:
        """How long each further chunk takes."""
        return self._pace_s / self._pace_chunks if self._pace_chunks else 0.0

    def silent_s(self, now_s: float) -> float:
        """For how long nothing has come, with something due."""
        return now_s - self._moved_s if self.under_way else 0.0

    def first_arrival_s(self, now_s: float) -> float:
        """When the first of chunks asked for now will be there."""
        silent_s = self.silent_s(now_s)
        return max(self.first_s, silent_s) + self.chunk_s * self.under_way

    def seconds(self, count: int, now_s: float) -> float:
        """When `count` chunks asked for now will be there, behind those under way."""
        return self.first_arrival_s(now_s) + self.chunk_s * count

    def facts(self) -> dict[str, float]:
        return {
            "first_s": round(self.first_s, 6),
            "chunk_s": round(self.chunk_s, 9),
            "under_way_chunks": float(self.under_way),
        }


class LoadCost:
    """Seconds to bring a chunk from RAM to the device.

    A load ends with the step that it was part of, so that single slow ones say nothing: nothing is
    known before a few have ended. What is known fades while nothing is loaded, or a tier that was
    slow once, on a busy machine, would never be tried again.
    """

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=SAMPLES)
        self.last_chunk_s = 0.0
        self._observed_s = 0.0

    def observe(self, count: int, seconds: float, now_s: float) -> None:
        """A load of `count` chunks took `seconds` and has ended."""
        if count > 0:
            self._samples.append(seconds / count)
            self._observed_s = now_s
            if len(self._samples) >= LEAST_LOADS:
                self.last_chunk_s = _careful(self._samples)

    def chunk_s(self, now_s: float) -> float:
        """Seconds for a chunk; 0 as long as nothing is known."""
        idle_s = max(0.0, now_s - self._observed_s)
        return self.last_chunk_s * exp2(-idle_s / LOAD_FADE_S)
