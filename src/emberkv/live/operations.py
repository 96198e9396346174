"""What can be asked of a running manager: how it is, why a request did not hit, and to change.

Each command takes its turn beside the engine's scheduler (`live.control.turns`) for one short
call. What takes longer, the search of a record or a tier's durable reset, happens outside of it.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Final, Protocol, TypeVar

import emberkv
from emberkv.core.gates import DRAINING, OPEN, SHUT, Gate
from emberkv.core.limits import Limits
from emberkv.core.residents import State
from emberkv.domain.namespace import Namespace
from emberkv.domain.types import DISK, RAM, TIER_NAMES, ChunkKey, Level
from emberkv.errors import ControlError, UsageError
from emberkv.live import explaining
from emberkv.live.control import messages
from emberkv.live.control.messages import (
    Answer,
    Done,
    Explanation,
    GateName,
    Occurrence,
    Place,
    PurgeScope,
    ServerStatus,
    TierStatus,
    WaitStatus,
)
from emberkv.live.manager import TierManager
from emberkv.live.recent import Trail
from emberkv.live.requests import Answering
from emberkv.observe import metrics
from emberkv.observe.metrics import Metric
from emberkv.policy.eviction import EVICTION_POLICIES

DURABLE_S: Final = 10.0
"""How long a purge waits for the disk."""

POLL_S: Final = 0.01
MAX_OCCURRENCES: Final = 12
BUDGETS: Final = tuple(each.name for each in fields(Limits))
_GATES: Final = {GateName.ON: OPEN, GateName.DRAIN: DRAINING, GateName.OFF: SHUT}

Facts = Callable[[], Mapping[str, object]]
T = TypeVar("T")


class HashPrompt(Protocol):
    """How an engine names the chunks of a prompt."""

    def __call__(self, tokens: Sequence[int], cache_salt: str | None, /) -> list[ChunkKey]:
        """The keys of a prompt's whole chunks, as for a request. Raises `UsageError`."""
        ...


@dataclass(frozen=True, slots=True)
class About:
    """What a manager does not know of itself. `root_dir` is the disk tier's directory."""

    instance: str
    tokens_per_chunk: int
    namespace: Namespace | None = None
    root_dir: str | None = None
    keeper_pid: Callable[[], int | None] = lambda: None
    hash_prompt: HashPrompt | None = None


