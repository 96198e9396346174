"""The tiers behind vLLM's real scheduler: hits, promotions, preemption, aborts, what is stored.

Every forward pass of the rig compares all KV it builds on with what it must be, and `serve` the
answer too; so each test below also says that the bytes were right.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from rig_parts import BLOCK_TOKENS, Setup
from scheduler_rig import RequestLines, Rig
from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.request import RequestStatus

from emberkv.core.counts import Event
from emberkv.domain.types import DISK, RAM
from emberkv.tiers.memory import MemoryStorage

pytestmark = pytest.mark.engine

MakeRig = Callable[[Setup], Rig]

Way = dict[str, Any]
ways = pytest.mark.parametrize(
    "way",
    [
        {"entry": "spec"},
        {"entry": "spec", "async_scheduling": True, "late_by": 2},
        {"entry": "connector", "late_by": 2},
        {"entry": "connector", "async_scheduling": True},
    ],
    ids=["spec-sync", "spec-async-late", "connector-sync-late", "connector-async"],
)


def prompt_of(tokens: int, seed: int = 0) -> list[int]:
    """A prompt that shares no block with one of another seed."""
    source = random.Random(seed)
    return [source.randrange(500) for _ in range(tokens)]


def disk(chunks: int, blocks_per_chunk: int = 1) -> MemoryStorage:
    return MemoryStorage(chunks, Setup(blocks_per_chunk=blocks_per_chunk).chunk_bytes)


def forget_ram(rig: Rig) -> None:
    """Fill RAM with other chunks, so that what was there is left on disk alone."""
    for number in range(2):
        filler = prompt_of(
            rig.setup.ram_chunks * BLOCK_TOKENS * rig.setup.blocks_per_chunk, -number
        )
        rig.serve(f"filler-{number}", [499 - token for token in filler])
    rig.tick()
    rig.forget_device()


@contextmanager
def looked_up(rig: Rig) -> Iterator[list[Counter[tuple[str, str]]]]:
    """What each step's look-ups are answered: one counter of (request, answer) per step."""
    steps: list[Counter[tuple[str, str]]] = []
    lookup, schedule = rig.manager.lookup, rig.scheduler.schedule

    def counted_lookup(key: bytes, context: object, **extra: object) -> LookupResult:
        result = lookup(key, context, **extra)
        steps[-1][context.req_id, result.name] += 1
        return result

    def counted_schedule() -> object:
        steps.append(Counter())
        return schedule()

    rig.manager.lookup, rig.scheduler.schedule = counted_lookup, counted_schedule
    yield steps
    rig.manager.lookup, rig.scheduler.schedule = lookup, schedule


@ways
def test_a_prompt_comes_back_from_ram(make_rig: MakeRig, way: Way) -> None:
    rig = make_rig(Setup(**way))
    prompt = prompt_of(200)
    assert rig.serve("first", prompt, 4) == 0
    rig.forget_device()
    assert rig.serve("again", prompt, 4) == 6 * BLOCK_TOKENS


def test_the_rig_sees_a_wrong_byte(make_rig: MakeRig) -> None:
    rig = make_rig(Setup())
    prompt = prompt_of(200)
    rig.serve("first", prompt)
    rig.forget_device()
    resident = next(iter(rig.tiers.stack.tiers[RAM].entries.values()))
    rig.driver.arena.row(resident.slot)[100] ^= 1
    rig.add("again", prompt)
    with pytest.raises(AssertionError, match="again: KV of 1 of 192 positions is wrong"):
        rig.run()


@ways
def test_a_prompt_comes_back_from_disk(make_rig: MakeRig, way: Way) -> None:
    rig = make_rig(Setup(**way, ram_chunks=8, storage=disk(64)))
    prompt = prompt_of(200)
    rig.serve("first", prompt, 4)
    forget_ram(rig)
    assert rig.serve("again", prompt, 4) == 6 * BLOCK_TOKENS
    assert rig.chunks("ram", Event.PROMOTED) == 6


