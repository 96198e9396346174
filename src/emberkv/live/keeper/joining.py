"""How a process of an engine gets attached to a keeper, starting one if there is none.

Scheduler and workers of an engine must end up at the same keeper. All look first for the keeper
of their engine alone, then for the instance's; a keeper that has turned an engine away turns all
of it away. So it is the instance's for all of them, or the engine's own for all of them.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from emberkv.config import require_instance
from emberkv.errors import ConfigError, EmberError, KeeperError
from emberkv.live.keeper.address import (
    KEEPER_MODULE,
    StartedKeeper,
    own_instance,
    try_connect,
    try_start,
)
from emberkv.live.keeper.channel import Channel
from emberkv.live.keeper.messages import (
    Attached,
    Hello,
    Refusal,
    Refused,
    Role,
    decode_for_client,
    decode_for_keeper,
    encode,
)

PAUSE_S: Final = 0.02
LOOK_AROUND_S: Final = 0.25
FIRST_PAUSE_S: Final = 0.5
LAST_PAUSE_S: Final = 30.0
MAX_STARTS: Final = 3
"""A keeper that ends at once will do so again."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Place:
    """Where an engine's keeper is: the instance, and whose it is.

    `log_path` is the keeper's; `keeper_module` is run to start one.
    """

    instance: str
    engine_id: str
    log_path: Path | None = None
    keeper_module: str = KEEPER_MODULE

    def __post_init__(self) -> None:
        require_instance(self.instance)
        if not self.engine_id:
            raise ConfigError("engine_id must not be empty")

    @property
    def own(self) -> str:
        """The instance that only this engine uses."""
        return own_instance(self.instance, self.engine_id)


@dataclass(frozen=True, slots=True)
class Joined:
    """An attachment: the socket, its answer, the memory's descriptor (the receiver's to close).

    Frames that came after the answer are in `later`.
    """

    channel: Channel
    answer: Attached
    memory_fd: int
    instance: str
    later: list[bytes]


class Joining:
    """One attempt to be attached, with a deadline. `may_start` a keeper if there is none."""

    def __init__(self, place: Place, hello: Hello, *, timeout_s: float, may_start: bool) -> None:
        _require_sayable(hello)
        self._place = place
        self._hello = hello
        self._timeout_s = timeout_s
        self._deadline_s = time.monotonic() + timeout_s
        self._may_start = may_start
        self._turned_away = False
        self._started: list[StartedKeeper] = []
        self._last_fault = "no keeper answers"

    def run(self, memory_fd: int | None = None) -> Joined:
        """Be attached. `memory_fd` is handed to the keeper and stays the caller's.

        Raises `ConfigError` if the keeper says that the user must mend something, `KeeperError`
        for everything else.
        """
        try:
            while time.monotonic() < self._deadline_s and len(self._started) <= MAX_STARTS:
                found = self._connect()
                if found is not None:
                    joined = self._ask(*found, memory_fd)
                    if joined is not None:
                        return joined
                time.sleep(PAUSE_S)
        finally:
            for started in self._started:
                started.close()
        raise KeeperError(
            f"not attached to the keeper of instance '{self._place.instance}' within "
            f"{self._timeout_s:g} s: {self._last_fault}"
        )

    def _connect(self) -> tuple[socket.socket, str] | None:
        own = self._place.own
        sock = try_connect(own)
        if sock is not None:
            return sock, own
        instance = own if self._turned_away else self._place.instance
        sock = None if self._turned_away else try_connect(instance)
        if sock is None and self._may_start:
            started = try_start(instance, self._place.log_path, self._place.keeper_module)
            if started is not None:
                self._started.append(started)
            sock = try_connect(instance)
        return None if sock is None else (sock, instance)

    def _ask(self, sock: socket.socket, instance: str, memory_fd: int | None) -> Joined | None:
        """Say Hello and wait for the answer; None if it is worth another try."""
        channel = Channel(sock, takes_descriptors=True)
        hello = self._hello
        if instance == self._place.own:
            config = msgspec.structs.replace(hello.config, keep_s=0.0)  # nobody will look for it
            hello = msgspec.structs.replace(hello, config=config)
        channel.send(encode(hello), memory_fd)
        frames: list[bytes] = []
        while not frames and not channel.closed:
            if time.monotonic() > self._deadline_s or self._should_move(instance):
                self._last_fault = _waits_for(hello)
                channel.close()
                return None
            channel.wait(LOOK_AROUND_S, writes=channel.unsent_bytes > 0)
            channel.flush()
            frames = channel.receive()
        if not frames:
            complaints = self._started[-1].complaints() if self._started else ""
            self._last_fault = complaints or channel.fault
            return None
        return self._answered(channel, frames, instance)

    def _answered(self, channel: Channel, frames: list[bytes], instance: str) -> Joined | None:
        try:
            answer = decode_for_client(frames[0])
        except msgspec.MsgspecError as error:
            channel.close()
            raise KeeperError(f"the keeper says what nobody understands: {error}") from error
        if isinstance(answer, Attached) and _fits(answer, self._hello):
            memory_fd = channel.take_descriptor()
            if memory_fd is not None:
                return Joined(channel, answer, memory_fd, instance, frames[1:])
        channel.close()
        if not isinstance(answer, Refused):
            raise KeeperError(f"the keeper answers Hello with {type(answer).__name__}")
        self._last_fault = answer.reason
        match answer.refusal:
            case Refusal.CONFIG:
                raise ConfigError(answer.reason)
            case Refusal.WORLD:
                raise KeeperError(answer.reason)
            case Refusal.SECOND_ENGINE:
                if not self._turned_away and instance != self._place.own:
                    logger.warning("%s; this engine gets a keeper of its own", answer.reason)
                self._turned_away = True
            case Refusal.ENDING:
                pass
        return None

    def _should_move(self, instance: str) -> bool:
        """Whether the rest of the engine is at a keeper of its own by now."""
        own = self._place.own
        if instance == own:
            return False
        probe = try_connect(own)
        if probe is None:
            return False
        probe.close()
        return True


