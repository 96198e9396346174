"""Gets the arena's memory from the kernel, piece by piece, before anyone touches it.

Memory that is only promised would be found missing by a signal in the middle of a copy. So a slot
is handed out only after its pages are there; the first piece is waited for at start, the rest
comes in the background while the server already works with what there is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from emberkv.live.arena import Arena
from emberkv.live.paging import back_with_memory, map_slots, prefer_huge_pages

PIECE_BYTES: Final = 64 << 20


class Population:
    """Populates slots in order, on a thread of its own, from `first_slot` on.

    `on_piece(first_slot, slot_count)` and `on_end(reason)` are called on that thread; a reason
    means that no more memory is to be had. Slots before `first_slot` have their memory already.
    """

    def __init__(
        self,
        arena: Arena,
        first_slot: int,
        on_piece: Callable[[int, int], None],
        on_end: Callable[[str | None], None],
    ) -> None:
        self._arena = arena
        self._first_slot = first_slot
        self._on_piece = on_piece
        self._on_end = on_end
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="populate", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ask for no more; returns when the present piece is done."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        arena, geometry = self._arena, self._arena.geometry
        prefer_huge_pages(arena)
        map_slots(arena, 0, self._first_slot)
        per_piece = max(1, PIECE_BYTES // geometry.row_bytes)
        for first in range(self._first_slot, geometry.slot_count, per_piece):
            if self._stopped.is_set():
                return
            count = min(per_piece, geometry.slot_count - first)
            start = geometry.header_bytes + first * geometry.row_bytes
            end = start + count * geometry.row_bytes
            try:
                back_with_memory(arena, start if first else 0, end)
            except OSError as error:
                self._on_end(error.strerror or str(error))
                return
            self._on_piece(first, count)
        self._on_end(None)
