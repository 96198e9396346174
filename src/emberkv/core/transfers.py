"""Copies under way between tiers: what they pin, how many there are, whether a tier still moves."""

from __future__ import annotations

from collections.abc import Sequence

from emberkv.core.costs import ReadCost
from emberkv.core.limits import Limits
from emberkv.core.residents import Resident, Residents
from emberkv.domain.types import RAM, ChunkKey, Copy, Level, Outcome, Slot, TransferId
from emberkv.errors import InvariantError


class _UnderWay:
    """A copy, and which of its chunks have not ended."""

    __slots__ = ("copy", "open", "stale")

    def __init__(self, copy: Copy) -> None:
        self.copy = copy
        self.open = set(range(len(copy.keys)))
        self.stale = False


class Transfers:
    """Starts copies, pins their sources, and matches what ends to what was started."""

    def __init__(
        self, tiers: Sequence[Residents], limits: Limits, reads: Sequence[ReadCost]
    ) -> None:
        self.tiers = tiers
        self.limits = limits
        self._under_way: dict[TransferId, _UnderWay] = {}
        self._fresh: list[Copy] = []
        self._chunks_to = [0] * len(tiers)
        self._reads = reads
        self._origins: dict[ChunkKey, Level] = {}
        self._next_id = 0

    def start(
        self, source: Level, target: Level, run: Sequence[tuple[Resident, Slot]], now_s: float
    ) -> None:
        """Start one copy for a run of (source resident, target slot); nothing for an empty run."""
        if not run:
            return
        for resident, _ in run:
            self.tiers[source].pin(resident)
        self._next_id += 1
        copy = Copy(
            TransferId(self._next_id),
            source,
            target,
            tuple(resident.key for resident, _ in run),
            tuple(resident.parent for resident, _ in run),
            tuple(resident.slot for resident, _ in run),
            tuple(slot for _, slot in run),
        )
        self._under_way[copy.transfer] = _UnderWay(copy)
        self._fresh.append(copy)
        self._chunks_to[target] += len(run)
        if target == RAM:
            self._origins.update((key, source) for key in copy.keys)
            self._reads[source].started(len(run), now_s)

    def take(self) -> list[Copy]:
        """Copies started since the last time."""
        fresh, self._fresh = self._fresh, []
        return fresh

    def finish(
        self, transfer: TransferId, results: Sequence[tuple[int, Outcome]], ended_s: float
    ) -> tuple[Copy, bool]:
        """Take note of chunks that ended then; returns their copy, and whether it is stale."""
        under_way = self._under_way.get(transfer)
        if under_way is None:
            raise InvariantError(f"copy {transfer} has ended already or never began")
        copy = under_way.copy
        for index, _ in results:
            if index not in under_way.open:
                raise InvariantError(f"chunk {index} of copy {transfer} ended twice")
            under_way.open.remove(index)
        if not under_way.open:
            del self._under_way[transfer]
        self._chunks_to[copy.target] -= len(results)
        if copy.target == RAM:
            came = sum(outcome is Outcome.OK for _, outcome in results)
            self._reads[copy.source].ended(len(results), came, ended_s)
            if not under_way.stale:
                for index, _ in results:
                    del self._origins[copy.keys[index]]
        return copy, under_way.stale

    def copy_of(self, transfer: TransferId) -> Copy:
        """The copy of that id, while any of its chunks is under way."""
        return self._under_way[transfer].copy

    def under_way(self, target: Level) -> int:
        """Chunks being copied to a tier."""
        return self._chunks_to[target]

    def origin(self, key: ChunkKey) -> Level | None:
        """The tier from which a chunk is being promoted, if it is."""
        return self._origins.get(key)

    def stalled(self, level: Level, now_s: float) -> bool:
        """Whether reads from a tier are due and none has ended for longer than the limit."""
        return self._reads[level].silent_s(now_s) > self.limits.max_stall_s

    def open_copies(self, *, stale: bool | None = False) -> list[tuple[Copy, frozenset[int]]]:
        """For checks: copies with the indices that have not ended; `stale=None` for all."""
        return [
            (each.copy, frozenset(each.open))
            for each in self._under_way.values()
            if stale is None or each.stale is stale
        ]

    def withdraw(self, level: Level) -> list[Copy]:
        """Take back copies from or to a tier that nobody has taken yet; they must be ended."""
        taken_back = [copy for copy in self._fresh if level in (copy.source, copy.target)]
        self._fresh = [copy for copy in self._fresh if level not in (copy.source, copy.target)]
        return taken_back

    def abandon(self) -> dict[Level, list[Slot]]:
        """Make every copy stale; returns the slots that it may still read or write, per tier.

        A slot appears once per copy that touches it. Copies nobody has taken yet go away whole.
        """
        for copy in self._fresh:
            self._forget(copy)
        self._fresh = []
        touched: dict[Level, list[Slot]] = {}
        for each in self._under_way.values():
            if each.stale:
                continue
            each.stale = True
            copy = each.copy
            for index in each.open:
                touched.setdefault(copy.target, []).append(copy.target_slots[index])
                touched.setdefault(copy.source, []).append(copy.source_slots[index])
        self._origins.clear()
        return touched

    def _forget(self, copy: Copy) -> None:
        del self._under_way[copy.transfer]
        self._chunks_to[copy.target] -= len(copy.keys)
        if copy.target == RAM:
            self._reads[copy.source].dropped(len(copy.keys))
