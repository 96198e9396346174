"""Canary requests through the manager: what is kept is held against what is computed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from scripted_engine import CHUNK_BYTES, A, B, Engine, chain

from emberkv.core.canary import Canary, CanaryRule
from emberkv.core.gates import OPEN, SHUT
from emberkv.domain.types import DISK, RAM, ChunkKey, RequestId, Slot
from emberkv.live.canaries import Canaries
from emberkv.live.canary import Comparer, KvType
from emberkv.live.lookup import Lookup
from emberkv.observe.requests import MissReason

PARTS = 4
TOKENS = 1


class CanaryEngine(Engine):
    """An engine whose rows hold numbers, and whose every request with a hit is a canary."""

    def __init__(self, share: float = 1.0) -> None:
        super().__init__()
        manager = self.manager
        self.comparer = Comparer(self.driver.arena, KvType.FLOAT32, PARTS)
        self.canaries = manager.canaries = Canaries(
            manager.stack,
            manager.tally,
            Canary(CanaryRule(share, KvType.FLOAT32.precision)),
            self.comparer,
            manager.watch.take_out,
        )
        self.step()

    def compute(self, request: RequestId, keys: list[ChunkKey], off: float = 0.0) -> list[Slot]:
        """Ask, compute every chunk that is not loaded, and store it; returns the rows written."""
        self.manager.begin(request)
        self.manager.describe(request, len(keys) * TOKENS + 1, lambda: keys)
        self.answers = self.ask(request, keys)
        rows = self.manager.prepare_store(request, keys, None) or []
        for key, slot in rows:
            values = np.random.default_rng(list(key)).normal(size=CHUNK_BYTES // 4)
            row = np.frombuffer(self.driver.arena.row(slot), dtype=np.float32)
            row[:] = values * (1 + off)
        self.manager.complete_store(request, [key for key, _ in rows])
        self.driver.end()
        self.manager.finish(request)
        self.step()
        return [slot for _, slot in rows]

    def settle(self) -> None:
        """Let all comparisons come in."""
        while self.canaries._comparing:
            self.step()


@pytest.fixture
def engine() -> Iterator[CanaryEngine]:
    made = CanaryEngine()
    yield made
    made.comparer.close()


def test_a_canary_is_computed_beside_what_is_kept(engine: CanaryEngine) -> None:
    keys = chain("x", 1)
    (kept,) = engine.compute(A, keys)
    (spare,) = engine.compute(B, keys, off=1e-6)
    engine.settle()
    assert engine.answers == [Lookup.MISS]
    assert kept != spare
    assert engine.ended[-1].miss_reason is MissReason.CANARY
    assert engine.canaries.facts()["compared_chunks"] == 1
    assert engine.manager.stack.gates[RAM] == OPEN
    assert engine.manager.stack.tiers[RAM].entries[keys[0]].pins == 0


def test_wrong_bytes_shut_their_tier(engine: CanaryEngine) -> None:
    keys = chain("x", 1)
    (kept,) = engine.compute(A, keys)
    row = np.frombuffer(engine.driver.arena.row(kept), dtype=np.float32)
    row[:] = row[::-1].copy()
    engine.compute(B, keys)
    engine.settle()
    assert engine.manager.stack.gates[RAM] == SHUT
    assert len(engine.canaries.facts()["disagreements"]) == 1  # type: ignore[arg-type]
    assert engine.ask(RequestId("after"), keys) == [Lookup.MISS]


def test_what_came_from_disk_shuts_the_disk(engine: CanaryEngine) -> None:
    keys = chain("x", 1)
    engine.canaries._canary.rule = CanaryRule(0.0, KvType.FLOAT32.precision)  # not yet
    engine.on_disk(A, keys)
    engine.canaries._canary.rule = CanaryRule(1.0, KvType.FLOAT32.precision)
    request = RequestId("again")
    engine.manager.begin(request)
    engine.manager.describe(request, len(keys) + 1, lambda: keys)
    assert engine.ask(request, keys) == [Lookup.RETRY]
    engine.step()
    (copy,) = [copy for copy in engine.driver.copies if copy.target == RAM]
    promoted = np.frombuffer(engine.driver.arena.row(copy.target_slots[0]), dtype=np.float32)
    promoted[:] = 1.0
    engine.driver.end()
    assert engine.ask(request, keys) == [Lookup.MISS]
    ((_, spare),) = engine.manager.prepare_store(request, keys, None) or []
    computed = np.frombuffer(engine.driver.arena.row(spare), dtype=np.float32)
    computed[:] = np.arange(len(computed))
    engine.manager.complete_store(request, keys)
    engine.manager.finish(request)
    engine.step()
    engine.settle()
    assert engine.manager.stack.gates[DISK] == SHUT
    assert engine.manager.stack.gates[RAM] == OPEN


def test_a_reset_leaves_no_row_behind(engine: CanaryEngine) -> None:
    keys = chain("x", 1)
    engine.compute(A, keys)
    engine.manager.begin(B)
    engine.manager.describe(B, 2, lambda: keys)
    assert engine.ask(B, keys) == [Lookup.MISS]
    assert engine.manager.prepare_store(B, keys, None)
    engine.manager.reset()
    for _ in range(70):
        engine.step()
    assert len(engine.canaries._spare) == 1
    engine.manager.finish(B)
    engine.step()


def test_only_a_share_is_compared() -> None:
    engine = CanaryEngine(share=0.25)
    keys = chain("x", 1)
    engine.compute(A, keys)
    hits = []
    for at in range(16):
        engine.compute(RequestId(f"r{at}"), keys)
        hits.append(engine.answers == [Lookup.HIT])
        engine.settle()
    assert hits.count(False) == 4
    engine.comparer.close()
