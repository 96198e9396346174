"""One engine's time in the keeper: its arena, its disk, its manager's session.

A new engine gets the arena of the one before, checked row by row, if namespace and geometry are
the same; else fresh memory. All methods run on the loop's thread and return at once.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import msgspec
import numpy as np

from emberkv.domain.namespace import Namespace
from emberkv.domain.types import (
    DISK,
    RAM,
    ChunkKey,
    Copy,
    Entry,
    Level,
    Outcome,
    Slot,
    TransferId,
)
from emberkv.errors import KeeperError, StorageError
from emberkv.live.arena import READY, Arena, ArenaGeometry, create_memory
from emberkv.live.keeper.disk import DiskState, DiskTier, OpenStorage
from emberkv.live.keeper.host_memory import available_bytes
from emberkv.live.keeper.loop import Loop
from emberkv.live.keeper.messages import (
    CopyOrder,
    DiskSettings,
    Hello,
    KeeperConfig,
    MemoryEnds,
    Message,
    PopulatedSlots,
    ResetDone,
    found,
    parents_of,
)
from emberkv.live.keeper.population import Population
from emberkv.live.keeper.seals import Seals
from emberkv.live.keeper.session import Session
from emberkv.tiers.base import SlotStorage
from emberkv.tiers.format import SlabGeometry


@dataclass(frozen=True, slots=True)
class Household:
    """What every tenancy of one keeper works with.

    `changed` is called when one may be ready, `tell_workers` with what every attached worker
    shall hear; for `settle_s` see `DiskTier`.
    """

    loop: Loop
    open_storage: OpenStorage
    changed: Callable[[], None]
    tell_workers: Callable[[Message], None]
    settle_s: float


class Tenancy:
    """What the keeper holds for one engine. Its parts run on threads of their own."""

    seals_class: ClassVar[type[Seals]] = Seals
    population_class: ClassVar[type[Population]] = Population
    disk_class: ClassVar[type[DiskTier]] = DiskTier

    def __init__(self, house: Household, hello: Hello, memory_fd: int | None) -> None:
        """Prepare for the engine of `hello`; its namespace must be given.

        `memory_fd` is the memory of a keeper that died, known by `require_arena` to be one; it
        stays the caller's. Raises `KeeperError` if the arena can't be made.
        """
        self.config = hello.config
        self.engine_id = hello.engine_id
        self.namespace = Namespace(hello.namespace or ())
        self.taken_over = False
        self.renewed = hello.renewed
        self.memory_failure: str | None = None
        self._house = house
        self._loop = house.loop
        self._round = 0
        self._ram_told = True
        self._session = Session(house.loop)
        self.arena = _arena(hello.config, memory_fd)
        self.seals = self.seals_class(self.arena)
        self._populated = 0 if memory_fd is None else hello.populated_slots or 0
        self._population = self.population_class(
            self.arena,
            self._populated,
            lambda first, count: self._loop.post(lambda: self._piece(first, count)),
            lambda reason: self._loop.post(lambda: self._population_ended(reason)),
        )
        self._former_disks: list[DiskTier] = []  # which may have reads that still run
        self.disk = self._open_disk(reset_owed=hello.reset_owed, slots=hello.disk_slots)
        if memory_fd is None:
            self._session.send(found(RAM, (), last=True))
        else:
            self.seals.request_all()

    def succeed(self, hello: Hello) -> bool:
        """Give everything to a new engine, if it may have it: same namespace, same geometry.

        The one before must be gone. False, and nothing has changed, if it may not.
        """
        if not self._may_have(hello):
            return False
        self._session.end()
        self._session = Session(self._loop)
        self.engine_id = hello.engine_id
        self.taken_over = True
        self._tell_populated(self._quarantined())
        if self.renewed:
            self._forget_ram()
        else:
            self._verify()
        self._succeed_disk(hello)
        self.config = hello.config
        self.renewed = False
        return True

    def _may_have(self, hello: Hello) -> bool:
        mine, theirs = self.config, hello.config
        same_rows = (mine.slot_count, mine.chunk_bytes) == (theirs.slot_count, theirs.chunk_bytes)
        same_bytes = Namespace(hello.namespace or ()).digest == self.namespace.digest
        return same_rows and same_bytes and self.memory_failure is None

    @property
    def populated_slots(self) -> int:
        """Slots that have their memory, from the first on."""
        return self._populated

    @property
    def is_ready(self) -> bool:
        """Whether a manager can be answered: first memory there, disk open or given up."""
        has_memory = self._populated > 0 or self.memory_failure is not None
        return has_memory and (self.disk is None or self.disk.state is not DiskState.OPENING)

    @property
    def ready_chunks(self) -> int:
        return int((self.arena.headers["state"] == READY).sum())

    @property
    def slot_counts(self) -> tuple[int, ...]:
        """Slots per tier that can be used, RAM first."""
        disk_slots = 0 if self.disk is None else self.disk.slot_count
        return (self.config.slot_count, disk_slots) if disk_slots else (self.config.slot_count,)

    def give_up_opening(self) -> None:
        """Go on without the disk if it has not opened by now."""
        if self.disk is not None and self.disk.state is DiskState.OPENING:
            self.disk.close()
            self._house.changed()

    def attach(self, deliver: Callable[[bytes], None]) -> None:
        """The manager is there: send it what was found, and from now on what happens."""
        self._session.begin(deliver)

    def submit(self, orders: tuple[CopyOrder, ...]) -> None:
        """Start copies, each chunk of which is reported once."""
        for order in orders:
            copy = _copy(order)
            if self.disk is not None and self._fits(copy, self.disk.slot_count):
                self.disk.submit(copy)
            else:
                self._session.progress(copy, 0, [Outcome.SHED] * len(copy.keys), 0.0)

    def _fits(self, copy: Copy, disk_slot_count: int) -> bool:
        """Whether a copy names slots that there are: a wrong number must not end a thread."""
        limits = {RAM: self.config.slot_count, DISK: disk_slot_count}
        count = len(copy.keys)
        return {copy.source, copy.target} == {RAM, DISK} and all(
            len(slots) == count and min(slots) >= 0 and max(slots) < limits[level]
            for level, slots in (
                (copy.source, copy.source_slots),
                (copy.target, copy.target_slots),
            )
        )

    def seal(self, slots: tuple[int, ...]) -> None:
        """Have rows checksummed."""
        if slots and min(slots) >= 0 and max(slots) < self.config.slot_count:
            self.seals.request(np.asarray(slots, dtype=np.int64))

    def reset(self, number: int, *, renewed: bool) -> None:
        """Make everything held unusable; ends in `ResetDone`. For `renewed` see `ResetTiers`."""
        self.renewed = self.renewed or renewed
        self.seals.invalidate()
        self._round += 1
        if not self._ram_told:
            self._ram_told = True
            self._session.send(found(RAM, (), last=True))
        if self.disk is None:
            self._session.send(ResetDone(number, None))
        else:
            self.disk.reset(number, passing=self.renewed)

    def end(self, *, keep_memory: bool = False) -> None:
        """Let go of everything; the memory is free at once, unless another tenancy has it."""
        self._session.end()
        if self.disk is not None:
            self.disk.close()
        self._population.stop()
        self.seals.stop()
        if not keep_memory:
            self.arena.discard()

    # ── inner ────────────────────────────────────────────────────────────────────────────────

    def _open_disk(self, *, reset_owed: bool, slots: int | None = None) -> DiskTier | None:
        settings, namespace, renewed = self.config.disk, self.namespace, self.renewed
        if settings is None:
            return None
        chunk_bytes = self.config.chunk_bytes
        wanted = settings if slots is None else _sized(settings, slots, chunk_bytes)

        def open_storage() -> SlotStorage:
            storage = self._house.open_storage(wanted, namespace, chunk_bytes)
            try:
                if reset_owed:
                    storage.reset(passing=renewed)
            except StorageError:
                storage.close()
                raise
            return storage

        disk = self.disk_class(
            self._loop,
            self.arena,
            self.seals,
            settings,
            open_storage,
            settle_s=self._house.settle_s,
        )
        disk.reset_owed = reset_owed
        disk.when_opened(self._house.changed)
        disk.serve(self._session)
        return disk

    def _succeed_disk(self, hello: Hello) -> None:
        """Go on with the open disk if the new engine wants the same and it works; else reopen."""
        kept = self.disk
        owed = hello.reset_owed or self.renewed or (kept is not None and kept.reset_owed)
        same = kept is not None and kept.settings == hello.config.disk
        if kept is not None and same and kept.state is DiskState.UP and not owed:
            kept.serve(self._session)
            return
        if kept is not None:
            kept.close()
            self._former_disks.append(kept)
        self.config = hello.config
        self.renewed = False
        self.disk = self._open_disk(reset_owed=owed)

    def _piece(self, first: int, count: int) -> None:
        begins = not self._populated
        self._populated = first + count
        message = PopulatedSlots(first, count)
        self._session.send(message)
        self._house.tell_workers(message)
        if begins:
            self._house.changed()

    def _population_ended(self, reason: str | None) -> None:
        if reason is None:
            return
        self.memory_failure = f"no memory for more of the arena: {reason}"
        if self._populated:
            self._session.send(MemoryEnds(self._populated, self.memory_failure))
        self._house.changed()

    def _tell_populated(self, held_back: list[Slot]) -> None:
        """Name what a new engine may use: all that is populated, but for slots being read into."""
        first = 0
        for end in [*sorted(set(held_back)), self._populated]:
            if end > first:
                self._session.send(PopulatedSlots(first, end - first))
            first = end + 1

    def _quarantined(self) -> list[Slot]:
        """Slots that some read of an earlier engine may still write to, however long it hangs.

        The present engine is told of each when its read has ended.
        """
        session = self._session

        def give_back(slots: list[Slot]) -> None:
            for slot in slots:
                session.send(PopulatedSlots(slot, 1))

        former = [(disk, disk.quarantine(give_back)) for disk in self._former_disks]
        self._former_disks = [disk for disk, slots in former if slots]
        present = [] if self.disk is None else self.disk.quarantine(give_back)
        return present + [slot for _, slots in former for slot in slots]

    def _forget_ram(self) -> None:
        """A new engine may take nothing over, nor the one after it."""
        self.seals.invalidate()
        self._round += 1
        self._ram_told = True
        self._session.send(found(RAM, (), last=True))

    def _verify(self) -> None:
        """Find what a new engine may take over; a reset or a newer engine makes it void."""
        self._round += 1
        self._ram_told = False
        this_round = self._round

        def tell(entries: list[Entry], last: bool) -> None:
            if this_round == self._round:
                self._ram_told = last
                self._session.send(found(RAM, entries, last=last))

        self.seals.verify(lambda entries, last: self._loop.post(lambda: tell(entries, last)))


def _arena(config: KeeperConfig, memory_fd: int | None) -> Arena:
    geometry = ArenaGeometry(config.slot_count, config.chunk_bytes)
    if memory_fd is not None:
        return Arena(memory_fd, geometry)
    left = available_bytes()
    if left is not None and left < geometry.total_bytes:
        raise KeeperError(
            f"the RAM tier of {geometry.total_bytes} bytes does not fit: this machine or its "
            f"control group has {left} bytes left; make the tier smaller"
        )
    fd = create_memory(geometry)
    try:
        return Arena(fd, geometry)
    finally:
        os.close(fd)


def require_arena(memory_fd: int, config: KeeperConfig) -> None:
    """Raise `KeeperError` unless this is the memory of such an arena, which nobody can shrink.

    A fault in memory that is gone would end the process.
    """
    try:
        seals = fcntl.fcntl(memory_fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise KeeperError("what was brought is no memory of an arena") from error
    if not seals & fcntl.F_SEAL_SHRINK:
        raise KeeperError("the memory that was brought may shrink")
    geometry = ArenaGeometry(config.slot_count, config.chunk_bytes)
    if os.fstat(memory_fd).st_size != geometry.total_bytes:
        raise KeeperError("the memory that was brought has another size than its arena")


def _sized(settings: DiskSettings, slots: int, chunk_bytes: int) -> DiskSettings:
    """Settings for exactly so many slots, whatever the file system has free by now."""
    size_bytes = SlabGeometry(slots, chunk_bytes).total_bytes
    return msgspec.structs.replace(settings, size_bytes=size_bytes, size_is_default=False)


def _copy(order: CopyOrder) -> Copy:
    return Copy(
        TransferId(order.transfer),
        Level(order.source),
        Level(order.target),
        tuple(map(ChunkKey, order.keys)),
        tuple(None if parent is None else ChunkKey(parent) for parent in parents_of(order)),
        tuple(map(Slot, order.source_slots)),
        tuple(map(Slot, order.target_slots)),
    )
