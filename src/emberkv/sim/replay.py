"""Replays a trace on a tier stack, by the calls that the live manager makes.

    arrival ─► residence … ─► load ─► loaded ─► settle ─► offload ─► stored ─► end
                    │           ▲
                 promote ─► waiting …   (a step every `step_s` while anyone waits)

Computing and the engine's own copies take no time here: what is simulated is what is kept where,
and what waiting for the tiers below costs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from emberkv.core.counts import Event
from emberkv.core.limits import Limits
from emberkv.core.residents import Residents
from emberkv.core.stack import TierStack
from emberkv.domain.types import RAM, ChunkKey, Copy, Level, RequestId
from emberkv.errors import ConfigError
from emberkv.policy.eviction import EVICTION_POLICIES
from emberkv.sim.clock import SimulatedDriver, TierSpeed
from emberkv.sim.traces import TraceRequest


@dataclass(frozen=True, slots=True)
class TierPlan:
    """One tier: its chunks, the name of its eviction policy, and its speed (RAM's is not used)."""

    slot_count: int
    policy: str = "lru"
    speed: TierSpeed = field(default_factory=TierSpeed)

    def __post_init__(self) -> None:
        if self.policy not in EVICTION_POLICIES:
            known = ", ".join(sorted(EVICTION_POLICIES))
            raise ConfigError(f"there is no eviction policy {self.policy!r}; there are: {known}")
        if self.slot_count < 1:
            raise ConfigError(f"a tier needs room for a chunk, got {self.slot_count}")


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """What a trace is replayed on; `tiers[0]` is RAM."""

    tiers: tuple[TierPlan, ...]
    tokens_per_chunk: int
    chunk_bytes: int = 1
    limits: Limits = field(default_factory=Limits)
    step_s: float = 0.05


@dataclass(slots=True)
class ReplayResult:
    """What a replay has counted; `hit_tokens[level]` came from that tier."""

    hit_tokens: list[int]
    requests: int = 0
    input_tokens: int = 0
    waited_s: float = 0.0
    counts: Counter[tuple[Event, Level]] = field(default_factory=Counter)

    @property
    def hit_ratio(self) -> float:
        """The share of all input tokens that no engine had to compute."""
        return sum(self.hit_tokens) / self.input_tokens if self.input_tokens else 0.0


@dataclass(slots=True)
class _Asking:
    """A request that has arrived and not been served."""

    request: RequestId
    keys: tuple[ChunkKey, ...]
    since_s: float


def build_stack(plan: ReplayPlan, stack_class: type[TierStack] = TierStack) -> TierStack:
    """An empty stack as planned."""
    tiers = [
        Residents(
            tier.slot_count, plan.chunk_bytes, EVICTION_POLICIES[tier.policy](tier.slot_count)
        )
        for tier in plan.tiers
    ]
    return stack_class(tiers, plan.limits)


class Replay:
    """One run of a trace; `stack` may be any stack of the plan's shape."""

    def __init__(self, plan: ReplayPlan, stack: TierStack | None = None) -> None:
        self.plan = plan
        self.stack = stack if stack is not None else build_stack(plan)
        self.now_s = 0.0
        self._driver = SimulatedDriver([tier.speed for tier in plan.tiers], plan.chunk_bytes)
        self._result = ReplayResult([0] * len(plan.tiers))
        self._waiting: list[_Asking] = []
        self._step = 0

    def run(self, requests: Iterable[TraceRequest]) -> ReplayResult:
        """Serve requests, in the order of their arrival, until all have ended."""
        for request in requests:
            self._advance(request.arrival_s)
            self._arrive(request)
        while self._waiting:
            self._take_step(self.now_s + self.plan.step_s)
        self._result.counts = self.stack.counts.copy()
        return self._result

    # ── time ─────────────────────────────────────────────────────────────────────────────────

    def _advance(self, until_s: float) -> None:
        """Take the steps that lie before a time, and be there."""
        while self._waiting and self.now_s + self.plan.step_s <= until_s:
            self._take_step(self.now_s + self.plan.step_s)
        self._drain(max(self.now_s, until_s))

    def _drain(self, now_s: float) -> None:
        self.now_s = now_s
        for ended in self._driver.poll(now_s):
            self.stack.done(ended.transfer, ended.results, now_s)

    def _take_step(self, now_s: float) -> None:
        self._drain(now_s)
        still: list[_Asking] = []
        served: list[tuple[_Asking, int]] = []
        for each in self._waiting:
            if self.stack.waiting(each.request, self._step, now_s):
                still.append(each)
            else:
                self._result.waited_s += now_s - each.since_s
                served.append((each, self._answer(each)))
        self._waiting = still
        self._end_step(served)

    def _end_step(self, served: Sequence[tuple[_Asking, int]]) -> None:
        """As in an engine: promotions first, then what this step computes is stored."""
        self.stack.settle(self.now_s)
        self._carry_out()
        for each, hits in served:
            self._compute(each, hits)
        self._step += 1

    def _carry_out(self) -> None:
        copies = [each for each in self.stack.take_effects() if isinstance(each, Copy)]
        if copies:
            self._driver.submit(copies, self.now_s)

    # ── requests ─────────────────────────────────────────────────────────────────────────────

    def _arrive(self, traced: TraceRequest) -> None:
        self._result.requests += 1
        self._result.input_tokens += traced.input_tokens
        asking = _Asking(RequestId(str(self._result.requests)), traced.keys, self.now_s)
        known = 0
        deferred = False
        for key in traced.keys:
            level = self.stack.residence(key, self.now_s)
            if level is None:
                break
            known += 1
            deferred = deferred or level != RAM
        if deferred:
            self.stack.promote(asking.request, traced.keys[:known], self.now_s, step=self._step)
            self._waiting.append(asking)
            self._end_step([])
        else:
            self._load(asking, known)
            self._end_step([(asking, known)])

    def _answer(self, asking: _Asking) -> int:
        """Load for a request that has waited what is ready in RAM by now; returns how much."""
        ram = self.stack.tiers[RAM]
        hits = 0
        while hits < len(asking.keys) and ram.ready(asking.keys[hits]):
            hits += 1
        self._load(asking, hits)
        return hits

    def _load(self, asking: _Asking, hits: int) -> None:
        if not hits:
            self.stack.scheduled(asking.request)
            return
        for key in asking.keys[:hits]:
            level = self.stack.origin(asking.request, key)
            self._result.hit_tokens[level] += self.plan.tokens_per_chunk
        self.stack.load(asking.request, asking.keys[:hits], self.now_s)
        self._carry_out()
        self.stack.loaded(asking.request, self.now_s)

    def _compute(self, asking: _Asking, hits: int) -> None:
        """Compute and store what did not hit, and end."""
        request, fresh = asking.request, asking.keys[hits:]
        if fresh:
            parent = asking.keys[hits - 1] if hits else None
            admitted = self.stack.offload(request, fresh, parent, self.now_s)
            self._carry_out()
            self.stack.stored(request, [resident.key for resident in admitted], self.now_s)
            self._carry_out()
        self.stack.end(request)
