"""Why a request did not get more: where each chunk of its prompt is, or was, and what happened.

A request that was there is explained from what its look-ups came upon and from what had happened
to its chunks by then; a prompt, from where its chunks are now. Nothing is moved or stored.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from emberkv.core.counts import Event
from emberkv.core.residents import State
from emberkv.core.stack import TierStack
from emberkv.domain.types import DISK, RAM, TIER_NAMES, ChunkKey, Level
from emberkv.live.control.messages import AskedRequest, Happened, Place, Stretch
from emberkv.live.fates import Happening
from emberkv.live.recent import Seen, Trail
from emberkv.observe.requests import MissReason

NEVER_SEEN: Final = "never_seen"
"""Nothing is known of a chunk: nobody has offered it for as long as the record goes back."""

BEHIND_A_BREAK: Final = "behind_a_break"
"""The chunk is there, but one before it is not, and a prefix has no holes."""

NOT_LOOKED_UP: Final = "not_looked_up"
WRITING: Final = "writing"
SHUT: Final = "shut"

NOT_GIVEN_YET: Final = "not_given_yet"
"""A request that is still there has been told of the chunk and has not loaded it."""

_ENTERED: Final = frozenset({Event.ADMITTED, Event.PROMOTED, Event.WRITTEN_BEHIND})
_LEFT: Final = frozenset({Event.EVICTED, Event.LOST})
_NOT_YET: Final = frozenset({NOT_LOOKED_UP, BEHIND_A_BREAK})
_PLACES: Final = {RAM: Place.RAM, DISK: Place.DISK}


@dataclass(frozen=True, slots=True)
class _Chunk:
    place: Place
    usable: bool
    reason: str | None
    happened: tuple[Happening, ...] = ()
    asked_before: str | None = None


@dataclass(frozen=True, slots=True)
class Known:
    """What the record tells of the chunks in question, and the requests of late, newest first."""

    history: Mapping[ChunkKey, Sequence[Happening]]
    trails: Sequence[Trail]
    now_s: float

    def askers(self, keys: Collection[ChunkKey], own: Trail | None = None) -> dict[ChunkKey, str]:
        """For each chunk the newest request that had it in its prompt and has ended.

        Requests as old as `own`, where given, or older.
        """
        wanted = set(keys)
        found: dict[ChunkKey, str] = {}
        for trail in self.trails:
            if not wanted or trail.ended_s is None or trail is own:
                continue
            if own is None or trail.began_s <= own.began_s:
                name = trail.facts.external_id or trail.facts.request
                theirs = wanted.intersection(trail.keys or ())
                found.update(dict.fromkeys(theirs, name))
                wanted -= theirs
        return found


def place_now(stack: TierStack, key: ChunkKey) -> Place:
    """Where a chunk is at this moment."""
    resident = stack.tiers[RAM].entries.get(key)
    if resident is not None and resident.state is State.READY:
        return Place.RAM
    if resident is not None and resident.state is State.WRITING:
        return Place.WRITING if stack.transfers.origin(key) is None else Place.COMING
    if any(tier.ready(key) for tier in stack.tiers[1:]):
        return Place.DISK
    return Place.NOWHERE


def explain_prompt(
    keys: Sequence[ChunkKey],
    places: Sequence[Place],
    shut: Collection[Place],
    known: Known,
) -> tuple[Stretch, ...]:
    """What a prompt of these chunks would find now, head first; `shut` places are not read."""
    askers = known.askers(keys)
    chunks: list[_Chunk] = []
    broken = False
    for key, place in zip(keys, places, strict=True):
        told = tuple(known.history.get(key, ()))
        reason: str | None = None
        if place is Place.NOWHERE:
            reason = _why_gone(told)
        elif place is Place.WRITING:
            reason = WRITING
        elif place in shut or (place is Place.COMING and Place.DISK in shut):
            reason = SHUT
        elif broken:
            reason = BEHIND_A_BREAK
        broken = broken or reason is not None
        before = askers.get(key) if reason == NEVER_SEEN else None
        chunks.append(_Chunk(place, not broken, reason, told, before))
    return _stretches(keys, chunks, known.now_s)


def explain_request(trail: Trail, tokens_per_chunk: int, known: Known) -> tuple[Stretch, ...]:
    """What a request found when it was answered; `known` is of `keys_of(trail)`."""
    keys = keys_of(trail)
    facts, seen = trail.facts, trail.seen
    on_device = facts.device_tokens // tokens_per_chunk if trail.keys is not None else 0
    got_tokens = facts.device_tokens + facts.ram_tokens + facts.disk_tokens
    loaded_end = got_tokens // tokens_per_chunk
    if trail.keys is None:
        loaded_end -= facts.device_tokens // tokens_per_chunk
    askers = known.askers(keys, trail)
    chunks: list[_Chunk] = []
    for at, key in enumerate(keys):
        told = tuple(
            h for h in known.history.get(key, ()) if seen.mark is None or h.mark <= seen.mark
        )
        index = at - on_device
        level = Level(seen.found[index]) if 0 <= index < len(seen.found) else None
        if at < on_device:
            chunks.append(_Chunk(Place.DEVICE, True, None))
        elif at < loaded_end:
            chunks.append(_Chunk(_PLACES[level or RAM], True, None, told))
        else:
            place = Place.NOWHERE if level is None else _PLACES[level]
            if level is None and seen.stopped != key:  # behind the break nobody looked
                place = _last_place(told)
            reason = _why_missed(seen, key, at == loaded_end, place, told)
            if trail.ended_s is None and level is not None and reason in _NOT_YET:
                reason = NOT_GIVEN_YET
            before = askers.get(key) if reason == NEVER_SEEN else None
            chunks.append(_Chunk(place, False, reason, told, before))
    return _stretches(keys, chunks, known.now_s)


def _why_missed(
    seen: Seen, key: ChunkKey, breaks: bool, place: Place, told: Sequence[Happening]
) -> str:
    """Why a request did not get a chunk: the one where its chain `breaks`, or one behind it."""
    if not breaks:
        return _why_gone(told) if place is Place.NOWHERE else BEHIND_A_BREAK
    if seen.stopped == key and seen.reason is MissReason.NOT_STORED:
        return _why_gone(told)
    if seen.reason in (MissReason.WHOLE, MissReason.NOT_ASKED):
        return NOT_LOOKED_UP
    return str(seen.reason.value)


def keys_of(trail: Trail) -> tuple[ChunkKey, ...]:
    """The chunks that are known of a request: the whole prompt's, or those it looked up."""
    if trail.keys is not None:
        return trail.keys
    seen = trail.seen
    return seen.chain if seen.stopped is None else (*seen.chain, seen.stopped)


