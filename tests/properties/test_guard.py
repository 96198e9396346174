"""The guard keeps its rules whatever it is told, held against an oracle that keeps every sample.

The oracle knows nothing of slices, classes or bounds: it counts raw samples, and takes the chance
of so many over budget from the binomial distribution itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from emberkv.core.gates import DRAINING, OPEN, SHUT, Gate, Gates
from emberkv.core.guard import Budget, Cause, GateChange, Guard, GuardConfig, Limit, Signal
from emberkv.core.guard.guard import CHANCE, LOADS_OUT
from emberkv.core.guard.trial import CHANCE_OF_A_STEP
from emberkv.domain.types import RAM, Level, RequestId

SIGNALS = (Signal.FIRST_TOKEN, Signal.INTER_TOKEN)
SLICES = 12


def chance_of(over: int, count: int) -> float:
    """The chance of `over` or more of `count` samples, at one in a hundred each."""
    log_p, log_q = math.log(0.01), math.log(0.99)
    return math.fsum(
        math.exp(
            math.lgamma(count + 1)
            - math.lgamma(k + 1)
            - math.lgamma(count - k + 1)
            + k * log_p
            + (count - k) * log_q
        )
        for k in range(over, count + 1)
    )


@dataclass
class Sample:
    signal: Signal
    at_s: float
    ratio: float
    on_trial: bool


@dataclass
class Oracle:
    """What has happened, as it happened; judges each change by it."""

    config: GuardConfig
    levels: int
    began_s: float
    samples: list[Sample] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gates = [OPEN] * self.levels
        self.by_hand = [False] * self.levels
        self.set_s = [self.began_s] * self.levels
        self.changed_s = self.began_s
        self.anew_s = self.began_s
        self.trial: Level | None = None

    def reset(self, now_s: float) -> None:
        self.anew_s = now_s

    def set_by_hand(self, level: Level, gate: Gate, now_s: float) -> None:
        if self.trial == level:
            self.trial = None
        self.by_hand[level] = gate != OPEN
        self._apply(level, gate, now_s)

    def judge(self, change: GateChange, now_s: float) -> None:
        """Raise unless the change follows from what was seen."""
        level, old = change.level, self.gates[change.level]
        assert now_s - self.changed_s >= self.config.window_s  # no flapping
        assert not self.by_hand[level]
        match change.cause:
            case Cause.BREACH if self.trial is not None:
                assert level == self.trial
                assert change.gate in {LOADS_OUT, SHUT}
                self._require_breach(change, now_s)
                self.trial = None
            case Cause.BREACH | Cause.BREACH_GOES_ON:
                assert level == max(
                    at for at in range(self.levels) if not self._is_out(at) and not self.by_hand[at]
                )
                loads_first = {OPEN: LOADS_OUT, LOADS_OUT: SHUT}
                assert change.gate == loads_first[old]
                self._require_breach(change, now_s)
            case Cause.COOLED_DOWN | Cause.NOT_THE_TIER:
                assert self.trial is None
                assert old in {LOADS_OUT, SHUT}
                assert now_s - self.set_s[level] >= self.config.cooldown_s
                assert level == RAM or self.gates[RAM].load_share == 1.0
                assert change.gate == Gate(self.config.trial_shares[0])
                self.trial = level
            case Cause.TRIAL_PASSED | Cause.TRIAL_QUIET:
                self._require_pass(change, old, now_s)
            case Cause.TRIAL_FAILED:
                assert level == self.trial
                assert any(self._trial_is_bad(signal) for signal in SIGNALS)
                self.trial = None
            case _:
                raise AssertionError(change)
        self._apply(level, change.gate, now_s)

    def _apply(self, level: Level, gate: Gate, now_s: float) -> None:
        self.gates[level] = gate
        self.set_s[level] = self.changed_s = now_s
        self.reset(now_s)

    def _is_out(self, at: int) -> bool:
        return self.gates[at] == SHUT

    def _seen(self, signal: Signal, *, on_trial: bool) -> list[Sample]:
        return [
            each
            for each in self.samples
            if each.signal is signal and each.on_trial is on_trial and each.at_s >= self.anew_s
        ]

    def _require_breach(self, change: GateChange, now_s: float) -> None:
        """Enough samples, too many over to be chance, and some over in each third."""
        window_s = self.config.window_s
        slice_s = window_s / SLICES
        assert now_s - self.anew_s >= window_s
        for each in change.evidence:
            seen = self._seen(each.signal, on_trial=False)
            if self.trial is None:  # then nobody is told apart
                seen += self._seen(each.signal, on_trial=True)
            recent = [sample for sample in seen if sample.at_s >= now_s - window_s - slice_s]
            assert self.config.min_samples <= each.samples <= len(recent)
            over = [sample for sample in recent if sample.ratio > 1.0]
            assert each.over <= len(over)
            assert chance_of(each.over, each.samples) < CHANCE
            for third in range(3):
                begin_s = now_s - window_s - slice_s + third * window_s / 3
                end_s = begin_s + window_s / 3 + slice_s
                assert any(begin_s <= sample.at_s <= end_s for sample in over)

    def _trial_is_bad(self, signal: Signal) -> bool:
        canary = self._seen(signal, on_trial=True)
        over = sum(sample.ratio > 1.0 for sample in canary)
        return chance_of(over, len(canary)) < CHANCE_OF_A_STEP

    def _require_pass(self, change: GateChange, old: Gate, now_s: float) -> None:
        shares = self.config.trial_shares
        assert change.level == self.trial
        step = shares.index(old.load_share)
        is_last = step + 1 == len(shares)
        assert change.gate == (OPEN if is_last else Gate(shares[step + 1]))
        counts = [len(self._seen(signal, on_trial=True)) for signal in SIGNALS]
        if change.cause is Cause.TRIAL_PASSED:
            assert all(count >= self.config.trial_samples for count in counts if count)
            assert any(counts)
        else:
            assert now_s - self.anew_s >= self.config.patience_s
        for signal in SIGNALS:
            canary = self._seen(signal, on_trial=True)
            over = sum(each.ratio > 1.0 for each in canary)
            if chance_of(over, len(canary)) < CHANCE_OF_A_STEP / 10:
                self._require_slow_others(signal)
        if is_last:
            self.trial = None

    def _require_slow_others(self, signal: Signal) -> None:
        """A canary over the budget passes only beside others that are, now or without tiers."""
        assert any(
            sample.ratio > 1.0
            for sample in self.samples
            if sample.signal is signal and not sample.on_trial
        )


configs = st.builds(
    GuardConfig,
    budgets=st.just(tuple(Budget(signal, (Limit(None, 1.0),)) for signal in SIGNALS)),
    window_s=st.sampled_from([5.5, 7.0, 12.0]),
    min_samples=st.sampled_from([10, 40]),
    cooldown_s=st.sampled_from([6.0, 30.0]),
    max_cooldown_s=st.just(60.0),
    trial_shares=st.sampled_from([(0.5,), (0.1, 0.5)]),
    trial_samples=st.just(10),
    patience_s=st.sampled_from([20.0, 80.0]),
)
levels_of_speed = st.sampled_from([0.3, 0.9, 1.0, 1.3, 4.0, 50.0])


class GuardMachine(RuleBasedStateMachine):
    """Plays time, load, slowness of tiers and of the server, gaps and operators."""

    @initialize(config=configs, levels=st.integers(1, 3), now_s=st.floats(0, 1e6))
    def begin(self, config: GuardConfig, levels: int, now_s: float) -> None:
        self.config, self.levels, self.now_s = config, levels, now_s
        self.guard = Guard(config, levels)
        self.gates = Gates(levels)
        self.oracle = Oracle(config, levels, now_s)
        self.asked = 0
        assert self.guard.decide(now_s) == []

    @rule(
        seconds=st.integers(1, 90),
        per_second=st.integers(0, 8),
        base=levels_of_speed,
        tiers=st.lists(levels_of_speed, min_size=3, max_size=3),
        slow_share=st.sampled_from([0, 0, 3, 20, 100]),
        numbers=st.randoms(use_true_random=False),
    )
    def serve(  # noqa: PLR0917
        self,
        seconds: int,
        per_second: int,
        base: float,
        tiers: list[float],
        slow_share: int,
        numbers: object,
    ) -> None:
        """Requests that are as slow as the slowest of what they use; some are slow anyway."""
        for _ in range(seconds):
            for _ in range(per_second):
                slow = 5.0 if numbers.randrange(100) < slow_share else 0.0  # type: ignore[attr-defined]
                self._ask(base, tiers, slow)
            self.now_s += 1.0
            self._decide()

    def _ask(self, base: float, tiers: Sequence[float], slow: float) -> None:
        self.asked += 1
        request = RequestId(str(self.asked))
        used = [tiers[at] for at in range(self.levels) if self.gates.loads(Level(at), request)]
        on_trial = bool(self.gates.on_trial(request))
        ratio = max([base, slow, *used])
        for signal in SIGNALS:
            self.guard.observe(signal, ratio, self.now_s, context_tokens=None, on_trial=on_trial)
            self.oracle.samples.append(Sample(signal, self.now_s, ratio, on_trial))

    def _decide(self) -> None:
        changes = self.guard.decide(self.now_s)
        assert len(changes) <= 1
        for change in changes:
            self.oracle.judge(change, self.now_s)
            self.gates.set(change.level, change.gate)

    @rule(seconds=st.sampled_from([3.0, 13.0, 1000.0]))
    def nobody_calls(self, seconds: float) -> None:
        """The engine sleeps; a break longer than a window makes the guard watch anew."""
        self.now_s += seconds
        if seconds > self.config.window_s:
            self.oracle.reset(self.now_s)
        self._decide()

    @rule(seconds=st.sampled_from([1.0, 500.0]))
    def clock_goes_back(self, seconds: float) -> None:
        assert self.guard.decide(self.now_s - seconds) == []

    @rule(at=st.integers(0, 2), gate=st.sampled_from([OPEN, OPEN, DRAINING, SHUT, Gate(0.5)]))
    def operator(self, at: int, gate: Gate) -> None:
        level = Level(at % self.levels)
        self.guard.by_hand(level, gate, self.now_s)
        self.gates.set(level, gate)
        self.oracle.set_by_hand(level, gate, self.now_s)

    @invariant()
    def the_guard_says_what_is_set(self) -> None:
        if hasattr(self, "guard"):
            for at, gate in enumerate(self.oracle.gates):
                assert self.guard.gate(Level(at)) == gate == self.gates[Level(at)]

    def teardown(self) -> None:
        """Whatever happened: once everything is quick, what the guard took out comes back."""
        if not hasattr(self, "guard"):
            return
        for _ in range(1200):
            for _ in range(4):
                self._ask(0.3, [0.3] * 3, 0.0)
            self.now_s += 1.0
            self._decide()
        ram_is_open = self.oracle.gates[RAM].load_share == 1.0
        for at, gate in enumerate(self.oracle.gates):
            assert gate == OPEN or self.oracle.by_hand[at] or not ram_is_open


TestGuard = GuardMachine.TestCase
TestGuard.settings = settings(stateful_step_count=12)
