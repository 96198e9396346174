"""Load or recompute: which part of a prefix is worth loading, and how long that may be waited for.

**The cut.** Chunks can only be used as a prefix. Of all prefixes of a match the one is taken that
saves most: the seconds its tokens would take to compute, less the wait until its chunks are up
from their tiers, less the copies to the device. Where nothing gains, nothing is loaded.

**The wait.** A request waits only while it can still be served within `max_slowdown` times what it
would have taken without us:

    time since it asked + what the engine computes now + recompute of what is missing
        ≤ max_slowdown * (what was ahead of the request when it asked + recompute of all of it)

Chunks that arrive make the left side smaller, so progress earns time. A tier that brings nothing
costs `max_slowdown - 1` of that time, at any depth of queue, and no more. So that this holds, who
came later does not begin to be computed in the meantime if that would make an earlier one late, see
`emberkv.core.backlog`.

As long as the engine's speed is not known, everything is worth loading and only the plain limits
bound the wait.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from emberkv.core.backlog import Backlog
from emberkv.core.costs import ComputeCost, LoadCost, Piece, ReadCost
from emberkv.core.leases import Lease
from emberkv.domain.types import RAM, TIER_NAMES, Level, RequestId
from emberkv.errors import ConfigError

Stretch = tuple[Level, int]
"""Consecutive chunks of a chain that one tier has: the tier and how many."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What loading is measured against."""

    tokens_per_chunk: int = 1
    max_slowdown: float = 1.05
    probe_s: float = 5.0
    """A tier that nobody loads from is tried again so often."""

    probe_chunks: int = 16
    shed_after_s: float = 0.25
    """With reads due and none ended for so long, a tier is given no more writes."""

    seeds: tuple[tuple[int, float], ...] = ()
    """(prompt tokens, seconds) of prompts computed alone, from a calibration."""

    def __post_init__(self) -> None:
        if self.tokens_per_chunk < 1 or self.probe_chunks < 1:
            raise ConfigError("tokens_per_chunk and probe_chunks must be 1 or more")
        if self.max_slowdown < 1.0:
            raise ConfigError(f"max_slowdown must be 1 or more, got {self.max_slowdown}")
        if self.probe_s <= 0 or self.shed_after_s <= 0:
            raise ConfigError("probe_s and shed_after_s must be greater than 0")


class Economy:
    """The estimates, and the two decisions taken from them. Knows no tier's contents."""

    def __init__(self, terms: Terms, tier_count: int) -> None:
        self.terms = terms
        self.compute = ComputeCost(terms.seeds)
        self.loads = LoadCost()
        self.reads = tuple(ReadCost() for _ in range(tier_count))
        self.backlog = Backlog(self.compute, terms.max_slowdown)
        self._probed_at_s: dict[Level, float] = {}

    def computed(
        self, pieces: Mapping[RequestId, Piece], others: int, seconds: float | None
    ) -> None:
        """A step has computed these pieces of prompts; `seconds` is None if that is not known."""
        if seconds is not None:
            self.compute.observe(list(pieces.values()), others, seconds)
        for request, (_, end) in pieces.items():
            self.backlog.computes(request)
            self.backlog.has(request, end)

    def ram_pays(self, first_token: int, prompt_tokens: int | None, now_s: float) -> bool:
        """Whether loading chunks that are in RAM is quicker than computing them."""
        chunk_s = self.loads.chunk_s(now_s)
        if not self.compute.known or not chunk_s:
            return True
        size = self.terms.tokens_per_chunk
        end = prompt_tokens if prompt_tokens is not None else first_token + size
        end = max(end, first_token + 1)
        return chunk_s * (end - first_token) / size < self.compute.seconds(first_token, end)

    def cut(
        self, stretches: Sequence[Stretch], first_token: int, ahead_s: float, now_s: float
    ) -> int:
        """How many chunks of a chain are worth loading: the head of it, all, or none."""
        length = sum(count for _, count in stretches)
        if not self.compute.known:
            return length
        computing_s = self.backlog.computing_s()
        load_s = self.loads.chunk_s(now_s)
        best, best_gain_s = 0, 0.0
        wanted: dict[Level, int] = {}
        before = 0
        for level, count in stretches:
            earlier = wanted.get(level, 0)
            for taken in _places(count):
                wanted[level] = earlier + taken
                at = before + taken
                saved_s = self.compute.seconds(
                    first_token, first_token + at * self.terms.tokens_per_chunk
                )
                bound_s = self.terms.max_slowdown * (ahead_s + saved_s) - saved_s
                wait_s = self._wait_s(wanted, bound_s, computing_s, now_s)
                gain_s = saved_s - wait_s - at * load_s
                if gain_s > best_gain_s:
                    best, best_gain_s = at, gain_s
            before += count
        return best

    def _wait_s(
        self, wanted: Mapping[Level, int], bound_s: float, computing_s: float, now_s: float
    ) -> float:
        """How long chunks of tiers are waited for beyond what the engine is busy with anyway.

        Endless if nothing has come by `bound_s`: then the wait would be broken off.
        """
        wait_s = 0.0
        for level, count in wanted.items():
            if level == RAM:
                continue
            cost = self.reads[level]
            if max(cost.first_arrival_s(now_s), computing_s) > bound_s:
                return inf
            wait_s = max(wait_s, cost.seconds(count, now_s))
        return max(wait_s - computing_s, 0.0)

    def park(self, request: RequestId, first_token: int, had: int, end: int, now_s: float) -> None:
        """A request will wait for chunks `had` … that end at token `end`, or load them from RAM."""
        first = first_token + had * self.terms.tokens_per_chunk
        tokens = self.backlog.tokens(request) or end
        without_us_s = self.backlog.ahead_s(request) + self.compute.seconds(first, end)
        rest_s = self.compute.seconds(end, tokens)
        self.backlog.has(request, first)
        self.backlog.park(request, now_s + self.terms.max_slowdown * without_us_s + rest_s)

    def wait_is_spent(self, lease: Lease, now_s: float) -> bool:
        """Whether a lease's request would be served too late if it waited on."""
        if not self.compute.known:
            return False
        ready = lease.first_token + lease.ready * self.terms.tokens_per_chunk
        self.backlog.has(lease.request, ready)
        return self.backlog.slack_s(lease.request, now_s) < 0.0

    def facts(self) -> dict[str, object]:
        """What is known of costs, in plain values."""
        return {
            "compute_s_per_1000_tokens": self.compute.facts(),
            "load_chunk_s": round(self.loads.last_chunk_s, 9),
            "reads": {
                TIER_NAMES[level]: cost.facts() for level, cost in enumerate(self.reads) if level
            },
        }

    def probe_is_due(self, level: Level, now_s: float) -> bool:
        """Whether a tier from which nothing has come for a while should be tried; True once."""
        last_s = max(self.reads[level].last_end_s, self._probed_at_s.get(level, 0.0))
        if self.reads[level].under_way or now_s - last_s < self.terms.probe_s:
            return False
        self._probed_at_s[level] = now_s
        return True

    def sheds_writes(self, level: Level, now_s: float) -> bool:
        """Whether a tier is too late with its reads to be given anything to write."""
        return self.reads[level].silent_s(now_s) > self.terms.shed_after_s


def _places(count: int) -> list[int]:
    """Where in a stretch a best cut can lie: a gain is close to convex between these."""
    return sorted({(count + 2) // 4, (count + 1) // 2, (3 * count + 2) // 4, count} - {0})