def summary_of(trail: Trail, now_s: float) -> AskedRequest:
    """A request's facts."""
    facts = trail.facts
    return AskedRequest(
        request=facts.request,
        external_id=facts.external_id,
        age_s=now_s - trail.began_s,
        ended=trail.ended_s is not None,
        device_tokens=facts.device_tokens,
        ram_tokens=facts.ram_tokens,
        disk_tokens=facts.disk_tokens,
        wait_s=facts.wait_s,
        load_s=facts.load_s,
        stored_chunks=facts.stored_chunks,
        preemptions=facts.preemptions,
        why_not_more=facts.miss_reason.value,
    )


def _last_place(told: Sequence[Happening]) -> Place:
    """Where a chunk was after all that is told of it, as far as that says."""
    here: set[Level] = set()
    for happening in told:
        if happening.event is None:
            here.clear() if happening.level is None else here.discard(happening.level)
        elif happening.level is not None and happening.event in _ENTERED:
            here.add(happening.level)
        elif happening.level is not None and happening.event in _LEFT:
            here.discard(happening.level)
    return _PLACES[min(here)] if here else Place.NOWHERE


def _why_gone(told: Sequence[Happening]) -> str:
    """The last thing that happened to a chunk that is nowhere.

    That everything was cleared counts if the chunk had been there.
    """
    was_there = False
    why = NEVER_SEEN
    for happening in told:
        if happening.event is None:
            if was_there:
                why = happening.cause or "reset"
                was_there = False
        else:
            why = happening.event.value
            was_there = was_there or happening.event in _ENTERED
    return why


def _stretches(
    keys: Sequence[ChunkKey], chunks: Sequence[_Chunk], now_s: float
) -> tuple[Stretch, ...]:
    """Neighbours of one story as one."""
    found: list[Stretch] = []
    for _, run in groupby(range(len(chunks)), key=lambda at: _likeness(chunks[at])):
        indices = list(run)
        first, end = indices[0], indices[-1] + 1
        chunk = chunks[first]
        nowhere = chunk.place is Place.NOWHERE
        found.append(
            Stretch(
                first,
                end,
                chunk.place,
                chunk.usable,
                chunk.reason,
                tuple(_told(happening, now_s) for happening in _relevant(chunk)),
                chunk.asked_before,
                tuple(keys[first:end]) if nowhere else (),
            )
        )
    return tuple(found)


def _relevant(chunk: _Chunk) -> list[Happening]:
    """What is worth telling: nothing of what was cleared before a chunk was ever there."""
    told: list[Happening] = []
    was_there = False
    for happening in chunk.happened:
        was_there = was_there or happening.event in _ENTERED
        if happening.event is not None or was_there:
            told.append(happening)
    return told


def _likeness(chunk: _Chunk) -> tuple[object, ...]:
    story = tuple((h.event, h.level, h.policy, h.cause) for h in _relevant(chunk))
    # Of chunks that are of use, where they are matters, not how they got there.
    return (chunk.place, chunk.usable, chunk.reason, chunk.asked_before) + (
        () if chunk.usable else story[-4:]
    )


def _told(happening: Happening, now_s: float) -> Happened:
    return Happened(
        now_s - happening.at_s,
        None if happening.event is None else happening.event.value,
        None if happening.level is None else TIER_NAMES[happening.level],
        happening.policy,
        happening.cause,
    )