class Operations:
    """The commands on one manager. `facts` are told in its status, by name; add to them freely."""

    def __init__(self, manager: TierManager, about: About, clock: Callable[[], float]) -> None:
        self.facts: dict[str, Facts] = {
            "costs": manager.stack.economy.facts,
            "retention": manager.stack.retention.facts,
        }
        self._manager = manager
        self._about = about
        self._clock = clock
        self._began_s = clock()
        self.instance = about.instance

    def answer(self, request: messages.Request) -> Answer:
        """Carry out what a client asks. Raises `UsageError` and `ControlError`."""
        match request:
            case messages.StatusRequest():
                return self.status()
            case messages.SetGate(tier, gate):
                return self.set_gate(tier, gate)
            case messages.SetPolicy(tier, policy):
                return self.set_policy(tier, policy)
            case messages.SetBudget(limits):
                return self.set_budget(limits)
            case messages.Purge(scope):
                return self.purge(scope)
            case messages.WhyRequest(name):
                return self.why_request(name)
            case messages.WhyPrompt(tokens, cache_salt):
                return self.why_prompt(tokens, cache_salt)

    # ── looking ──────────────────────────────────────────────────────────────────────────────

    def status(self) -> ServerStatus:
        """How the tiers are, and what they have done since the start."""
        return self._manager.turns.beside(self._status)

    def _status(self) -> ServerStatus:
        manager, about = self._manager, self._about
        now_s = self._clock()
        stack = manager.stack
        here = manager.here()
        totals = manager.tally.totals(stack)
        chunks: dict[str, dict[str, int]] = {}
        for (tier, event), count in _by_labels(totals, metrics.CHUNKS).items():
            chunks.setdefault(tier, {})[event] = count
        return ServerStatus(
            instance=self.instance,
            version=emberkv.__version__,
            pid=os.getpid(),
            keeper_pid=about.keeper_pid(),
            serving=manager.serving,
            uptime_s=now_s - self._began_s,
            namespace=about.namespace.digest if about.namespace else None,
            tokens_per_chunk=about.tokens_per_chunk,
            chunk_bytes=stack.tiers[RAM].chunk_bytes,
            tiers=self._tiers(),
            requests_here=len(here),
            requests_waiting=sum(state.answering is Answering.WAIT for state in here),
            tokens_by_source={k[0]: v for k, v in _by_labels(totals, metrics.TOKENS).items()},
            requests_by_reason={k[0]: v for k, v in _by_labels(totals, metrics.REQUESTS).items()},
            chunks_by_event=chunks,
            copied_bytes={
                f"{source}_to_{target}": count
                for (source, target), count in _by_labels(totals, metrics.COPY_BYTES).items()
            },
            waits=_waits(sorted(manager.tally.waits_s)),
            limits={name: float(getattr(stack.limits, name)) for name in BUDGETS},
            occurrences=self._occurrences(now_s),
            facts={name: dict(tell()) for name, tell in self.facts.items()},
        )

    def _tiers(self) -> tuple[TierStatus, ...]:
        manager, stack = self._manager, self._manager.stack
        down = manager.tally.down
        arriving: Counter[Level] = Counter()
        leaving: Counter[Level] = Counter()
        for copy, still_open in stack.transfers.open_copies(stale=None):
            arriving[copy.target] += len(still_open)
            leaving[copy.source] += len(still_open)
        found = []
        for at, tier in enumerate(stack.tiers):
            level = Level(at)
            gate = stack.gates[level]
            found.append(
                TierStatus(
                    name=TIER_NAMES[at],
                    capacity_bytes=tier.capacity_bytes,
                    used_bytes=len(tier.entries) * tier.chunk_bytes,
                    chunks=len(tier.entries),
                    pinned_chunks=tier.pinned_count,
                    arriving_chunks=arriving[level],
                    leaving_chunks=leaving[level],
                    up=level not in down,
                    why_down=down.get(level),
                    gate=_gate_name(gate),
                    load_share=gate.load_share,
                    stores=gate.stores,
                    eviction_policy=manager.fates.policies.get(level, ""),
                )
            )
        if DISK in down and len(stack.tiers) <= DISK:
            found.append(
                TierStatus("disk", 0, 0, 0, 0, 0, 0, False, down[DISK], "off", 0.0, False, "")
            )
        return tuple(found)

    def _occurrences(self, now_s: float) -> tuple[Occurrence, ...]:
        self._manager.fates.take(now_s)
        return tuple(
            Occurrence(now_s - at_s, what, None if level is None else TIER_NAMES[level], count)
            for at_s, what, level, count in self._manager.fates.latest(MAX_OCCURRENCES)
        )

    # ── changing ─────────────────────────────────────────────────────────────────────────────

    def set_gate(self, tier: str, gate: GateName) -> Done:
        """Open, drain or shut a tier."""
        level = self._level(tier)
        now_s = self._clock()
        self._change(lambda: self._manager.watch.by_hand(level, _GATES[gate], now_s))
        said = {
            GateName.ON: "is open",
            GateName.DRAIN: "is read and takes nothing in",
            GateName.OFF: "is shut: neither read nor written",
        }
        return Done(f"tier {tier} {said[gate]}")

    def set_policy(self, tier: str, policy: str) -> Done:
        """Order a tier by another eviction policy; O(its chunks), during which the engine waits."""
        level = self._level(tier)
        if policy not in EVICTION_POLICIES:
            known = ", ".join(EVICTION_POLICIES)
            raise UsageError(f"no eviction policy '{policy}'; there are: {known}")

        def change() -> None:
            self._manager.fates.take(self._clock())
            tier = self._manager.stack.tiers[level]
            self._manager.stack.set_policy(level, EVICTION_POLICIES[policy](tier.slot_count))
            self._manager.fates.policies[level] = policy

        self._change(change)
        return Done(f"tier {tier} evicts by {policy} from now on")

    def set_budget(self, changes: Mapping[str, float]) -> Done:
        """Put other limits in force."""
        for name in changes:
            if name not in BUDGETS:
                raise UsageError(f"no budget '{name}'; there are: {', '.join(BUDGETS)}")

        def change() -> Limits:
            stack = self._manager.stack
            stack.limits = stack.transfers.limits = _changed(stack.limits, changes)
            return stack.limits

        limits = self._change(change)
        said = ", ".join(f"{name} = {getattr(limits, name):g}" for name in changes)
        return Done(f"in force: {said}")

    def purge(self, scope: PurgeScope) -> Done:
        """Forget chunks. What is being used or copied at this moment stays in RAM.

        Waits until the disk has made it durable, but not as the engine sees it.
        """
        disk = len(self._manager.stack.tiers) > DISK
        if scope is PurgeScope.DISK and not disk:
            raise UsageError("there is no disk tier")
        if scope is PurgeScope.ALL:
            self._change(self._manager.begin_purge)
            return self._until_durable("everything was forgotten")
        if scope is PurgeScope.RAM:
            stays = self._change(lambda: self._empty(RAM))
            return Done(f"RAM was emptied; {stays} chunks in use stay" if stays else "RAM is empty")
        self._change(self._begin_disk_purge)
        done = self._until_durable("the disk tier is empty")
        self._change(self._end_disk_purge)
        return done

    def _empty(self, level: Level) -> int:
        """Empty a tier; returns how many chunks stay because something uses them."""
        manager = self._manager
        manager.fates.cleared(level, "purge", self._clock())
        manager.stack.empty(level)
        manager.stack.journal.take()  # these evictions are the purge that was just noted
        manager.attend()
        return len(manager.stack.tiers[level].entries)

    def _begin_disk_purge(self) -> None:
        self._empty(DISK)
        self._manager.driver.begin_reset()

    def _end_disk_purge(self) -> None:
        """Once the disk is empty: what was under way has ended; RAM's rows need their seals."""
        self._empty(DISK)
        entries = self._manager.stack.tiers[RAM].entries.values()
        self._manager.driver.seal([r.slot for r in entries if r.state is State.READY])

    def _until_durable(self, done: str) -> Done:
        deadline_s = time.monotonic() + DURABLE_S
        while self._change(self._reset_is_owed):
            if time.monotonic() > deadline_s:
                return Done(done, "the disk has not confirmed it: a crash now may bring some back")
            time.sleep(POLL_S)
        return Done(done)

    def _reset_is_owed(self) -> bool:
        self._manager.attend()
        return self._manager.driver.reset_is_owed

    def _change(self, call: Callable[[], T]) -> T:
        return self._manager.turns.between_passes(call)

    def _level(self, tier: str) -> Level:
        names = TIER_NAMES[: len(self._manager.stack.tiers)]
        if tier not in names:
            raise UsageError(f"no tier '{tier}'; there are: {', '.join(names)}")
        return Level(names.index(tier))

    # ── explaining ───────────────────────────────────────────────────────────────────────────

    def why_request(self, name: str) -> Explanation:
        """Why a request that was there did not get more."""
        trails, now_s = self._manager.turns.beside(self._trails)
        trail = _chosen(name, trails)
        history = self._manager.fates.of(explaining.keys_of(trail))
        known = explaining.Known(history, trails, now_s)
        stretches = explaining.explain_request(trail, self._about.tokens_per_chunk, known)
        return self._explanation(
            explaining.summary_of(trail, now_s),
            trail.facts.prompt_tokens,
            trail.keys is not None,
            stretches,
        )

    def why_prompt(self, tokens: Sequence[int], cache_salt: str | None) -> Explanation:
        """What a prompt would find now."""
        if self._about.hash_prompt is None:
            raise ControlError("the engine does not show how it hashes: use EmberConnector")
        if len(tokens) > messages.MAX_TOKENS:
            raise UsageError(f"a prompt has {messages.MAX_TOKENS} tokens at most")
        if any(not 0 <= token < 2**31 for token in tokens):
            raise UsageError("token ids are whole numbers from 0")
        keys = self._about.hash_prompt(tokens, cache_salt)
        trails, now_s = self._manager.turns.beside(self._trails)
        places, shut = self._manager.turns.beside(lambda: self._places(keys))
        known = explaining.Known(self._manager.fates.of(keys), trails, now_s)
        stretches = explaining.explain_prompt(keys, places, shut, known)
        return self._explanation(None, len(tokens), True, stretches)

    def _trails(self) -> tuple[list[Trail], float]:
        now_s = self._clock()
        self._manager.fates.take(now_s)
        here = [state.trail for state in self._manager.here()]
        return here + self._manager.recent.ended(), now_s

    def _places(self, keys: Sequence[ChunkKey]) -> tuple[list[Place], set[Place]]:
        stack = self._manager.stack
        places = (Place.RAM, Place.DISK)
        shut = {
            places[level]
            for level in range(len(stack.tiers))
            if not stack.gates[Level(level)].load_share
        }
        if Place.RAM in shut:
            shut.add(Place.DISK)
        return [explaining.place_now(stack, key) for key in keys], shut

    def _explanation(
        self,
        request: messages.AskedRequest | None,
        prompt_tokens: int | None,
        all_known: bool,
        stretches: tuple[messages.Stretch, ...],
    ) -> Explanation:
        about = self._about
        began_s = self._manager.fates.began_s
        return Explanation(
            instance=self.instance,
            request=request,
            prompt_tokens=prompt_tokens,
            tokens_per_chunk=about.tokens_per_chunk,
            all_known=all_known,
            stretches=stretches,
            record_age_s=None if began_s is None else self._clock() - began_s,
            root_dir=about.root_dir,
            namespace=about.namespace.digest if about.namespace else None,
            fields=dict(about.namespace.fields) if about.namespace else {},
        )


