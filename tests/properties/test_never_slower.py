"""No request is served later than it would have been without tiers, whatever the disk does.

The real manager and core serve a modelled engine from a modelled disk in virtual time, beside the
same engine without tiers. The engine asks once per step, so a step is the grain.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from modelled_engine import (
    IDLE_STEP_S,
    TOKENS,
    Curve,
    ModelledDisk,
    ModelledEngine,
    Prompt,
    flat,
    rising,
)

LENGTH = 4096
CURVES: dict[str, Curve] = {"flat": flat, "rising": rising}


def stored_on_disk(
    curve: Curve, disk: ModelledDisk, *, texts: int, ram_slots: int, length: int = LENGTH
) -> ModelledEngine:
    """An engine that has computed `texts` prompts; they are on disk and not in RAM."""
    engine = ModelledEngine(curve, ram_slots=ram_slots, disk=disk)
    for at in range(texts):
        engine.play([Prompt(f"first-{at}", engine.now_s, length, text=f"t{at}")])
    engine.play([Prompt("filler", engine.now_s, ram_slots * TOKENS)])
    engine.longest_step_s = 0.0
    return engine


def returning(
    engine: ModelledEngine, *, texts: int, gap_s: float, length: int = LENGTH
) -> list[Prompt]:
    begin_s = engine.now_s + 1.0
    return [
        Prompt(f"again-{at}", begin_s + at * gap_s, length, text=f"t{at}") for at in range(texts)
    ]


def both(engine: ModelledEngine, prompts: list[Prompt]) -> list[tuple[Prompt, float, float]]:
    """Each prompt's time to first token, with tiers and without."""
    plain = ModelledEngine(engine.curve)
    plain.now_s = engine.now_s
    plain.play([replace(each) for each in prompts])
    engine.play(prompts)
    return [
        (each, engine.first_token_s[each.name], plain.first_token_s[each.name]) for each in prompts
    ]


def nobody_is_late(engine: ModelledEngine, prompts: list[Prompt]) -> float:
    """Assert the promise for each prompt; returns how much sooner all were served together."""
    total_on_s = total_off_s = 0.0
    for prompt, on_s, off_s in both(engine, prompts):
        grain_s = engine.longest_step_s + 2 * IDLE_STEP_S
        assert on_s <= 1.05 * off_s + grain_s, (
            f"{prompt.name}: {on_s:.3f} s with tiers, {off_s:.3f} s without"
        )
        total_on_s += on_s
        total_off_s += off_s
    return total_off_s / total_on_s


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("first_s", [0.001, 0.02, 0.2, 2.0])
@pytest.mark.parametrize("chunk_s", [0.0001, 0.005, 0.02, 0.05, 0.5])
def test_one_at_a_time_at_every_slowness(curve: str, first_s: float, chunk_s: float) -> None:
    disk = ModelledDisk()
    engine = stored_on_disk(CURVES[curve], disk, texts=6, ram_slots=64)
    disk.first_s, disk.chunk_s = first_s, chunk_s
    gain = nobody_is_late(engine, returning(engine, texts=6, gap_s=10.0))
    if first_s <= 0.02 and chunk_s <= 0.0001:
        assert gain > 5


@pytest.mark.parametrize("texts", [4, 16, 64])
@pytest.mark.parametrize("chunk_s", [0.0001, 0.002, 0.02, 0.1])
def test_bursts_at_every_slowness(texts: int, chunk_s: float) -> None:
    disk = ModelledDisk()
    engine = stored_on_disk(flat, disk, texts=texts, ram_slots=texts * 40)
    disk.chunk_s = chunk_s
    gain = nobody_is_late(engine, returning(engine, texts=texts, gap_s=0.0))
    if chunk_s <= 0.0001:
        assert gain > 4


@pytest.mark.parametrize("texts", [1, 8])
def test_a_hung_disk_costs_a_twentieth(texts: int) -> None:
    disk = ModelledDisk()
    engine = stored_on_disk(flat, disk, texts=texts, ram_slots=texts * 40)
    prompts = returning(engine, texts=texts, gap_s=0.0)
    disk.hangs.append((engine.now_s, engine.now_s + 60.0))
    nobody_is_late(engine, prompts)


