"""The tiers without an engine: a prompt is stored, pushed out of RAM, and promoted back.

Uses the same manager as vLLM's adapter, a real arena of eight slots, and a disk tier that is kept
in memory. A look-up is what an engine asks for each chunk of a prompt, head first.

Run: .venv/bin/python examples/core_in_memory.py
"""

from __future__ import annotations

import time

from emberkv.core.limits import Limits
from emberkv.core.residents import Residents
from emberkv.core.stack import TierStack
from emberkv.domain.types import DISK, RAM, ChunkKey, RequestId
from emberkv.live.arena import ArenaGeometry
from emberkv.live.lookup import Lookup
from emberkv.live.manager import TierManager
from emberkv.observe.requests import RequestFacts
from emberkv.policy.eviction import Lru
from emberkv.testing.driver import InlineDriver
from emberkv.tiers.memory import MemoryStorage

CHUNK_BYTES = 4096


def main() -> None:
    geometry = ArenaGeometry(slot_count=8, chunk_bytes=CHUNK_BYTES)
    driver = InlineDriver(geometry, [MemoryStorage(slot_count=64, payload_bytes=CHUNK_BYTES)])
    tiers = [Residents(count, CHUNK_BYTES, Lru(count)) for count in driver.slot_counts]
    manager = TierManager(TierStack(tiers, Limits()), driver, time.monotonic, ended)
    manager.step_end([], [])  # takes note of the memory that is there

    for document in ("harbour", "orchard"):
        store(manager, document)
    for document in ("orchard", "harbour"):
        fetch(manager, document)
    manager.shutdown()


def ended(facts: RequestFacts) -> None:
    """What the manager says of each request that is over; a server logs it."""
    print(f"{facts.request}: {facts.stored_chunks} chunks stored")


def chain(document: str) -> list[ChunkKey]:
    """Six chunks; an engine's keys are hashes of the whole prefix."""
    return [ChunkKey(f"{document} {number}".encode()) for number in range(6)]


def store(manager: TierManager, document: str) -> None:
    """What an engine does after computing a prompt: ask where to put it, write, say so."""
    request = RequestId(f"{document}, first visit")
    manager.begin(request)
    keys = chain(document)
    for key, slot in manager.prepare_store(request, keys, None) or []:
        manager.driver.arena.row(slot)[:] = key.ljust(CHUNK_BYTES, b".")
    manager.complete_store(request, keys)
    manager.step_end([], [])
    manager.finish(request)


def fetch(manager: TierManager, document: str) -> None:
    """What an engine does with a waiting prompt: ask every step until nothing says RETRY."""
    request = RequestId(f"{document}, back again")
    manager.begin(request)
    keys = chain(document)
    steps = 0
    answers = [Lookup.RETRY]
    while Lookup.RETRY in answers:
        steps += 1
        answers = [manager.lookup(request, key) for key in keys]
        manager.step_end([], [])
    found = keys[: answers.index(Lookup.MISS) if Lookup.MISS in answers else len(keys)]
    slots = manager.prepare_load(request, found) or []
    levels = [manager.origin(request, key) for key in found]
    texts = [bytes(manager.driver.arena.row(slot)).rstrip(b".") for slot in slots]
    assert texts == found, "a chunk came back with another's bytes"
    manager.complete_load(request)
    from_ram, from_disk = levels.count(RAM), levels.count(DISK)
    print(f"{document}: {from_ram} chunks from RAM, {from_disk} from disk, in {steps} steps")
    manager.finish(request)


if __name__ == "__main__":
    main()
