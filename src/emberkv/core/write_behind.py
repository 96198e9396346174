"""Write-behind: chunks in use are copied one tier down while they stay above."""

from __future__ import annotations

from collections.abc import Sequence

from emberkv.core.counts import Event, Journal
from emberkv.core.economy import Economy
from emberkv.core.evictions import Evictions
from emberkv.core.gates import Gates
from emberkv.core.residents import Resident, Residents
from emberkv.core.retention import Retention
from emberkv.core.transfers import Transfers
from emberkv.core.visits import Visit
from emberkv.domain.types import ChunkKey, Level


class WriteBehind:
    """Starts copies down, as far as gates, queues, hints and the tier below let it."""

    def __init__(
        self,
        transfers: Transfers,
        journal: Journal,
        evictions: Evictions,
        *,
        retention: Retention,
        gates: Gates,
        economy: Economy,
    ) -> None:
        self._tiers = transfers.tiers
        self._transfers = transfers
        self._journal = journal
        self._evictions = evictions
        self._retention = retention
        self._gates = gates
        self._economy = economy
        self.passed_on: list[list[ChunkKey]] = [[] for _ in self._tiers]

    def offer(self, visit: Visit, keys: Sequence[ChunkKey], now_s: float) -> None:
        """A visit has used these: copy down what is usable and not yet there."""
        for number in range(1, len(self._tiers)):
            level = Level(number)
            above, below = self._tiers[number - 1], self._tiers[number]
            known = below.entries
            run = [above.entries[k] for k in keys if k not in known and above.ready(k)]
            if run:
                self._write(visit, level, run, now_s)

    def arrived(self, level: Level, residents: Sequence[Resident]) -> None:
        """A tier has got these; its own lower neighbour will be offered them in `settle`."""
        if level + 1 < len(self._tiers):
            self.passed_on[level] += [resident.key for resident in residents]

    def settle(self, now_s: float) -> None:
        """Pass on what tiers have got since the last time."""
        for number, keys in enumerate(self.passed_on):
            if not keys:
                continue
            tier = self._tiers[number]
            run = [tier.entries[key] for key in dict.fromkeys(keys) if tier.ready(key)]
            if run:
                self._write(Visit(run[-1].visit), Level(number + 1), run, now_s)
            keys.clear()

    def forget(self, level: Level | None = None) -> None:
        """What a tier (all of them) had got is not there any more."""
        for number, keys in enumerate(self.passed_on):
            if level is None or number == level:
                keys.clear()

    def _write(self, visit: Visit, level: Level, offered: Sequence[Resident], now_s: float) -> None:
        run = self._wanted(visit, level, offered, now_s)
        if run:
            self.write_run(visit, level, run, now_s)

    def _wanted(
        self, visit: Visit, level: Level, offered: Sequence[Resident], now_s: float
    ) -> Sequence[Resident]:
        """Those that may go down at all; the others are noted with the reason."""
        entries = self._tiers[level].entries
        run = [resident for resident in offered if resident.key not in entries]
        if not self._gates.stores(level):
            self._note(Event.REFUSED_BY_GATE, level, run)
            return ()
        if not visit.may_use(level) or visit.hints.no_store:
            self._note(Event.REFUSED_BY_HINT, level, run)
            return ()
        if self._economy.sheds_writes(level, now_s):
            self._note(Event.SHED_SLOW_TIER, level, run)
            return ()
        descending = [resident for resident in run if self._retention.descends(resident)]
        self._note_left(Event.REFUSED_BY_HINT, level, run, descending)
        return descending

    def write_run(
        self, visit: Visit, level: Level, offered: Sequence[Resident], now_s: float
    ) -> None:
        """Start a copy to `level` for those of `offered` that have a place there."""
        below = self._tiers[level]
        run = reachable(below, offered)
        self._note_left(Event.REFUSED_UNREACHABLE, level, offered, run)
        room = max(0, self._transfers.limits.write_behind_chunks - self._transfers.under_way(level))
        self._note(Event.SHED_QUEUE_FULL, level, run[room:])
        run = run[:room]
        self._evictions.left(level, below.make_room(len(run), visit.id, visit.tenant))
        followed = reachable(below, run)  # making room may have taken a parent
        self._note_left(Event.REFUSED_UNREACHABLE, level, run, followed)
        self._note(Event.SHED_NO_ROOM, level, followed[below.free_count :])
        run = followed[: below.free_count]
        keys = [resident.key for resident in run]
        targets = below.insert(keys, [resident.parent for resident in run], visit.id)
        if targets:
            self._retention.dress(level, zip(targets, run, strict=True))
            visit.tails[level] = keys[-1]
            pairs = [(resident, target.slot) for resident, target in zip(run, targets, strict=True)]
            self._transfers.start(Level(level - 1), level, pairs, now_s)

    def _note(self, event: Event, level: Level, residents: Sequence[Resident]) -> None:
        if residents:
            self._journal.note(event, level, [resident.key for resident in residents])

    def _note_left(
        self, event: Event, level: Level, before: Sequence[Resident], after: Sequence[Resident]
    ) -> None:
        """Note for those of `before` that are not among `after`."""
        if len(after) < len(before):
            kept = {resident.key for resident in after}
            self._note(event, level, [r for r in before if r.key not in kept])


def reachable(below: Residents, offered: Sequence[Resident]) -> list[Resident]:
    """Those whose parent is below or comes with them; room is made for no other."""
    found: list[Resident] = []
    coming: set[ChunkKey] = set()
    for resident in offered:
        parent = resident.parent
        if resident.key in below.entries:
            continue
        if parent is None or parent in below.entries or parent in coming:
            found.append(resident)
            coming.add(resident.key)
    return found
