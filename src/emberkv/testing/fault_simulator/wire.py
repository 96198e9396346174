"""The socket between manager and keeper, and the manager's production side of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from emberkv.live.keeper.channel import Channel
from emberkv.live.keeper.client import KeeperClient
from emberkv.live.keeper.joining import Joined, Place, Rejoining
from emberkv.live.keeper.messages import Down, Hello, Progress, decode_for_client
from emberkv.testing.fault_simulator.disk import SCAN_FAILURE
from emberkv.testing.fault_simulator.setting import Fault, Setting


class SimulatedChannel(Channel):
    """The manager's end. What is sent is heard at once; what arrives may have been held up."""

    def __init__(self, setting: Setting, hear: Callable[[bytes], None]) -> None:
        self._setting = setting
        self._hear = hear
        self._arrived: deque[bytes] = deque()
        self._again: list[bytes] = []
        self.closed = False
        self.fault = "the process is gone"
        self.unsent_bytes = 0

    def fileno(self) -> int:
        raise NotImplementedError("there is no descriptor")

    def send(self, payload: bytes, descriptor: int | None = None) -> None:
        if not self.closed:
            self._hear(payload)

    def flush(self) -> None:
        """Nothing ever waits."""

    def deliver(self, frame: bytes) -> None:
        """Have a frame arrive."""
        if self.closed:
            return
        self._arrived.append(frame)
        message = decode_for_client(frame)
        if isinstance(message, Down) and message.reason != SCAN_FAILURE:
            self._setting.seen.note(Fault.DISK_DOES_NOT_SETTLE)
        if isinstance(message, Progress) and self._setting.strikes(Fault.REPORT_TWICE, 0.03):
            again = self._arrived if self._setting.chance.random() < 0.5 else self._again
            again.append(frame)

    def receive(self) -> list[bytes]:
        """What has arrived, in order, perhaps not all of it yet."""
        count = len(self._arrived)
        if count > 1 and self._setting.strikes(Fault.REPORTS_HELD_UP, 0.2):
            count = self._setting.chance.randrange(count)
        frames = [self._arrived.popleft() for _ in range(count)]
        if not self._arrived and self._again:
            self._arrived.extend(self._again)
            self._again.clear()
        return frames

    def close(self) -> None:
        self.closed = True
        self._arrived.clear()


class SimulatedRejoining(Rejoining):
    """Waits for a new keeper without a thread."""

    def __init__(self, hello: Hello, memory_fd: int, on_joined: Callable[[Joined], None]) -> None:
        self.hello = hello
        self.memory_fd = memory_fd
        self._on_joined = on_joined
        self.stopped = False

    def stop(self) -> None:
        self.stopped = True

    def end(self, joined: Joined) -> None:
        """A keeper is found, as happens once."""
        self.stopped = True
        self._on_joined(joined)


class SimulatedClient(KeeperClient):
    """The production client, whose waits pass virtual time.

    `wait(timeout_s)` lets the world go on for a moment while a call is waiting.
    """

    def __init__(
        self,
        setting: Setting,
        hello: Hello,
        joined: Joined,
        wait: Callable[[float], None],
        wait_for_fresh: Callable[[float], None],
    ) -> None:
        super().__init__(Place("simulated", "engine"), hello, joined, clock=setting.clock)
        self._pass_time = wait
        self._pass_time_without = wait_for_fresh

    @property
    def rejoining(self) -> SimulatedRejoining | None:
        """The search for a new keeper, while there is none."""
        assert self._rejoining is None or isinstance(self._rejoining, SimulatedRejoining)
        return self._rejoining

    def _wait(self, timeout_s: float) -> None:
        self._pass_time(timeout_s)

    def _await_fresh(self, timeout_s: float) -> None:
        self._pass_time_without(timeout_s)

    def _rejoin(self, hello: Hello) -> Rejoining:
        return SimulatedRejoining(hello, self._arena.fd, self._joined)