def test_a_disk_that_was_hung_is_used_again() -> None:
    disk = ModelledDisk()
    engine = stored_on_disk(flat, disk, texts=12, ram_slots=64)
    disk.hangs.append((engine.now_s, engine.now_s + 20.0))
    prompts = returning(engine, texts=12, gap_s=3.0)
    nobody_is_late(engine, prompts)
    late = [each for each in prompts if each.arrival_s > disk.hangs[0][1] + 10.0]
    assert late
    for prompt in late:
        assert engine.facts[prompt.name].ram_tokens is not None
        assert engine.first_token_s[prompt.name] < 0.5 * flat(0, LENGTH)


def test_a_disk_that_was_slow_is_used_again() -> None:
    disk = ModelledDisk()
    engine = stored_on_disk(flat, disk, texts=20, ram_slots=64)
    disk.chunk_s = 0.2
    prompts = returning(engine, texts=20, gap_s=4.0)
    nobody_is_late(engine, prompts[:8])
    disk.chunk_s = 0.0002
    nobody_is_late(engine, prompts[8:])
    for prompt in prompts[-4:]:
        assert engine.first_token_s[prompt.name] < 0.5 * flat(0, LENGTH)


def test_more_waiting_than_ram_holds() -> None:
    """Sixteen at once, of which RAM takes four: all are served, and what fits is reused."""
    disk = ModelledDisk()
    engine = stored_on_disk(flat, disk, texts=16, ram_slots=4 * LENGTH // TOKENS)
    disk.reads = 0
    nobody_is_late(engine, returning(engine, texts=16, gap_s=0.0))
    assert disk.reads <= 16 * LENGTH // TOKENS, "a chunk was read twice"
    assert disk.reads >= 0.8 * 4 * LENGTH // TOKENS


def test_a_prompt_longer_than_ram() -> None:
    disk = ModelledDisk()
    engine = stored_on_disk(flat, disk, texts=1, ram_slots=64, length=128 * TOKENS)
    disk.reads = 0
    gain = nobody_is_late(engine, returning(engine, texts=1, gap_s=0.0, length=128 * TOKENS))
    assert 0.8 * 64 <= disk.reads <= 64
    assert gain > 1.5


tiers = st.builds(
    ModelledDisk,
    first_s=st.floats(0.0005, 1.0),
    chunk_s=st.floats(0.00005, 0.1),
    batch=st.integers(1, 32),
)


@settings(max_examples=20, deadline=None)
@given(
    disk=tiers,
    later=tiers,
    gaps=st.lists(st.floats(0.0, 2.0), min_size=1, max_size=10),
    fresh=st.lists(
        st.tuples(st.floats(0.0, 6.0), st.sampled_from([200, 700, 4000, 16000])), max_size=4
    ),
    hang_s=st.floats(0.0, 5.0),
    curve=st.sampled_from(sorted(CURVES)),
)
def test_whatever_the_disk_does(  # noqa: PLR0917
    disk: ModelledDisk,
    later: ModelledDisk,
    gaps: list[float],
    fresh: list[tuple[float, int]],
    hang_s: float,
    curve: str,
) -> None:
    texts = len(gaps)
    engine = stored_on_disk(CURVES[curve], disk, texts=texts, ram_slots=150)
    disk.first_s, disk.chunk_s, disk.batch = later.first_s, later.chunk_s, later.batch
    at_s = engine.now_s + 1.0
    disk.hangs.append((at_s + 0.5, at_s + 0.5 + hang_s))
    prompts: list[Prompt] = []
    for at, gap_s in enumerate(gaps):
        at_s += gap_s
        prompts.append(Prompt(f"again-{at}", at_s, LENGTH, text=f"t{at}"))
    for at, (after_s, length) in enumerate(fresh):
        prompts.append(Prompt(f"fresh-{at}", engine.now_s + 1.0 + after_s, length))
    nobody_is_late(engine, prompts)


@pytest.mark.parametrize("first_s", [0.5, 8.0])
@pytest.mark.parametrize("chunk_s", [0.0001, 0.9])
def test_behind_requests_that_the_device_already_has(first_s: float, chunk_s: float) -> None:
    """They look like a long queue and are none: who comes behind may not wait for as long."""
    disk = ModelledDisk(batch=1)
    engine = stored_on_disk(flat, disk, texts=1, ram_slots=256, length=16384)
    disk.first_s, disk.chunk_s = first_s, chunk_s
    prompts = [replace(each, name="last") for each in returning(engine, texts=1, gap_s=0.0)]
    prompts = [replace(each, tokens=16384) for each in prompts]
    before = [
        Prompt(f"cached-{at}", prompts[0].arrival_s, 16384, device_tokens=16384 - TOKENS)
        for at in range(20)
    ]
    nobody_is_late(engine, [*before, *prompts])
