"""The manager's side of the keeper, told things that keepers seldom say."""

from __future__ import annotations

import os

from emberkv.domain.types import DISK, RAM, ChunkKey, Copy, Entry, Outcome, Slot, TransferId
from emberkv.live.arena import ArenaGeometry, create_memory
from emberkv.live.driver import CopyProgress, Found, TierDown, TierUp
from emberkv.live.keeper.client import LOOK_S, KeeperClient
from emberkv.live.keeper.joining import Joined, Place
from emberkv.live.keeper.messages import (
    OUTCOME_CODES,
    Attached,
    Down,
    Hello,
    KeeperConfig,
    Message,
    Progress,
    Role,
    Up,
    encode,
    found,
)
from emberkv.testing.fault_simulator.setting import Seen, Setting, WorldPlan
from emberkv.testing.fault_simulator.wire import SimulatedChannel

SLOTS = 8
CHUNK_BYTES = 64
OK, FAILED = OUTCOME_CODES[Outcome.OK], OUTCOME_CODES[Outcome.FAILED]


class Wire:
    """A client, and what a keeper says to it."""

    def __init__(self, *slot_counts: int) -> None:
        setting = Setting(WorldPlan.of_seed(0), Seen())
        setting.quiet = True
        self._channel = SimulatedChannel(setting, lambda frame: None)
        fd = create_memory(ArenaGeometry(SLOTS, CHUNK_BYTES))
        hello = Hello(Role.MANAGER, "engine", 1, 0, KeeperConfig(SLOTS, CHUNK_BYTES), ())
        answer = Attached(os.getpid(), (), slot_counts, False, None)
        self.now_s = 0.0
        self.client = KeeperClient(
            Place("here", "engine"),
            hello,
            Joined(self._channel, answer, fd, "here", []),
            clock=lambda: self.now_s,
        )

    def say(self, *messages: Message) -> None:
        for message in messages:
            self._channel.deliver(encode(message))

    def hang_up(self) -> None:
        self._channel.close()


def a_copy(chunks: int) -> Copy:
    keys = tuple(ChunkKey(b"k%d" % at) for at in range(chunks))
    slots = tuple(map(Slot, range(chunks)))
    return Copy(TransferId(7), DISK, RAM, keys, (None, *keys[:-1]), slots, slots)


def test_a_chunk_ends_once_however_often_it_is_said() -> None:
    wire = Wire(SLOTS, SLOTS)
    wire.client.submit([a_copy(4)])
    wire.say(
        Progress(7, 0, bytes([OK, OK]), 0.1, 0.0),
        Progress(7, 0, bytes([OK, OK]), 0.1, 0.0),
        Progress(7, 1, bytes([FAILED, FAILED, OK]), 0.1, 0.0),
        Progress(7, 3, bytes([OK]), 0.1, 0.0),
    )
    reports = [each for each in wire.client.poll() if isinstance(each, CopyProgress)]
    assert [each.results for each in reports] == [
        ((0, Outcome.OK), (1, Outcome.OK)),
        ((2, Outcome.FAILED), (3, Outcome.OK)),
    ]
    wire.client.close(clean=False)


def test_a_disk_that_this_engine_does_not_have_names_nothing() -> None:
    wire = Wire(SLOTS)
    entry = Entry(ChunkKey(b"k"), None, Slot(0))
    wire.say(found(DISK, [entry], last=True), found(RAM, (), last=True))
    assert wire.client.poll() == [Found(RAM, (), last=True)]
    wire.client.close(clean=False)


def test_news_are_looked_for_at_once_only_where_somebody_waits() -> None:
    wire = Wire(SLOTS, SLOTS)
    wire.say(found(RAM, (), last=True))
    wire.client.poll()
    wire.say(Down(DISK, "a fault"))
    assert wire.client.poll() == []
    wire.now_s += LOOK_S
    assert wire.client.poll() == [TierDown(DISK, "a fault")]
    wire.client.submit([a_copy(1)])
    wire.say(Progress(7, 0, bytes([OK]), 0.1, 0.0))
    (report,) = wire.client.poll()
    assert isinstance(report, CopyProgress)
    wire.say(Up(DISK, 8))
    assert wire.client.poll() == []
    wire.now_s += LOOK_S
    assert wire.client.poll() == [TierUp(DISK)]
    wire.client.close(clean=False)


def test_a_keeper_that_is_gone_ends_the_promotions_under_way_at_the_next_look() -> None:
    wire = Wire(SLOTS, SLOTS)
    wire.say(found(RAM, (), last=True))
    wire.client.poll()
    wire.client.submit([a_copy(2)])
    wire.hang_up()
    reports = wire.client.poll()
    assert CopyProgress(TransferId(7), ((0, Outcome.FAILED), (1, Outcome.FAILED)), 0.0) in reports
    wire.client.close(clean=False)