@ways
def test_while_a_request_waits_it_costs_two_look_ups_a_step(make_rig: MakeRig, way: Way) -> None:
    """However long the chain: here 40 chunks, of which the first pass asks for each."""
    setup = Setup(**way, device_blocks=80, ram_chunks=50, storage=disk(256))
    rig = make_rig(setup)
    prompt = prompt_of(40 * BLOCK_TOKENS + 5)
    rig.serve("first", prompt)
    forget_ram(rig)
    rig.driver.hold_back = True
    rig.add("again", prompt)
    with looked_up(rig) as steps:
        for _ in range(30):
            rig.step()
        assert rig.status("again") is RequestStatus.WAITING
        rig.driver.hold_back = False
        rig.run()
    assert steps[0] == {("again", "RETRY"): 40}
    assert steps[1:30] == [{("again", "RETRY"): 1, ("again", "MISS"): 1}] * 29
    answered = [step for step in steps[30:] if step]
    assert answered == [{("again", "HIT"): 40}]
    assert rig.external_tokens("again") == 40 * BLOCK_TOKENS
    assert rig.outputs["again"] == rig.expected("again")


def test_a_new_prompt_is_not_held_up_by_one_that_waits(make_rig: MakeRig) -> None:
    rig = make_rig(Setup(ram_chunks=16, storage=disk(64)))
    prompt = prompt_of(200)
    rig.serve("first", prompt)
    forget_ram(rig)
    rig.driver.hold_back = True
    rig.add("waits", prompt)
    rig.step()
    rig.add("new", prompt_of(200, seed=9))
    rig.run_until(lambda: "new" in rig.finished, 10)
    assert rig.status("waits") is RequestStatus.WAITING
    rig.driver.hold_back = False
    rig.run()
    assert rig.external_tokens("waits") == 6 * BLOCK_TOKENS


def test_a_chain_half_in_ram_and_half_on_disk(make_rig: MakeRig) -> None:
    rig = make_rig(Setup(ram_chunks=12, storage=disk(64)))
    prompt = prompt_of(10 * BLOCK_TOKENS + 1)
    rig.serve("first", prompt)
    rig.serve("other", prompt_of(6 * BLOCK_TOKENS, seed=5))
    rig.forget_device()
    in_ram = len(ram_keys(rig, "first"))
    assert 0 < in_ram < 10
    assert rig.serve("again", prompt) == 10 * BLOCK_TOKENS
    assert rig.chunks("ram", Event.PROMOTED) == 10 - in_ram


def ram_keys(rig: Rig, name: str) -> list[bytes]:
    """The keys of a request's prompt that are in RAM now, for chunks of one block."""
    hashes = rig.requests[name].block_hashes
    entries = rig.tiers.stack.tiers[RAM].entries
    keys = [bytes(each) + (0).to_bytes(4, "big") for each in hashes]
    return [key for key in keys if key in entries]


@ways
@pytest.mark.parametrize("blocks_per_chunk", [2, 4])
@pytest.mark.parametrize("extra_tokens", [0, 1, 33, 95])
def test_chunks_of_several_blocks(
    make_rig: MakeRig, way: Way, blocks_per_chunk: int, extra_tokens: int
) -> None:
    chunk_tokens = blocks_per_chunk * BLOCK_TOKENS
    setup = Setup(
        **way,
        blocks_per_chunk=blocks_per_chunk,
        ram_chunks=8,
        storage=disk(64, blocks_per_chunk),
    )
    rig = make_rig(setup)
    prompt = prompt_of(3 * chunk_tokens + extra_tokens)
    whole_chunks = len(prompt) // chunk_tokens
    rig.serve("first", prompt, 3)
    rig.forget_device()
    assert rig.serve("from-ram", prompt, 3) == whole_chunks * chunk_tokens
    forget_ram(rig)
    assert rig.serve("from-disk", prompt, 3) == whole_chunks * chunk_tokens


@ways
def test_a_load_that_begins_inside_a_chunk(make_rig: MakeRig, way: Way) -> None:
    """The device still holds the prompt's first three blocks: a load begins at the fourth."""
    rig = make_rig(Setup(**way, blocks_per_chunk=4, ram_chunks=16))
    prompt = prompt_of(12 * BLOCK_TOKENS + 7)
    rig.serve("first", prompt)
    rig.forget_device()
    rig.serve("head", prompt[: 3 * BLOCK_TOKENS + 2])
    lines = RequestLines()
    with lines.listening():
        assert rig.serve("again", prompt, 3) == 9 * BLOCK_TOKENS
    line = lines.of["again"]
    known = (96, 288) if way["entry"] == "connector" else (0, 384)
    assert (line["device_tokens"], line["ram_tokens"]) == known
    assert line["computed_tokens"] == (7 if way["entry"] == "connector" else None)