def _require_sayable(hello: Hello) -> None:
    """Raise `ConfigError` for what a keeper would not even read."""
    try:
        decode_for_keeper(encode(hello))
    except (msgspec.MsgspecError, OverflowError) as error:
        raise ConfigError(f"no keeper can be asked for this configuration: {error}") from error


def _fits(answer: Attached, hello: Hello) -> bool:
    """Whether a keeper gives what was asked for: so many rows, and no disk unasked."""
    ram_slots, *disk_slots = answer.slot_counts
    return ram_slots == hello.config.slot_count and (
        hello.config.disk is not None or not disk_slots
    )


def _waits_for(hello: Hello) -> str:
    if hello.role is Role.MANAGER:
        return f"its {hello.worker_count} workers are not all attached, or memory or disk not ready"
    return "the keeper does not answer"


class Rejoining:
    """Gets a process attached again after its keeper died, on a thread, however long it takes.

    `on_joined` is called on that thread, once.
    """

    def __init__(
        self,
        place: Place,
        hello: Hello,
        memory_fd: int,
        on_joined: Callable[[Joined], None],
    ) -> None:
        """Begin. Only a manager, which knows how much memory is populated, starts a keeper."""
        self._place = place
        self._hello = hello
        self._memory_fd = os.dup(memory_fd)
        self._on_joined = on_joined
        self._stopped = threading.Event()
        threading.Thread(target=self._run, name="emberkv-rejoin", daemon=True).start()

    def stop(self) -> None:
        """Try no more; an attempt under way may still end in `on_joined`."""
        self._stopped.set()

    def _run(self) -> None:
        try:
            self._try_on()
        finally:
            os.close(self._memory_fd)

    def _try_on(self) -> None:
        is_manager = self._hello.role is Role.MANAGER
        pause_s = FIRST_PAUSE_S
        while not self._stopped.is_set():
            joining = Joining(self._place, self._hello, timeout_s=30.0, may_start=is_manager)
            try:
                joined = joining.run(self._memory_fd if is_manager else None)
            except EmberError as error:
                logger.warning("no new keeper yet: %s", error)
                self._stopped.wait(pause_s)
                pause_s = min(2 * pause_s, LAST_PAUSE_S)
                continue
            self._on_joined(joined)
            return