def _changed(limits: Limits, changes: Mapping[str, float]) -> Limits:
    """Limits with some of them changed. Raises `ConfigError` for one that can't be."""
    values: dict[str, float] = {}
    for name, value in changes.items():
        whole = isinstance(getattr(limits, name), int)
        if whole and not float(value).is_integer():
            raise UsageError(f"{name} is a whole number, got {value:g}")
        values[name] = int(value) if whole else value
    return replace(limits, **values)  # type: ignore[arg-type]


def _gate_name(gate: Gate) -> str:
    for name, known in _GATES.items():
        if gate == known:
            return name.value
    return "part"


def _by_labels(
    totals: Mapping[tuple[Metric, tuple[str, ...]], float], metric: Metric
) -> dict[tuple[str, ...], int]:
    return {labels: int(count) for (each, labels), count in totals.items() if each is metric}


def _waits(ordered_s: Sequence[float]) -> WaitStatus:
    if not ordered_s:
        return WaitStatus(0, None, None, None)
    count = len(ordered_s)
    return WaitStatus(
        count,
        ordered_s[(count - 1) // 2],
        ordered_s[min(count - 1, -(-99 * count // 100) - 1)],
        ordered_s[-1],
    )


def _chosen(name: str, trails: Sequence[Trail]) -> Trail:
    """The newest request of that name, else the newest that may be meant. Raises `UsageError`."""
    for trail in trails:
        if trail.is_named(name):
            return trail
    for trail in trails:
        if name and trail.may_be_named(name):
            return trail
    known = [trail.facts.external_id or trail.facts.request for trail in trails[:3]]
    raise UsageError(
        f"no request '{name}' among the last {len(trails)}"
        + (f"; the newest are {', '.join(known)}" if known else "")
        + ": ask about its prompt instead, with --prompt"
    )