@ways
def test_a_prompt_that_is_whole_in_ram_computes_its_last_token(make_rig: MakeRig, way: Way) -> None:
    rig = make_rig(Setup(**way, blocks_per_chunk=2))
    prompt = prompt_of(8 * BLOCK_TOKENS)
    rig.serve("first", prompt, 3)
    rig.forget_device()
    assert rig.serve("again", prompt, 3) == 8 * BLOCK_TOKENS


@ways
def test_chunked_prefill(make_rig: MakeRig, way: Way) -> None:
    rig = make_rig(Setup(**way, max_batched_tokens=80, blocks_per_chunk=2, ram_chunks=32))
    prompts = {f"first-{at}": prompt_of(500 + at, seed=at) for at in range(2)}
    for name, prompt in prompts.items():
        rig.add(name, prompt, 3)
    rig.run()
    rig.forget_device()
    for name, prompt in prompts.items():
        assert rig.serve(f"again-{name}", prompt, 3) == 7 * 2 * BLOCK_TOKENS


@ways
@pytest.mark.parametrize("prompt_only", [True, False])
def test_answers_are_part_of_the_next_turn(make_rig: MakeRig, way: Way, prompt_only: bool) -> None:
    setup = Setup(**way, blocks_per_chunk=2, extra={"offload_prompt_only": prompt_only})
    rig = make_rig(setup)
    prompt = prompt_of(70)
    rig.serve("first", prompt, 200)
    rig.forget_device()
    turn = prompt + rig.outputs["first"] + prompt_of(10, seed=3)
    assert rig.serve("next", turn) == (64 if prompt_only else 256)


@ways
@pytest.mark.parametrize("prompt_only", [True, False])
def test_preempted_requests_come_back_right(make_rig: MakeRig, way: Way, prompt_only: bool) -> None:
    """Three requests that outgrow the device together."""
    setup = Setup(
        **way,
        device_blocks=26,
        blocks_per_chunk=2,
        ram_chunks=32,
        storage=disk(64, 2),
        extra={"offload_prompt_only": prompt_only},
    )
    rig = make_rig(setup)
    lines = RequestLines()
    with lines.listening():
        for at in range(3):
            rig.add(f"long-{at}", prompt_of(200 + at, seed=at), 200)
        rig.run(2000)
    assert all(rig.outputs[name] == rig.expected(name) for name in rig.requests)
    assert sum(line["preemptions"] for line in lines.of.values()) > 0
    leases = list(rig.tiers.stack.promotions.leases())
    assert leases == []
    rig.forget_device()
    assert rig.serve("again", prompt_of(200, seed=0)) == 192


STAGES = ["queued", "promoting", "promoted", "loading", "storing", "running"]


@ways
@pytest.mark.parametrize("stage", STAGES)
def test_an_abort_at_every_stage(make_rig: MakeRig, way: Way, stage: str) -> None:
    rig = make_rig(Setup(**way, ram_chunks=16, storage=disk(64)))
    prompt = prompt_of(200)
    if stage not in ("storing", "running"):
        rig.serve("first", prompt)
        forget_ram(rig)
        rig.driver.hold_back = True
    rig.add("gone", prompt, 50)
    reach(rig, stage)
    if "gone" not in rig.finished:
        rig.abort("gone")
    rig.driver.hold_back = False
    rig.run()
    rig.tick()
    assert not list(rig.tiers.stack.promotions.leases())
    assert rig.tiers.stack.tiers[RAM].pinned_count == 0
    assert rig.tiers.stack.transfers.open_copies() == []
    assert rig.serve("again", prompt, 3) in (0, 6 * BLOCK_TOKENS)  # 0: the device has it all
    rig.forget_device()
    assert rig.serve("last", prompt, 3) == 6 * BLOCK_TOKENS


def abort_if(rig: Rig, now: bool) -> None:
    if now and "gone" not in rig.finished:
        rig.abort("gone")


def reach(rig: Rig, stage: str) -> None:
    """Step until request `gone` is at a stage."""
    stack = rig.tiers.stack
    if stage == "queued":
        return
    if stage == "promoting":
        rig.run_until(lambda: stack.transfers.under_way(RAM) == 6, 5)
    elif stage == "promoted":
        rig.step()
        rig.driver.hold_back = False
        rig.tiers._drain(rig.clock())
        assert stack.promotions.lease("gone").pinned == 6
    elif stage in ("loading", "storing"):
        jobs = stack.loads_under_way if stage == "loading" else stack.pending_stores
        rig.driver.hold_back = False
        rig.during = lambda: abort_if(rig, "gone" in jobs())
        rig.run_until(lambda: "gone" in rig.finished, 10)
        rig.during = None
    else:
        rig.run_until(lambda: len(rig.outputs["gone"]) > 5, 20)


