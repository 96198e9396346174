"""Starts, kills and stops a server as its own processes, and finds the keeper behind it.

Everything that is ended here was started here: the server's process and its descendants, by their
ids, and the keeper of this demo's own instance.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from demo.client import Client
from demo.measures import process_tree

READY_S: Final = 300.0
STOP_S: Final = 30.0
_POLL_S: Final = 0.2
_LOG_LINES: Final = 40


class ServerError(Exception):
    """A server did not come up, or died; its log's last lines are in the message."""


def free_port() -> int:
    """A TCP port of loopback that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """One server process tree, listening on loopback, logging to a file."""

    def __init__(self, command: list[str], port: int, log: Path) -> None:
        self.command = command
        self.port = port
        self.log = log
        self.client = Client(self.url)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def running(self) -> bool:
        return self._process is not None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self, while_waiting: Callable[[], None]) -> float:
        """Start and wait until it is ready; returns the seconds that took."""
        began_s = time.monotonic()
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=_environment(),
                start_new_session=True,
            )
        while not self.client.healthy():
            if self._process.poll() is not None:
                raise ServerError(
                    f"the server ended with {self._process.returncode}\n{self.tail()}"
                )
            if time.monotonic() - began_s > READY_S:
                raise ServerError(f"the server was not ready in {READY_S:.0f} s\n{self.tail()}")
            while_waiting()
            time.sleep(_POLL_S)
        return time.monotonic() - began_s

    def kill(self) -> list[int]:
        """SIGKILL the server and everything it started, except the keeper; returns the ids."""
        if self._process is None:
            return []
        # The keeper is in a session of its own and nobody's descendant.
        pids = process_tree(self._process.pid)
        end_processes(pids, signal.SIGKILL)
        self._process.wait()
        self._process = None
        return pids

    def stop(self) -> None:
        """SIGTERM, as an operator stops a server; what is left after a while is killed."""
        if self._process is None:
            return
        pids = process_tree(self._process.pid)
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
        end_processes(pids, signal.SIGKILL)
        self._process.wait()
        self._process = None

    def tail(self) -> str:
        """The last lines of the log."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join([f"── {self.log}", *lines[-_LOG_LINES:]])


def find_keeper(instance: str) -> int | None:
    """The process id of an instance's keeper; None if there is none.

    Of the keeper's processes (its disk I/O runs in a child) it is the one without such a parent.
    """
    found: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (entry / "cmdline").read_bytes().split(b"\0")
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # ended meanwhile
        if b"emberkv.live.keeper" in arguments and instance.encode() in arguments:
            found[int(entry.name)] = parent
    roots = [pid for pid, parent in found.items() if parent not in found]
    return min(roots) if roots else None


def kill_keeper(instance: str) -> int | None:
    """SIGKILL an instance's keeper and its children; returns its id, None if there was none."""
    keeper = find_keeper(instance)
    if keeper is not None:
        end_processes(process_tree(keeper), signal.SIGKILL)
    return keeper


def end_processes(pids: list[int], how: signal.Signals) -> None:
    """Signal processes and wait until each is gone. Raises `ServerError` if one stays."""
    for pid in pids:
        try:
            os.kill(pid, how)
        except ProcessLookupError:
            continue
    deadline_s = time.monotonic() + STOP_S
    while any(process_tree(pid) for pid in pids):
        if time.monotonic() > deadline_s:
            raise ServerError(f"processes {pids} don't end")
        time.sleep(_POLL_S)


def _environment() -> dict[str, str]:
    """The user's, without network look-ups, and with the least KV space that vLLM takes."""
    return {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }
