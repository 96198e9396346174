"""Chains of chunk keys as vLLM makes them, and requests that ask for them without an engine."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingManager,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)

NOTHING_STARTED = ScheduleEndContext((), ())


def chain_of(name: str, chunks: int) -> list[OffloadKey]:
    """Keys of a made-up prompt: 32 bytes of hash and the group, as vLLM's."""
    return [
        make_offload_key(hashlib.sha256(f"{name} {at}".encode()).digest(), 0)
        for at in range(chunks)
    ]


def request_for(name: str, keys: Sequence[OffloadKey], tokens_per_chunk: int = 32) -> ReqContext:
    """The context of a request for a chain, with the positions that vLLM sets."""
    context = ReqContext(name)
    for at, key in enumerate(keys, 1):
        context.set_offload_key_position(key, at * tokens_per_chunk)
    return context


def arrive(manager: OffloadingManager, name: str, keys: Sequence[OffloadKey]) -> ReqContext:
    """A request for a chain has arrived; its context."""
    context = request_for(name, keys)
    manager.on_new_request(context)
    return context


def look_up(
    manager: OffloadingManager, keys: Sequence[OffloadKey], context: ReqContext
) -> int | None:
    """One pass as the connector makes it: chunks that hit, or None if the request must wait."""
    hits, wait = 0, False
    for key in keys:
        result = manager.lookup(key, context)
        if result is LookupResult.MISS:
            break
        if result is LookupResult.HIT:
            hits += 1
        else:
            wait = True
    return None if wait else hits


def end_step(manager: OffloadingManager) -> None:
    """What the connector calls after each pass: nothing was started, statistics are taken."""
    manager.on_schedule_end(NOTHING_STARTED)
    manager.get_stats()


def store(manager: OffloadingManager, name: str, keys: Sequence[OffloadKey]) -> None:
    """Have chunks computed, as a request of their own that ends."""
    context = arrive(manager, name, keys)
    output = manager.prepare_store(keys, context)
    if output is None or len(output.keys_to_store) != len(keys):
        raise SystemExit("the tier did not take the chunks in")
    manager.complete_store(keys, context)
    end_step(manager)
    manager.on_request_finished(context)
