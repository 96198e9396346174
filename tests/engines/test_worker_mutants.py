"""Defects planted in worker, tier I/O and slab are found, with seed and step named."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.kv_offload.base import GPULoadStoreSpec, TransferResult
from worker_play import WorkerPlay, numpy_rolled

from emberkv.domain.types import ChunkKey, Outcome
from emberkv.engines.vllm.slots import ArenaSlots
from emberkv.engines.vllm.worker import ArenaCopyWorker, Band
from emberkv.live.keeper.tier_io import TierIo
from emberkv.tiers import slab
from emberkv.tiers.format import _unpack_sound

pytestmark = pytest.mark.engine

STEPS = 300
SEEDS = range(3)
Patch = pytest.MonkeyPatch
Mutation = Callable[[Patch], None]
MUTATIONS: dict[str, Mutation] = {}


def mutant(mutation: Mutation) -> Mutation:
    MUTATIONS[mutation.__name__] = mutation
    return mutation


# ── the worker ───────────────────────────────────────────────────────────────────────────────────


@mutant
def the_wrong_chunk_is_copied(patch: Patch) -> None:
    runs = ArenaCopyWorker._runs

    def turned(self: ArenaCopyWorker, device: Any, rows: Any) -> Iterator[Any]:
        slots = rows.block_ids.tolist()
        yield from runs(self, device, ArenaSlots(slots[1:] + slots[:1]))

    patch.setattr(ArenaCopyWorker, "_runs", turned)


@mutant
def a_layer_is_shifted(patch: Patch) -> None:
    copy = ArenaCopyWorker._copy

    def shifted(self: ArenaCopyWorker, device: Any, rows: Any, *, to_row: bool) -> int:
        kept = self._bands
        if not to_row:
            self._bands = [Band(band.pages, numpy_rolled(band.rows)) for band in kept]
        try:
            return copy(self, device, rows, to_row=to_row)
        finally:
            self._bands = kept

    patch.setattr(ArenaCopyWorker, "_copy", shifted)


@mutant
def a_rank_takes_anothers_part(patch: Patch) -> None:
    init = ArenaCopyWorker.__init__

    def first(self: ArenaCopyWorker, caches: Any, arena: Any, per_chunk: int, rank: int) -> None:
        init(self, caches, arena, per_chunk, 0)

    patch.setattr(ArenaCopyWorker, "__init__", first)


@mutant
def a_load_begins_one_block_late(patch: Patch) -> None:
    runs = ArenaCopyWorker._runs

    def late(self: ArenaCopyWorker, device: Any, rows: Any) -> Iterator[Any]:
        first = int(device.block_indices[0])
        per_chunk = self._blocks_per_chunk
        if first % per_chunk and first % per_chunk + len(device.block_ids) < per_chunk:
            blocks = device.block_ids.tolist()
            device = GPULoadStoreSpec(blocks, [len(blocks)], [first + 1])
        yield from runs(self, device, rows)

    patch.setattr(ArenaCopyWorker, "_runs", late)


@mutant
def a_load_forgets_where_in_its_chunk_it_begins(patch: Patch) -> None:
    runs = ArenaCopyWorker._runs

    def from_start(self: ArenaCopyWorker, device: Any, rows: Any) -> Iterator[Any]:
        blocks = device.block_ids.tolist()
        yield from runs(self, GPULoadStoreSpec(blocks, [len(blocks)], [0]), rows)

    patch.setattr(ArenaCopyWorker, "_runs", from_start)


@mutant
def a_store_is_said_to_have_ended_before_it_has(patch: Patch) -> None:
    store = ArenaCopyWorker.submit_store
    finished = ArenaCopyWorker.get_finished
    due: list[tuple[ArenaCopyWorker, tuple[Any, ...]]] = []

    def later(self: ArenaCopyWorker, *job: Any, **_: Any) -> bool:
        due.append((self, job))
        return True

    def catch_up(self: ArenaCopyWorker, **_: Any) -> list[TransferResult]:
        for worker, job in due:
            store(worker, *job)
        due.clear()
        return finished(self)

    patch.setattr(ArenaCopyWorker, "submit_store", later)
    patch.setattr(ArenaCopyWorker, "get_finished", catch_up)


# ── tier I/O and slab ────────────────────────────────────────────────────────────────────────────


@mutant
def a_stale_generation_is_written(patch: Patch) -> None:
    patch.setattr(TierIo, "_is_stale", lambda self, batch: False)


@mutant
def a_write_from_before_a_reset_is_begun_after_it(patch: Patch) -> None:
    def always(self: TierIo, batch: object) -> bool:
        self._writing += 1
        return True

    patch.setattr(TierIo, "_begin_write", always)


@mutant
def a_checksum_is_not_compared(patch: Patch) -> None:
    def trusting(
        self: slab.Slab, first_slot: int, payloads: Sequence[memoryview], checksums: Sequence[int]
    ) -> list[Outcome]:
        self._payloads.read(first_slot, payloads)
        return [Outcome.OK] * len(payloads)

    patch.setattr(slab.Slab, "_read_verified", trusting)


@mutant
def a_key_is_not_compared(patch: Patch) -> None:
    def any_key(raw: bytes, slot: int, key: ChunkKey, epoch: int) -> int | None:
        _, _, own_epoch, _, checksum = _unpack_sound(raw, slot)
        return checksum if own_epoch == epoch else None

    patch.setattr(slab, "find_payload_checksum", any_key)


@mutant
def an_epoch_is_not_compared(patch: Patch) -> None:
    def any_epoch(raw: bytes, slot: int, key: ChunkKey, epoch: int) -> int | None:
        own_key, _, _, _, checksum = _unpack_sound(raw, slot)
        return checksum if own_key == key else None

    patch.setattr(slab, "find_payload_checksum", any_epoch)


def play(directory: Path) -> None:
    for seed in SEEDS:
        own = directory / str(seed)
        own.mkdir()
        WorkerPlay(own, seed).play(STEPS)


def test_without_a_defect_every_byte_is_right(tmp_path: Path) -> None:
    play(tmp_path)


@pytest.mark.parametrize("name", sorted(MUTATIONS))
def test_a_defect_is_found(name: str, tmp_path: Path, monkeypatch: Patch) -> None:
    MUTATIONS[name](monkeypatch)
    with pytest.raises(AssertionError, match=r"^seed \d+, step \d+: "):
        play(tmp_path)
