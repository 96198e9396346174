"""The guard: a state machine that decides when a tier is taken out, and when it is tried again.

    open ──breach──► loads_out ──breach goes on──► out
     ▲                   │                          │
     │                   ▼  cooled down             ▼
     └──passed── on_trial (5 %, then 25 %) ──failed──► back where it was, for twice as long

A *breach* is a signal whose budget was broken for a whole window: more of its samples than one in
a hundred, by more than chance explains, and in each third of the window. The highest level that
is open is taken out first: loads, and if that is not enough, stores; then the next level down,
RAM last. No change follows another within a window, and every change starts the window anew, so
that each is decided on what was seen since the one before.

If the breach goes on when no tier is left, the tiers are not its cause. The figure without them is
then what they are held against until the budget is met again, and they are tried again at once
after their time out: a server that is slow for reasons of its own keeps its tiers.
"""

from __future__ import annotations

import enum
import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from emberkv.core.gates import OPEN, SHUT, Gate
from emberkv.core.guard.figures import ALLOWED_SHARE, Window, more_than_chance, pooled
from emberkv.core.guard.reasons import Cause, Evidence, GateChange
from emberkv.core.guard.rules import GuardConfig, Return, Signal
from emberkv.core.guard.trial import Trial, Verdict
from emberkv.domain.types import RAM, Level

CHANCE: Final = 1e-4
"""How often a server that meets its budget may look, in one window, as if it did not."""

TOLERANCE: Final = 1.05
"""How much worse than without any tier the figures may be once the tiers are back."""

LOADS_OUT: Final = Gate(load_share=0.0, stores=True)
HISTORY: Final = 64


class Stage(enum.Enum):
    """How far a tier is in use, as far as the guard is concerned."""

    OPEN = "open"
    LOADS_OUT = "loads_out"
    OUT = "out"
    ON_TRIAL = "on_trial"
    BY_HAND = "by_hand"  # an operator's gate; the guard leaves it alone


_GATES: Final = {Stage.OPEN: OPEN, Stage.LOADS_OUT: LOADS_OUT, Stage.OUT: SHUT}


@dataclass(slots=True)
class _Tier:
    stage: Stage = Stage.OPEN
    gate: Gate = OPEN
    behind: Stage = Stage.OPEN  # where a tier on trial falls back to
    since_s: float = 0.0
    failures: int = 0


