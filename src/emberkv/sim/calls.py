"""A log of the calls on a tier stack and what it decided: record one here, replay it anywhere.

One JSON array per line. The first names the stack, each later one a call, in order:

    ["stack", {"slot_counts": [2, 4], "chunk_bytes": 1, "policies": ["lru", "lru"], "limits": {…}}]
    ["residence", {"key": "a1", "now_s": 0.5}, 1]
    ["offload", {"request": "r1", "keys": ["a1"], "parent": null, "now_s": 0.5}, [["a1", 0]]]

The third item is the decision: a residence, a yes or no, (key, slot) of chunks, or effects. Keys
are hexadecimal. A log that replays to itself shows that same calls make same decisions, wherever
it was recorded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from emberkv.core.economy import Terms
from emberkv.core.gates import Gate, Levels
from emberkv.core.limits import Limits
from emberkv.core.residents import Resident, Residents
from emberkv.core.retention import Quotas
from emberkv.core.stack import TierStack
from emberkv.domain.hints import NO_HINTS, Hints, TokenRange
from emberkv.domain.types import (
    ChunkKey,
    Copy,
    Drop,
    Effect,
    Entry,
    Level,
    Outcome,
    RequestId,
    Slot,
    TransferId,
)
from emberkv.errors import UsageError
from emberkv.policy.eviction import EVICTION_POLICIES

R = TypeVar("R")


class RecordedStack(TierStack):
    """A tier stack that can write every call and decision to a log."""

    def __init__(
        self,
        tiers: Sequence[Residents],
        limits: Limits,
        terms: Terms | None = None,
        quotas: Quotas | None = None,
    ) -> None:
        super().__init__(tiers, limits, terms, quotas)
        self._write: Callable[[str], object] | None = None
        self._inside = False

    def record_to(self, write: Callable[[str], object]) -> None:
        """Hand every line from now on, without its newline, to `write`; before the first call."""
        names = {policy: name for name, policy in EVICTION_POLICIES.items()}
        description = {
            "slot_counts": [tier.slot_count for tier in self.tiers],
            "chunk_bytes": self.tiers[0].chunk_bytes,
            "policies": [names[type(tier.policy)] for tier in self.tiers],
            "limits": asdict(self.limits),
            "terms": asdict(self.terms),
            "quotas": asdict(self.retention.quotas),
        }
        write(_line(["stack", description]))
        self._write = write

    def begin(self, request: RequestId, hints: Hints, prompt_tokens: int | None) -> None:
        self._noted(
            "begin", super().begin, request=request, hints=hints, prompt_tokens=prompt_tokens
        )

    def computed(
        self,
        pieces: Mapping[RequestId, tuple[int, int]],
        others: int,
        seconds: float | None,
    ) -> None:
        self._noted("computed", super().computed, pieces=pieces, others=others, seconds=seconds)

    def preempted(self, request: RequestId) -> None:
        self._noted("preempted", super().preempted, request=request)

    def open_levels(self, request: RequestId) -> Levels | None:
        return self._noted("open_levels", super().open_levels, request=request)

    def set_gate(self, level: Level, gate: Gate) -> None:
        self._noted("set_gate", super().set_gate, level=level, gate=gate)

    def empty(self, level: Level) -> None:
        self._noted("empty", super().empty, level=level)

    def residence(self, key: ChunkKey, now_s: float, levels: Levels | None = None) -> Level | None:
        return self._noted("residence", super().residence, key=key, now_s=now_s, levels=levels)

    def pays(self, level: Level, request: RequestId, first_token: int, now_s: float) -> bool:
        return self._noted(
            "pays",
            super().pays,
            level=level,
            request=request,
            first_token=first_token,
            now_s=now_s,
        )

    def may_begin(self, request: RequestId, has_tokens: int, now_s: float) -> bool:
        return self._noted(
            "may_begin", super().may_begin, request=request, has_tokens=has_tokens, now_s=now_s
        )

    def defers(self, request: RequestId, first_token: int, had: int, now_s: float) -> None:
        self._noted(
            "defers",
            super().defers,
            request=request,
            first_token=first_token,
            had=had,
            now_s=now_s,
        )

    def promote(
        self,
        request: RequestId,
        keys: Sequence[ChunkKey],
        now_s: float,
        first_token: int = 0,
        step: int | None = None,
    ) -> None:
        self._noted(
            "promote",
            super().promote,
            request=request,
            keys=keys,
            now_s=now_s,
            first_token=first_token,
            step=step,
        )

    def look_ahead(
        self, request: RequestId, keys: Sequence[ChunkKey], now_s: float, first_token: int = 0
    ) -> None:
        self._noted(
            "look_ahead",
            super().look_ahead,
            request=request,
            keys=keys,
            now_s=now_s,
            first_token=first_token,
        )

    def probe(self, request: RequestId, keys: Sequence[ChunkKey], now_s: float) -> None:
        self._noted("probe", super().probe, request=request, keys=keys, now_s=now_s)

    def waiting(self, request: RequestId, step: int, now_s: float) -> bool:
        return self._noted("waiting", super().waiting, request=request, step=step, now_s=now_s)

    def settle(self, now_s: float) -> None:
        self._noted("settle", super().settle, now_s=now_s)

    def offload(
        self,
        request: RequestId,
        keys: Sequence[ChunkKey],
        parent: ChunkKey | None,
        now_s: float,
        first_token: int = 0,
    ) -> list[Resident]:
        return self._noted(
            "offload",
            super().offload,
            request=request,
            keys=keys,
            parent=parent,
            now_s=now_s,
            first_token=first_token,
        )

    def stored(
        self, request: RequestId, keys: Collection[ChunkKey], now_s: float
    ) -> list[Resident]:
        return self._noted("stored", super().stored, request=request, keys=keys, now_s=now_s)

    def load(
        self,
        request: RequestId,
        keys: Sequence[ChunkKey],
        now_s: float,
        first_token: int = 0,
    ) -> list[Resident]:
        return self._noted(
            "load",
            super().load,
            request=request,
            keys=keys,
            now_s=now_s,
            first_token=first_token,
        )

    def loaded(self, request: RequestId, now_s: float) -> None:
        self._noted("loaded", super().loaded, request=request, now_s=now_s)

    def scheduled(self, request: RequestId) -> None:
        self._noted("scheduled", super().scheduled, request=request)

    def end(self, request: RequestId) -> None:
        self._noted("end", super().end, request=request)

    def take_effects(self) -> list[Effect]:
        return self._noted("take_effects", super().take_effects)

    def done(
        self, transfer: TransferId, results: Sequence[tuple[int, Outcome]], now_s: float
    ) -> list[Resident]:
        return self._noted("done", super().done, transfer=transfer, results=results, now_s=now_s)

    def adopt(self, level: Level, entries: Sequence[Entry]) -> None:
        self._noted("adopt", super().adopt, level=level, entries=entries)

    def hold(self, level: Level, slots: Sequence[Slot]) -> None:
        self._noted("hold", super().hold, level=level, slots=slots)

    def free_held(self, level: Level, slots: Sequence[Slot]) -> None:
        self._noted("free_held", super().free_held, level=level, slots=slots)

    def lose_tier(self, level: Level, hold: Sequence[Slot], now_s: float) -> None:
        self._noted("lose_tier", super().lose_tier, level=level, hold=hold, now_s=now_s)

    def reset(self) -> None:
        self._noted("reset", super().reset)

    def unfence(self) -> None:
        self._noted("unfence", super().unfence)

    def _noted(self, name: str, call: Callable[..., R], **args: object) -> R:
        """Make a call; what it calls itself in turn is not noted."""
        if self._write is None or self._inside:
            return call(**args)
        plain = {each: _ENCODE[each](value) for each, value in args.items()}
        self._inside = True
        try:
            result = call(**args)
        finally:
            self._inside = False
        self._write(_line([name, plain, _decision(result)]))
        return result


def replay_calls(lines: Iterable[str]) -> Iterator[str]:
    """Make the calls of a log on a fresh stack; yields the log that this makes, line by line.

    Raises `UsageError` if a line can't be read.
    """
    log: list[str] = []
    stack: RecordedStack | None = None
    for number, line in enumerate(lines, 1):
        try:
            name, plain = json.loads(line)[:2]
            if stack is None:
                stack = _fresh_stack(plain)
                stack.record_to(log.append)
            else:
                args = {each: _DECODE[each](value) for each, value in plain.items()}
                getattr(stack, _known(name))(**args)
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"line {number} is not a line of a log of calls: {error}") from error
        yield from log
        log.clear()


_CALLS = frozenset(
    name for name in vars(RecordedStack) if not name.startswith("_") and name != "record_to"
)


def _known(name: str) -> str:
    if name not in _CALLS:
        raise KeyError(name)
    return name


def _fresh_stack(description: dict[str, Any]) -> RecordedStack:
    counts: list[int] = description["slot_counts"]
    tiers = [
        Residents(slot_count, description["chunk_bytes"], EVICTION_POLICIES[name](slot_count))
        for slot_count, name in zip(counts, description["policies"], strict=True)
    ]
    terms = dict(description["terms"])
    terms["seeds"] = tuple(map(tuple, terms["seeds"]))
    quotas = dict(description["quotas"])
    quotas["tenants"] = tuple(map(tuple, quotas["tenants"]))
    return RecordedStack(tiers, Limits(**description["limits"]), Terms(**terms), Quotas(**quotas))


def _line(items: Sequence[object]) -> str:
    return json.dumps(items, separators=(",", ":"))


def _hex(key: bytes | None) -> str | None:
    return None if key is None else key.hex()


def _hexes(keys: Iterable[bytes | None]) -> list[str | None]:
    return [_hex(key) for key in keys]


def _key(plain: str | None) -> ChunkKey | None:
    return None if plain is None else ChunkKey(bytes.fromhex(plain))


def _same(value: Any) -> Any:
    return value


def _plain_levels(levels: Levels | None) -> list[int] | None:
    return None if levels is None else sorted(levels)


def _plain_hints(hints: Hints) -> dict[str, Any]:
    """What differs from no hints at all."""
    plain = {name: value for name, value in asdict(hints).items() if value != _NO_HINTS[name]}
    if "tiers" in plain:
        plain["tiers"] = sorted(plain["tiers"])
    return plain


def _hints_of(plain: dict[str, Any]) -> Hints:
    if not plain:
        return NO_HINTS
    given = dict(plain)
    if "priority" in given:
        given["priority"] = tuple(TokenRange(**each) for each in given["priority"])
    if "tiers" in given:
        given["tiers"] = frozenset(given["tiers"])
    return Hints(**given)


_NO_HINTS = asdict(NO_HINTS)


_ENCODE: dict[str, Callable[[Any], object]] = {
    "entries": lambda entries: [[_hex(e.key), _hex(e.parent), e.slot] for e in entries],
    "first_token": _same,
    "gate": asdict,
    "had": _same,
    "has_tokens": _same,
    "hints": _plain_hints,
    "hold": list,
    "key": _hex,
    "keys": _hexes,
    "level": _same,
    "levels": _plain_levels,
    "now_s": _same,
    "others": _same,
    "parent": _hex,
    "pieces": lambda pieces: {name: list(piece) for name, piece in pieces.items()},
    "prompt_tokens": _same,
    "request": _same,
    "results": lambda results: [[index, outcome.value] for index, outcome in results],
    "seconds": _same,
    "slots": list,
    "step": _same,
    "transfer": _same,
}

_DECODE: dict[str, Callable[[Any], object]] = {
    **_ENCODE,
    "entries": lambda plain: [Entry(ChunkKey(bytes.fromhex(k)), _key(p), s) for k, p, s in plain],
    "gate": lambda plain: Gate(**plain),
    "hints": _hints_of,
    "key": _key,
    "keys": lambda plain: [_key(each) for each in plain],
    "levels": lambda plain: None if plain is None else frozenset(map(Level, plain)),
    "parent": _key,
    "pieces": lambda plain: {name: tuple(piece) for name, piece in plain.items()},
    "results": lambda plain: [(index, Outcome(value)) for index, value in plain],
}


def _decision(result: object) -> object:
    if isinstance(result, frozenset):
        return sorted(result)
    return [_decided(each) for each in result] if isinstance(result, list) else result


def _decided(item: object) -> list[object]:
    match item:
        case Resident():
            return [_hex(item.key), item.slot]
        case Copy():
            where = [item.transfer, item.source, item.target]
            return ["copy", *where, _hexes(item.keys), item.source_slots, item.target_slots]
        case Drop():
            return ["drop", item.level, _hexes(item.keys), item.slots]
    raise TypeError(f"a stack decides no {type(item).__name__}")