@ways
def test_without_a_prefix_cache_on_the_device(make_rig: MakeRig, way: Way) -> None:
    """Nothing then keeps two requests from loading the same chunks at once."""
    rig = make_rig(Setup(**way, prefix_caching=False, blocks_per_chunk=2, ram_chunks=16))
    prompt = prompt_of(200)
    assert rig.serve("first", prompt, 3) == 0
    for at in range(3):
        rig.add(f"again-{at}", prompt, 3)
    rig.run()
    for at in range(3):
        assert rig.external_tokens(f"again-{at}") == 6 * BLOCK_TOKENS
        assert rig.outputs[f"again-{at}"] == rig.outputs["first"]


@ways
def test_limits_that_a_request_sets_for_itself(make_rig: MakeRig, way: Way) -> None:
    rig = make_rig(Setup(**way, ram_chunks=16))
    prompt = prompt_of(200)
    rig.serve("first", prompt)
    rig.forget_device()
    request = rig.add("capped", prompt, transfer={"max_load_tokens": 70})
    assert request.kv_transfer_params == {"max_load_tokens": 70}
    rig.run()
    assert rig.external_tokens("capped") == 2 * BLOCK_TOKENS
    assert rig.outputs["capped"] == rig.expected("capped")


@ways
def test_two_requests_for_one_chain_share_its_promotion(make_rig: MakeRig, way: Way) -> None:
    rig = make_rig(Setup(**way, ram_chunks=16, storage=disk(64)))
    prompt = prompt_of(200)
    rig.serve("first", prompt)
    forget_ram(rig)
    rig.add("one", prompt)
    rig.add("two", prompt_of(200)[:170] + prompt_of(30, seed=7))
    rig.run()
    assert rig.chunks("ram", Event.PROMOTED) == 6
    assert all(rig.outputs[name] == rig.expected(name) for name in ("one", "two"))
    assert rig.external_tokens("one") == 6 * BLOCK_TOKENS


def test_what_the_engine_shows_of_a_request(make_rig: MakeRig) -> None:
    """The connector's entry knows the whole account; the spec's not the prompt's length."""
    rig = make_rig(Setup("connector", ram_chunks=16, storage=disk(64)))
    prompt = prompt_of(200)
    rig.serve("first", prompt)
    forget_ram(rig)
    rig.serve("half", prompt[: 3 * BLOCK_TOKENS + 1])
    lines = RequestLines()
    with lines.listening():
        rig.serve("chatcmpl-again-1a2b3c4d", prompt)
    line = lines.of["chatcmpl-again-1a2b3c4d"]
    assert line["external_id"] == "chatcmpl-again"
    counted = {name: line[f"{name}_tokens"] for name in ("prompt", "device", "disk", "computed")}
    assert counted == {"prompt": 200, "device": 96, "disk": 96, "computed": 8}
    assert line["why_not_more"] == "whole"
    assert line["wait_s"] > 0


def test_metrics_never_go_backwards(make_rig: MakeRig) -> None:
    """A counter that is given a negative number ends vLLM's front end."""
    setup = Setup(
        "connector", device_blocks=26, blocks_per_chunk=4, ram_chunks=8, storage=disk(64, 4)
    )
    rig = make_rig(Setup(**vars(setup) | {"extra": {"offload_prompt_only": False}}))
    for at in range(4):
        rig.add(f"long-{at}", prompt_of(130 + at, seed=at % 2), 220)
    rig.run(3000)
    assert rig.chunks("ram", Event.ADMITTED) > 0
    assert min(rig.amounts) >= 0


def test_a_restarted_engine_gets_its_first_request_from_disk(make_rig: MakeRig) -> None:
    """What a tier holds is known before the first request is told that anything is missing."""
    storage = disk(64)
    prompt = prompt_of(200)
    killed = make_rig(Setup(storage=storage))
    killed.serve("first", prompt)
    killed.driver.poll()  # what was handed over is written, whether the engine asks or not
    rig = make_rig(Setup(storage=storage))
    assert rig.serve("again", prompt) == 6 * BLOCK_TOKENS
    assert rig.chunks("ram", Event.PROMOTED) == 6
    assert len(rig.tiers.stack.tiers[DISK].entries) == 6
