"""Defects that the kill tests must notice, planted into victim and judge alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from emberkv.domain.types import ChunkKey, Outcome, Slot
from emberkv.live.arena import Arena
from emberkv.tiers import slab
from emberkv.tiers.format import EMPTY_RECORD, HEADER_BYTES, RECORD_BYTES
from emberkv.tiers.slab import Slab

Patch = Callable[[Any, str, Any], None]


def acknowledged_before_written(patch: Patch = setattr) -> None:
    """A write says OK and leaves the payload and the record for later."""

    def write_run(
        self: Slab, first_slot: int, rows: Sequence[bytes], payloads: Sequence[memoryview]
    ) -> list[Outcome]:
        del payloads
        offset = HEADER_BYTES + first_slot * RECORD_BYTES
        slab.write_at(self._files.index_fd, [memoryview(EMPTY_RECORD * len(rows))], offset)
        return [Outcome.OK] * len(rows)

    patch(Slab, "_write_run", write_run)


def record_first_and_not_compared(patch: Patch = setattr) -> None:
    """A record is there before its payload, and a read believes it."""

    def write_run(
        self: Slab, first_slot: int, rows: Sequence[bytes], payloads: Sequence[memoryview]
    ) -> list[Outcome]:
        offset = HEADER_BYTES + first_slot * RECORD_BYTES
        slab.write_at(self._files.index_fd, [memoryview(b"".join(rows))], offset)
        self._payloads.write(first_slot, payloads)
        return [Outcome.OK] * len(rows)

    def read_verified(
        self: Slab, first_slot: int, payloads: Sequence[memoryview], checksums: Sequence[int]
    ) -> list[Outcome]:
        self._payloads.read(first_slot, payloads)
        return [Outcome.OK] * len(checksums)

    patch(Slab, "_write_run", write_run)
    patch(Slab, "_read_verified", read_verified)


def reset_is_not_written(patch: Patch = setattr) -> None:
    """A reset raises the epoch in memory alone."""
    patch(slab, "write_header", lambda _fd, _header: None)


def renamed_before_rewritten(patch: Patch = setattr) -> None:
    """A row gets its new key while it is READY, sealed and holds the old bytes."""

    def mark_writing(
        self: Arena,
        slots: Sequence[Slot],
        keys: Sequence[ChunkKey],
        parents: Sequence[ChunkKey | None],
    ) -> None:
        at = np.asarray(slots)
        self.headers["key_bytes"][at] = [len(key) for key in keys]
        self.headers["key"][at] = np.frombuffer(
            b"".join(key.ljust(40, b"\0") for key in keys), np.uint8
        ).reshape(len(keys), 40)
        self.headers["parent_bytes"][at] = [len(parent or b"") for parent in parents]

    patch(Arena, "mark_writing", mark_writing)


PLANTED: dict[str, Callable[..., None]] = {
    defect.__name__: defect
    for defect in (
        acknowledged_before_written,
        record_first_and_not_compared,
        reset_is_not_written,
        renamed_before_rewritten,
    )
}
