"""The scheduler's side of the keeper: a `Driver` whose calls never wait for the disk.

What is sent waits in memory if the socket is full; what has arrived is read in `poll`. When the
keeper dies, copies under way are reported as FAILED, RAM goes on, and a thread gets a new keeper
and gives it the memory; then the disk comes back.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from math import inf
from typing import Final

import msgspec

from emberkv.domain.namespace import Namespace
from emberkv.domain.types import DISK, RAM, ChunkKey, Copy, Entry, Level, Outcome, Slot, TransferId
from emberkv.live.arena import Arena, ArenaGeometry
from emberkv.live.driver import CopyProgress, Found, Populated, Report, TierDown, TierUp
from emberkv.live.keeper.joining import Joined, Joining, Place, Rejoining
from emberkv.live.keeper.messages import (
    OUTCOMES,
    Bye,
    Down,
    FoundChunks,
    Hello,
    KeeperConfig,
    MemoryEnds,
    PopulatedSlots,
    Progress,
    ResetDone,
    ResetTiers,
    Role,
    Seal,
    Submit,
    Up,
    decode_for_client,
    encode,
    order_of,
)

RESET_S: Final = 5.0
CLOSE_S: Final = 1.0
JOIN_S: Final = 60.0
LOOK_S: Final = 0.05
"""News that nobody waits for may lie in the socket for so long. Where cores are few, a system call
in every step of the engine is an opportunity for every other process to go first."""

MAX_UNSENT_SEAL_BYTES: Final = 4 << 20
"""With more than this unsent, seals are left out: they only serve a restarted engine."""

logger = logging.getLogger(__name__)


def join(
    place: Place,
    config: KeeperConfig,
    namespace: Namespace | None = None,
    *,
    worker_count: int = 0,
    timeout_s: float = JOIN_S,
) -> KeeperClient:
    """Attach the manager of an engine, when `worker_count` of its workers are.

    Without a namespace the workers' is taken, see `KeeperClient.namespace`. Starts a keeper if
    there is none. Blocks until memory and disk are ready, `timeout_s` at most. Raises `ConfigError`
    for what the user must mend, `KeeperError` for everything else.
    """
    fields = None if namespace is None else namespace.fields
    hello = Hello(
        Role.MANAGER, place.engine_id, os.getpid(), 0, config, fields, worker_count=worker_count
    )
    joined = Joining(place, hello, timeout_s=timeout_s, may_start=True).run()
    return KeeperClient(place, hello, joined)


class _OpenCopy:
    """A copy of which some chunks have not ended."""

    __slots__ = ("is_open", "is_promotion", "left")

    def __init__(self, copy: Copy) -> None:
        self.is_open = bytearray(b"\1") * len(copy.keys)
        self.is_promotion = copy.target == RAM
        self.left = len(copy.keys)


class KeeperClient:
    """Implements `Driver`. Not thread-safe: all calls come from the scheduler's thread."""

    def __init__(
        self,
        place: Place,
        hello: Hello,
        joined: Joined,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Map the arena of an attachment, which is this object's from now on."""
        answer = joined.answer
        self._clock = clock
        self.place = place
        self.namespace = Namespace(answer.namespace)
        self.instance = joined.instance
        self.keeper_pid = answer.pid
        self.disk_failure = answer.disk_failure
        self._hello = msgspec.structs.replace(hello, namespace=answer.namespace)
        self._slot_counts = answer.slot_counts
        self._arena = Arena(joined.memory_fd, geometry_of(hello.config))
        os.close(joined.memory_fd)
        self._channel = joined.channel
        self._later = joined.later
        self._reports: list[Report] = []
        self._open: dict[TransferId, _OpenCopy] = {}
        self._promotions = 0
        self._looked_s = -inf
        self._populated = bytearray(hello.config.slot_count)
        self._ram_is_named = False
        self._disk_is_down = False
        self._reset_number = 0
        self._reset_owed = False
        self._renewed = False
        self._rejoining: Rejoining | None = None
        self._fresh: Joined | None = None
        self._has_fresh = threading.Event()
        self._closed = False

    @property
    def arena(self) -> Arena:
        return self._arena

    @property
    def slot_counts(self) -> tuple[int, ...]:
        return self._slot_counts

    def submit(self, copies: Sequence[Copy]) -> None:
        if not self._is_attached():
            for copy in copies:
                self._report_all(copy, Outcome.SHED)
            return
        for copy in copies:
            self._open[copy.transfer] = _OpenCopy(copy)
            self._promotions += copy.target == RAM
        self._channel.send(encode(Submit(tuple(map(order_of, copies)))))

    def seal(self, slots: Sequence[Slot]) -> None:
        if slots and self._channel.unsent_bytes < MAX_UNSENT_SEAL_BYTES:
            self._channel.send(encode(Seal(tuple(slots))))

    def poll(self) -> list[Report]:
        now_s = self._clock()
        if self._is_awaiting() or now_s - self._looked_s >= LOOK_S:
            self._looked_s = now_s
            self._pump()
        reports, self._reports = self._reports, []
        return reports

    def reset(self) -> bool:
        deadline_s = self._clock() + RESET_S
        self._renewed = True
        self.begin_reset()
        if not self._is_attached() and self._has_disk:
            self._await_fresh(RESET_S)
            self._pump()  # asks the new keeper for what is owed
        while self._reset_owed and self._is_attached():
            left_s = deadline_s - self._clock()
            if left_s <= 0:
                break
            self._wait(left_s)
            self._pump()
        if self._reset_owed:
            self._disk_down("the disk tier was not reset in time")
        return not self._reset_owed

    def begin_reset(self) -> None:
        self._pump()  # notices a keeper that is gone
        self._reset_number += 1
        self._reset_owed = self._has_disk
        if self._is_attached():
            self._channel.send(encode(ResetTiers(self._reset_number, self._renewed)))

    @property
    def reset_is_owed(self) -> bool:
        return self._reset_owed

    def close(self, *, clean: bool) -> None:
        if self._closed:
            return
        self._closed = True
        if self._rejoining is not None:
            self._rejoining.stop()
        if clean:
            self._channel.send(encode(Bye()))
            deadline_s = self._clock() + CLOSE_S
            while self._channel.unsent_bytes and self._clock() < deadline_s:
                self._wait(deadline_s - self._clock())
                self._channel.flush()
        self._channel.close()
        fresh, self._fresh = self._fresh, None
        if fresh is not None:
            _turn_away(fresh)
        self._arena.close()

    # ── what arrives ─────────────────────────────────────────────────────────────────────────

    @property
    def _has_disk(self) -> bool:
        return len(self._slot_counts) > 1

    def _is_attached(self) -> bool:
        return not self._channel.closed and self._rejoining is None

    def _is_awaiting(self) -> bool:
        """Whether a request, a start, a reset or the keeper itself waits for a look."""
        is_asked = bool(self._promotions) or not self._ram_is_named or self._reset_owed
        return is_asked or self._channel.unsent_bytes > 0

    def _wait(self, timeout_s: float) -> None:
        channel = self._channel
        channel.wait(timeout_s, writes=channel.unsent_bytes > 0)

    def _await_fresh(self, timeout_s: float) -> None:
        self._has_fresh.wait(timeout_s)

    def _pump(self) -> None:
        """Send what waits, and take in what has arrived."""
        if self._closed:
            return
        if self._rejoining is not None:
            self._take_fresh()
            return
        channel = self._channel
        if channel.unsent_bytes:
            channel.flush()
        frames = channel.receive()
        if self._later:
            frames, self._later = self._later + frames, []
        try:
            for frame in frames:
                self._hear(frame)
        except msgspec.MsgspecError:
            logger.exception("the keeper says what nobody understands")
            channel.close()
        if channel.closed:
            self._lost()

    def _hear(self, frame: bytes) -> None:
        message = decode_for_client(frame)
        match message:
            case Progress():
                self._progress(message)
            case FoundChunks():
                self._found(message)
            case PopulatedSlots(first, count):
                _require(first + count <= self._slot_counts[RAM], "populated slots beyond the end")
                self._populated[first : first + count] = b"\1" * count
                self._reports.append(Populated(first, count))
            case ResetDone(number, reason) if number == self._reset_number:
                self._was_reset(reason)
            case Down(level, reason) if level == DISK:
                self._disk_down(reason)
            case Up(level) if level == DISK:
                self._disk_up()
            case MemoryEnds():
                logger.error(
                    "the RAM tier stays at %d chunks: %s", message.slot_count, message.reason
                )
            case _:
                pass

    def _progress(self, message: Progress) -> None:
        transfer = TransferId(message.transfer)
        copy = self._open.get(transfer)
        if copy is None:
            return
        _require(
            message.first + len(message.codes) <= len(copy.is_open),
            "a chunk that was not asked for",
        )
        results = tuple(
            (index, OUTCOMES[code])
            for index, code in enumerate(message.codes, message.first)
            if copy.is_open[index]  # each chunk ends once, however often it is said
        )
        for index, _ in results:
            copy.is_open[index] = 0
        copy.left -= len(results)
        if not copy.left:
            del self._open[transfer]
            self._promotions -= copy.is_promotion
        if results:
            age_s = max(0.0, self._clock() - message.ended_s)
            self._reports.append(CopyProgress(transfer, results, message.busy_s, age_s))

    def _found(self, message: FoundChunks) -> None:
        level = Level(message.level)
        if level >= len(self._slot_counts):
            return  # a disk that could not be opened at our start; this keeper could
        if not all(slot < self._slot_counts[level] for _, _, slot in message.entries):
            _require(level == DISK and self._disk_is_down, "a chunk beyond the end")
            return  # of a disk that is not the one that was there before
        if level == RAM and message.last:
            self._ram_is_named = True
        # What was found before a reset is not offered any more.
        entries = () if self._reset_owed else message.entries
        self._reports.append(
            Found(
                level,
                tuple(
                    Entry(ChunkKey(key), ChunkKey(parent) if parent else None, Slot(slot))
                    for key, parent, slot in entries
                ),
                message.last,
            )
        )

    def _was_reset(self, reason: str | None) -> None:
        if reason is not None:
            self._disk_down(reason)
            self._reset_owed = self._has_disk
            return
        self._reset_owed = False
        if self._disk_is_down:
            self._disk_up()
            self._reports.append(Found(DISK, (), last=True))

    def _disk_down(self, reason: str) -> None:
        if self._has_disk and not self._disk_is_down:
            self._disk_is_down = True
            self._reports.append(TierDown(DISK, reason))

    def _disk_up(self) -> None:
        if self._has_disk and self._disk_is_down:
            self._disk_is_down = False
            self._reports.append(TierUp(DISK))

    def _report_all(self, copy: Copy, outcome: Outcome) -> None:
        results = tuple((index, outcome) for index in range(len(copy.keys)))
        self._reports.append(CopyProgress(copy.transfer, results, 0.0))

    # ── the keeper is gone ───────────────────────────────────────────────────────────────────

    def _lost(self) -> None:
        """End what was under way, and get a new keeper."""
        logger.error("the keeper (process %d) is gone: %s", self.keeper_pid, self._channel.fault)
        for transfer, copy in self._open.items():
            results = tuple(
                (index, Outcome.FAILED) for index, is_open in enumerate(copy.is_open) if is_open
            )
            self._reports.append(CopyProgress(transfer, results, 0.0))
        self._open.clear()
        self._promotions = 0
        self._disk_down("the keeper is gone; a new one is being started")
        populated_slots = self._populated.rfind(1) + 1
        # Nobody reads into a slot any more that was held back for it.
        for slot in range(populated_slots):
            if not self._populated[slot]:
                self._populated[slot] = 1
                self._reports.append(Populated(slot, 1))
        if not self._ram_is_named:
            self._ram_is_named = True
            self._reports.append(Found(RAM, (), last=True))
        hello = msgspec.structs.replace(
            self._hello,
            rejoins=True,
            populated_slots=populated_slots,
            disk_slots=self._slot_counts[DISK] if self._has_disk else None,
            reset_owed=self._reset_owed or self._renewed,
            renewed=self._renewed,
            worker_count=0,
        )
        self._has_fresh.clear()
        self._rejoining = self._rejoin(hello)

    def _rejoin(self, hello: Hello) -> Rejoining:
        return Rejoining(self.place, hello, self._arena.fd, self._joined)

    def _joined(self, joined: Joined) -> None:
        """On the thread of `Rejoining`."""
        if self._closed:
            _turn_away(joined)
            return
        self._fresh = joined
        self._has_fresh.set()

    def _take_fresh(self) -> None:
        """Go on with a new keeper, if there is one by now."""
        joined, self._fresh = self._fresh, None
        if joined is None:
            return
        self._rejoining = None
        os.close(joined.memory_fd)
        answer = joined.answer
        self._channel, self._later = joined.channel, joined.later
        self.keeper_pid, self.instance = answer.pid, joined.instance
        logger.warning("the keeper is process %d now", answer.pid)
        if self._has_disk and answer.slot_counts != self._slot_counts:
            logger.error("the disk tier stays off: %s", answer.disk_failure or "it has changed")
        elif self._reset_owed:
            self._channel.send(encode(ResetTiers(self._reset_number, self._renewed)))
        else:
            self._disk_up()
        self._pump()


def _turn_away(joined: Joined) -> None:
    """Let an attachment go that came too late."""
    joined.channel.close()
    os.close(joined.memory_fd)


def _require(is_so: bool, otherwise: str) -> None:
    """Raise what an undecodable message raises for one that can't be meant."""
    if not is_so:
        raise msgspec.ValidationError(otherwise)


def geometry_of(config: KeeperConfig) -> ArenaGeometry:
    """The arena that a configuration asks for."""
    return ArenaGeometry(config.slot_count, config.chunk_bytes)