class Guard:
    """Watches signals and decides on gates; whoever owns the tiers sets them.

    Every call takes the time from a clock that only goes forward; one that does not is held at
    the latest time seen. Memory is bounded whatever is observed. `decide` is meant to be called
    about once a second: a break of more than a window makes the guard start watching anew.
    """

    def __init__(self, config: GuardConfig, levels: int) -> None:
        self.config = config
        self._budgets = {budget.signal: budget for budget in config.budgets}
        self._tiers = tuple(_Tier() for _ in range(levels))
        self._windows = {signal: Window(config.window_s, 0.0) for signal in self._budgets}
        self._trial: Trial | None = None
        self._excuses: dict[Signal, Evidence] = {}
        self._unjudged: Counter[Signal] = Counter()
        self._history: deque[GateChange] = deque(maxlen=HISTORY)
        self._now_s: float | None = None
        self._decided_s = 0.0
        self._changed_s = 0.0

    @property
    def history(self) -> Sequence[GateChange]:
        """The latest changes, oldest first."""
        return tuple(self._history)

    def gate(self, level: Level) -> Gate:
        """The gate as it should stand."""
        return self._tiers[level].gate

    def stage(self, level: Level) -> Stage:
        """How far a tier is in use."""
        return self._tiers[level].stage

    def observe(
        self,
        signal: Signal,
        value_s: float,
        now_s: float,
        *,
        context_tokens: int | None,
        on_trial: bool,
        count: int = 1,
    ) -> None:
        """Count samples of one value. `on_trial`: of requests that may load from a tier on trial.

        One call for the tokens of one step, where their contexts are of one class, costs as much
        as for one token.

        Signals without a budget cost nothing; samples without one, and values that are no time,
        are counted as not judged.
        """
        budget = self._budgets.get(signal)
        if budget is None:
            return
        now_s = self._tick(now_s)
        limit_s = budget.seconds(context_tokens)
        if limit_s is None or not value_s >= 0:
            self._unjudged[signal] += count
            return
        ratio = value_s / limit_s
        if self._trial is not None:
            self._trial.add(signal, ratio, count, on_trial=on_trial)
        if self._trial is None or not on_trial:
            self._windows[signal].add(ratio, count, now_s)

    def decide(self, now_s: float) -> list[GateChange]:
        """What is to be changed now: nothing or one gate, which counts as set from here on."""
        now_s = self._tick(now_s)
        if now_s - self._decided_s > self.config.window_s:
            self._watch_anew(now_s)
        self._decided_s = now_s
        if now_s - self._changed_s < self.config.window_s:
            return []
        self._drop_excuses(now_s)
        change = None
        broken = self._broken(now_s)
        if broken:
            change = self._take_out(broken, now_s)
            if change is None:
                self._excuse(broken)
        if change is None:
            change = self._judge_trial(now_s) if self._trial else self._try_again(now_s)
        return [] if change is None else [change]

    def by_hand(self, level: Level, gate: Gate, now_s: float) -> None:
        """An operator has set a gate. Open: the guard watches it again; else it is left alone."""
        now_s = self._tick(now_s)
        if self._trial is not None and self._trial.level == level:
            self._trial = None
        tier = self._tiers[level]
        tier.failures = 0
        self._set(level, Stage.OPEN if gate == OPEN else Stage.BY_HAND, gate, now_s)
        self._note(level, Cause.BY_HAND, (), now_s)

    def as_facts(self) -> dict[str, object]:
        """State for status, in plain values. Times are those of the caller's clock."""
        return {
            "tiers": [self._tier_facts(level) for level in range(len(self._tiers))],
            "signals": [self._signal_facts(signal) for signal in self._budgets],
            "slow_without_tiers": [str(each) for each in self._excuses.values()],
            "changes": [change.as_facts() for change in self._history],
        }

    # ---------------------------------------------------------------------------------- decisions

    def _take_out(self, broken: Sequence[Evidence], now_s: float) -> GateChange | None:
        """Take out more of the tier added last; None if nothing is left to be taken out."""
        if self._trial is not None:
            return self._end_trial(Cause.BREACH, broken, now_s)
        for at in reversed(range(len(self._tiers))):
            level, tier = Level(at), self._tiers[at]
            if tier.stage is Stage.OPEN:
                if now_s - tier.since_s >= self.config.max_cooldown_s:
                    tier.failures = 0
                tier.failures += 1
                return self._move(level, Stage.LOADS_OUT, Cause.BREACH, broken, now_s)
            if tier.stage is Stage.LOADS_OUT:
                return self._move(level, Stage.OUT, Cause.BREACH_GOES_ON, broken, now_s)
        return None

    def _excuse(self, broken: Sequence[Evidence]) -> None:
        """No tier is in use and the breach goes on: from now on it is not held against them."""
        self._excuses.update({each.signal: each for each in broken})
        for tier in self._tiers:
            tier.failures = 0

    def _drop_excuses(self, now_s: float) -> None:
        """The budget is met again, so that it counts again."""
        for signal in list(self._excuses):
            thirds = self._windows[signal].thirds(now_s)
            whole = None if thirds is None else pooled(thirds)
            if whole and whole.count >= self.config.min_samples and whole.p99() <= 1.0:
                del self._excuses[signal]

    def _try_again(self, now_s: float) -> GateChange | None:
        """Put a tier on trial whose time out is over, the lowest level first."""
        if self.config.returns is Return.BY_HAND:
            return None
        for at, tier in enumerate(self._tiers):
            if tier.stage not in {Stage.LOADS_OUT, Stage.OUT}:
                continue
            through_ram = at == RAM or self._tiers[RAM].gate.load_share == 1.0
            if not through_ram or now_s - tier.since_s < self._cooldown_s(tier):
                return None
            self._trial = Trial(self.config, Level(at), now_s)
            tier.behind = tier.stage
            cause = Cause.NOT_THE_TIER if self._excuses else Cause.COOLED_DOWN
            return self._widen(self._trial, cause, tuple(self._excuses.values()), now_s)
        return None

    def _judge_trial(self, now_s: float) -> GateChange | None:
        trial = self._trial
        assert trial is not None
        if now_s - trial.began_s < self.config.window_s:
            return None
        verdict, evidence = trial.judge(self._allowances(), now_s)
        if verdict is Verdict.OPEN:
            return None
        if verdict is Verdict.FAILED:
            return self._end_trial(Cause.TRIAL_FAILED, evidence, now_s)
        cause = Cause.TRIAL_PASSED if verdict is Verdict.PASSED else Cause.TRIAL_QUIET
        if trial.is_last_step:
            self._trial = None
            return self._move(trial.level, Stage.OPEN, cause, evidence, now_s)
        trial.widen(now_s)
        return self._widen(trial, cause, evidence, now_s)

    def _end_trial(self, cause: Cause, evidence: Sequence[Evidence], now_s: float) -> GateChange:
        """The tier on trial goes back to where it was, and stays there longer."""
        trial, self._trial = self._trial, None
        assert trial is not None
        tier = self._tiers[trial.level]
        tier.failures += 1
        return self._move(trial.level, tier.behind, cause, evidence, now_s)

    # -------------------------------------------------------------------------------------- state

    def _move(
        self, level: Level, stage: Stage, cause: Cause, evidence: Sequence[Evidence], now_s: float
    ) -> GateChange:
        self._set(level, stage, _GATES[stage], now_s)
        return self._note(level, cause, evidence, now_s)

    def _widen(
        self, trial: Trial, cause: Cause, evidence: Sequence[Evidence], now_s: float
    ) -> GateChange:
        self._set(trial.level, Stage.ON_TRIAL, Gate(trial.share, stores=True), now_s)
        return self._note(trial.level, cause, evidence, now_s)

    def _set(self, level: Level, stage: Stage, gate: Gate, now_s: float) -> None:
        tier = self._tiers[level]
        tier.stage, tier.gate, tier.since_s = stage, gate, now_s
        self._changed_s = now_s
        self._watch_anew(now_s)

    def _note(
        self, level: Level, cause: Cause, evidence: Sequence[Evidence], now_s: float
    ) -> GateChange:
        gate = self._tiers[level].gate
        change = GateChange(level, gate, cause, now_s, self.config.window_s, tuple(evidence))
        self._history.append(change)
        return change

    def _watch_anew(self, now_s: float) -> None:
        for window in self._windows.values():
            window.clear(now_s)
        if self._trial is not None:
            self._trial.restart(now_s)

    def _tick(self, now_s: float) -> float:
        if self._now_s is None:
            self._now_s = self._decided_s = self._changed_s = now_s
            for tier in self._tiers:
                tier.since_s = now_s
            self._watch_anew(now_s)
        self._now_s = max(self._now_s, now_s)
        return self._now_s

    # ------------------------------------------------------------------------------------ figures

    def _allowances(self) -> dict[Signal, float]:
        return {at: each.p99_ratio * TOLERANCE for at, each in self._excuses.items()}

    def _broken(self, now_s: float) -> list[Evidence]:
        """The signals in breach."""
        found = []
        for signal, threshold in (dict.fromkeys(self._budgets, 1.0) | self._allowances()).items():
            thirds = self._windows[signal].thirds(now_s)
            if thirds is None:
                continue
            whole = pooled(thirds)
            over = whole.over(threshold)
            if (
                whole.count >= self.config.min_samples
                and more_than_chance(over, whole.count, CHANCE)
                and all(part.over(threshold) > ALLOWED_SHARE * part.count for part in thirds)
            ):
                budget_s = self._budgets[signal].single_s
                p99 = whole.p99()
                found.append(Evidence(signal, p99, threshold, over, whole.count, budget_s))
        return found

    def _cooldown_s(self, tier: _Tier) -> float:
        doublings = min(max(tier.failures - 1, 0), 30)
        return min(math.ldexp(self.config.cooldown_s, doublings), self.config.max_cooldown_s)

    def _tier_facts(self, at: int) -> dict[str, object]:
        tier = self._tiers[at]
        facts: dict[str, object] = {
            "level": at,
            "stage": tier.stage.value,
            "load_share": tier.gate.load_share,
            "stores": tier.gate.stores,
            "since_s": tier.since_s,
            "failures": tier.failures,
        }
        if tier.stage in {Stage.LOADS_OUT, Stage.OUT}:
            by_hand = self.config.returns is Return.BY_HAND
            facts["tried_again_s"] = None if by_hand else tier.since_s + self._cooldown_s(tier)
        if self._trial is not None and self._trial.level == at:
            facts["trial_samples"] = {
                signal.value: {"on_trial": canary, "others": others}
                for signal, (canary, others) in self._trial.samples().items()
            }
        return facts

    def _signal_facts(self, signal: Signal) -> dict[str, object]:
        budget = self._budgets[signal]
        thirds = self._windows[signal].thirds(self._now_s or 0.0)
        whole = pooled(thirds or [])
        return {
            "signal": signal.value,
            "budgets": [
                {"up_to_tokens": each.up_to_tokens, "seconds": each.seconds}
                for each in budget.limits
            ],
            "window_full": thirds is not None,
            "samples": whole.count,
            "over_budget": whole.over(1.0),
            "p99_ratio": round(whole.p99(), 4),
            "held_against_ratio": round(self._allowances().get(signal, 1.0), 4),
            "not_judged": self._unjudged[signal],
        }
