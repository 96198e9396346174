"""The record of what happened to chunks: complete within its bound, oldest out first."""

from __future__ import annotations

import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from emberkv.core.counts import Event, Journal
from emberkv.domain.types import DISK, RAM, ChunkKey, Level
from emberkv.live.fates import KEY_BYTES, MAX_PER_CHUNK, NOTE_BYTES, Fates
from emberkv.live.recent import Recent, Trail
from emberkv.observe.requests import RequestFacts

KEYS = [ChunkKey(b"key %d" % at) for at in range(6)]
EVENTS = (Event.ADMITTED, Event.EVICTED, Event.PROMOTED)
notes = st.tuples(
    st.sampled_from(EVENTS), st.sampled_from([RAM, DISK]), st.lists(st.sampled_from(KEYS))
)


@given(st.lists(st.lists(notes)))
def test_everything_noted_is_told_in_order(
    steps: list[list[tuple[Event, Level, list[ChunkKey]]]],
) -> None:
    journal = Journal()
    fates = Fates(journal)
    expected: dict[ChunkKey, list[tuple[float, Event, Level]]] = {key: [] for key in KEYS}
    for at, step in enumerate(steps):
        for event, level, keys in step:
            journal.note(event, level, keys)
        fates.take(float(at))
        for event, level, keys in _merged(step):
            for key in set(keys):
                expected[key].append((float(at), event, level))
    told = fates.of(KEYS)
    for key in KEYS:
        mine = [(h.at_s, h.event, h.level) for h in told[key]]
        assert mine == expected[key][-MAX_PER_CHUNK:]


def _merged(
    step: list[tuple[Event, Level, list[ChunkKey]]],
) -> list[tuple[Event, Level, list[ChunkKey]]]:
    """Neighbours alike are one note, in which a key happens once."""
    merged: list[tuple[Event, Level, list[ChunkKey]]] = []
    for event, level, keys in step:
        if not keys:
            continue
        if merged and merged[-1][:2] == (event, level):
            merged[-1] = (event, level, merged[-1][2] + keys)
        else:
            merged.append((event, level, keys))
    return merged


def test_an_eviction_tells_the_policy_of_its_time() -> None:
    journal = Journal()
    fates = Fates(journal)
    fates.policies[RAM] = "lru"
    journal.note(Event.EVICTED, RAM, KEYS[:1])
    fates.take(1.0)
    fates.policies[RAM] = "arc"
    journal.note(Event.EVICTED, RAM, KEYS[:1])
    fates.take(2.0)
    assert [h.policy for h in fates.of(KEYS[:1])[KEYS[0]]] == ["lru", "arc"]


def test_what_was_cleared_is_told_of_every_chunk() -> None:
    fates = Fates(Journal())
    fates.cleared(DISK, "purge", 3.0)
    (happening,) = fates.of(KEYS[:1])[KEYS[0]]
    assert (happening.event, happening.level, happening.cause) == (None, DISK, "purge")


def test_the_oldest_goes_first_and_the_record_says_from_when_on_it_is() -> None:
    journal = Journal()
    fates = Fates(journal, max_bytes=3 * (NOTE_BYTES + KEY_BYTES))
    for at, key in enumerate(KEYS):
        journal.note(Event.ADMITTED, RAM, [key])
        fates.take(float(at))
    told = fates.of(KEYS)
    assert [key for key in KEYS if told[key]] == KEYS[-3:]
    assert fates.began_s == 2.0
    assert fates.size_bytes <= 3 * (NOTE_BYTES + KEY_BYTES)


def test_the_stated_bytes_are_those_that_it_takes() -> None:
    """Within a factor of two, for single chunks, and for long chains."""
    for keys_per_note in (1, 500):
        journal = Journal()
        fates = Fates(journal)
        tracemalloc.start()
        for at in range(20_000 // keys_per_note):
            keys = [ChunkKey(b"%032d%04d" % (at, n)) for n in range(keys_per_note)]
            journal.note(Event.ADMITTED if at % 2 else Event.EVICTED, RAM, keys)
            del keys
            fates.take(float(at))
        taken_bytes, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert fates.size_bytes / 2 < taken_bytes < fates.size_bytes


def test_requests_that_ended_are_kept_within_bounds() -> None:
    recent = Recent(max_bytes=20_000)
    for at in range(20):
        trail = Trail(RequestFacts(str(at)), [], 0.0)
        trail.names(lambda: KEYS, len(KEYS))
        recent.end(trail, float(at))
    names = [trail.facts.request for trail in recent.ended()]
    assert names == [str(at) for at in range(19, 19 - len(names), -1)]
    assert 0 < recent.size_bytes <= 20_000
