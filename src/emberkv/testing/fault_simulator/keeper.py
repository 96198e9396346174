"""The production keeper in virtual time: its parts run, their threads do not.

Arena, seals, queues, the disk tier's states and the messages are those that serve; only sockets,
threads and the disk itself are modelled. What a thread would do is done at a time drawn by
chance: a read goes on writing into its rows until it ends, a write has torn its slot since it
began.
"""

from __future__ import annotations

import itertools
import queue
from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush

from emberkv.domain.types import Copy, Slot
from emberkv.live.arena import Arena
from emberkv.live.keeper.disk import DiskTier
from emberkv.live.keeper.loop import Call, Loop
from emberkv.live.keeper.messages import (
    Bye,
    Hello,
    ResetTiers,
    Seal,
    Submit,
    decode_for_keeper,
)
from emberkv.live.keeper.population import Population
from emberkv.live.keeper.seals import Seals
from emberkv.live.keeper.tenancy import Household, Tenancy
from emberkv.live.keeper.tier_io import TierIo
from emberkv.testing.fault_simulator.disk import DiskModel, OpenDisk
from emberkv.testing.fault_simulator.setting import Fault, Setting
from emberkv.testing.fault_simulator.wire import SimulatedChannel
from emberkv.tiers.base import SlotStorage

SETTLE_S = 0.5


class SimulatedLoop(Loop):
    """Makes calls when virtual time has come to them. A call that raises is an error."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.now_s = setting.clock
        self._calls: list[tuple[float, int, Call]] = []
        self._numbers = itertools.count()

    def post(self, call: Call) -> None:
        self.call_later(0.0, call)

    def call_later(self, delay_s: float, call: Call) -> None:
        heappush(self._calls, (self.now_s() + delay_s, next(self._numbers), call))

    def soon(self, mean_s: float, call: Call) -> None:
        """Make a call at some time from now on."""
        self.call_later(self.setting.chance.expovariate(1.0 / mean_s), call)

    def advance(self) -> int:
        """Make every call that is due; returns how many were."""
        count, now_s = 0, self.now_s()
        while self._calls and self._calls[0][0] <= now_s:
            heappop(self._calls)[2]()
            count += 1
        return count

    def next_s(self) -> float | None:
        """When the next call is due."""
        return self._calls[0][0] if self._calls else None

    def drop_all(self) -> None:
        """The process is gone."""
        self._calls.clear()


class SimulatedTierIo(TierIo):
    """Tier I/O whose threads take up work, and end it, at times drawn by chance."""

    loop: SimulatedLoop

    def _start(self) -> None:
        self._expected = 0

    def submit(self, copy: Copy, report: Callable[..., None]) -> None:
        before = self._reads.qsize() + self._writes.qsize()
        super().submit(copy, report)
        mean_s = self.loop.setting.plan.copy_s
        waiting, work, _ = self._pools[0 if copy.target < copy.source else 1]
        for _ in range(self._reads.qsize() + self._writes.qsize() - before):
            self.loop.soon(mean_s, partial(self._take_up, waiting, work))

    def _take_up(self, waiting: queue.SimpleQueue, work: Callable) -> None:  # type: ignore[type-arg]
        try:
            batch = waiting.get_nowait()
        except queue.Empty:
            return  # cancelled meanwhile
        if batch is None:
            return
        loop, setting = self.loop, self.loop.setting
        storage = self.storage
        assert isinstance(storage, OpenDisk)
        hangs = setting.strikes(Fault.COPY_HANGS, 0.02)
        late_s = 5.0 if not hangs and setting.strikes(Fault.COPY_LATE, 0.03) else 0.0
        if work == self._read:
            outcomes = work(batch)
            slots = [Slot(slot) for slot in batch.slots.tolist()]
            arrived = [bytes(self._arena.row(slot)) for slot in slots]

            def end() -> None:
                if batch in self._reading:  # else it was never begun
                    for slot, row in zip(slots, arrived, strict=True):
                        self._arena.row(slot)[:] = row
                self._end(batch, outcomes, 0.001)
        else:
            copy = batch.copy
            # A thread that has taken a batch up may yet be late to begin with it.
            begins = setting.chance.random() < 0.5 and self._begin_write(batch)
            if begins:
                storage.begin_write(copy.target_slots[batch.first : batch.last])

            def end() -> None:
                if not begins:
                    self._end(batch, work(batch), 0.001)
                    return
                outcomes = self._write_begun(batch)
                self._end_write()
                self._end(batch, outcomes, 0.001)

        if not hangs:
            loop.call_later(late_s, partial(loop.soon, setting.plan.copy_s, end))


class SimulatedDiskTier(DiskTier):
    """The disk tier whose slow steps end at times drawn by chance."""

    io_class = SimulatedTierIo

    def _in_background(self, call: Call) -> None:
        loop = self._loop
        assert isinstance(loop, SimulatedLoop)
        loop.soon(loop.setting.plan.copy_s, call)


class SimulatedSeals(Seals):
    """Seals made by the loop, one job at a time."""

    loop: SimulatedLoop

    def _start(self) -> None:
        loop = self.loop

        def work() -> None:
            if not self._jobs.empty():
                job = self._jobs.get()
                if job is not None:
                    job()

        class Jobs(queue.SimpleQueue[Callable[[], None] | None]):
            def put(
                self, item: Call | None, block: bool = True, timeout: float | None = None
            ) -> None:
                super().put(item)
                loop.soon(loop.setting.plan.copy_s, work)

        self._jobs = Jobs()


class SimulatedPopulation(Population):
    """Memory that comes slot by slot."""

    loop: SimulatedLoop

    def __init__(
        self,
        arena: Arena,
        first_slot: int,
        on_piece: Callable[[int, int], None],
        on_end: Callable[[str | None], None],
    ) -> None:
        self._is_stopped = False
        self._pieces = iter(range(first_slot, arena.geometry.slot_count))
        self._on_piece = on_piece
        self._next()

    def _next(self) -> None:
        slot = None if self._is_stopped else next(self._pieces, None)
        if slot is not None:
            self._on_piece(slot, 1)
            self.loop.soon(0.05, self._next)

    def stop(self) -> None:
        self._is_stopped = True


class KeeperModel:
    """One keeper process: a tenancy of the production keeper, and whoever is attached to it."""

    def __init__(self, setting: Setting, disk: DiskModel | None) -> None:
        self.setting = setting
        self.loop = SimulatedLoop(setting)
        self.disk = disk
        self.tenancy: Tenancy | None = None
        self.channel: SimulatedChannel | None = None
        self._opened: list[OpenDisk] = []
        self.alive = True
        loop = self.loop
        io = type("Io", (SimulatedTierIo,), {"loop": loop})
        self._tenancy_class = type(
            "KeptTenancy",
            (Tenancy,),
            {
                "seals_class": type("KeptSeals", (SimulatedSeals,), {"loop": loop}),
                "population_class": type("Piecewise", (SimulatedPopulation,), {"loop": loop}),
                "disk_class": type("Disk", (SimulatedDiskTier,), {"io_class": io}),
            },
        )

    def move_in(self, hello: Hello, memory_fd: int | None) -> None:
        """An engine comes: it gets what there is, or something new."""
        if self.tenancy is not None and self.tenancy.succeed(hello):
            return
        house = Household(self.loop, self._open, lambda: None, lambda message: None, SETTLE_S)
        self.tenancy = self._tenancy_class(house, hello, memory_fd)

    def attach(self) -> SimulatedChannel:
        """Let the engine's manager in; the tenancy must be ready."""
        tenancy = self._present
        assert tenancy.is_ready
        self.channel = channel = SimulatedChannel(self.setting, self.hear)
        tenancy.attach(channel.deliver)
        return channel

    @property
    def is_ready(self) -> bool:
        return self._present.is_ready

    @property
    def _present(self) -> Tenancy:
        assert self.tenancy is not None
        return self.tenancy

    def hear(self, frame: bytes) -> None:
        """What the manager says."""
        match decode_for_keeper(frame):
            case Submit(copies):
                self._present.submit(copies)
            case Seal(slots):
                self._present.seal(slots)
            case ResetTiers(number, renewed):
                self._present.reset(number, renewed=renewed)
            case Bye():
                pass

    def detach(self) -> None:
        """The engine is gone."""
        if self.channel is not None:
            self.channel.close()
            self.channel = None

    def die(self) -> None:
        """The process ends here and now."""
        self.alive = False
        self.loop.drop_all()
        for each in self._opened:
            each.crash()
        self.detach()
        if self.tenancy is not None:
            self.tenancy.arena.close()

    def _open(self, *_: object) -> SlotStorage:
        assert self.disk is not None
        opened = OpenDisk(self.disk)
        self._opened.append(opened)
        return opened
