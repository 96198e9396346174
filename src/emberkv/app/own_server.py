"""A server of one's own: started, asked, killed, restarted, and gone when its block ends.

It listens on loopback, on a port that nobody uses, and logs to a file. Everything that is ended
here was started here: the server's process and its descendants, by their ids, and the keeper of
the server's own instance. The server also ends when the process that started it does.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import httpx

from emberkv.app import launch
from emberkv.app.metrics_page import Page
from emberkv.errors import WorldError

READY_S: Final = 900.0
STOP_S: Final = 30.0
SETTLE_S: Final = 120.0
_POLL_S: Final = 0.2
_LOG_LINES: Final = 40
_PLACE_FLAGS: Final = ("--host", "--port", "--uds", "--api-key", "--ssl-keyfile", "--ssl-certfile")
_KEEPER_MODULES: Final = (b"emberkv.live.keeper", b"emberkv.drills.keeper")


class ServerError(WorldError):
    """A server did not come up, died or does not answer; its log's last lines are in it."""


def free_port() -> int:
    """A TCP port of loopback that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ServerProcess:
    """One server's process tree, listening on a port of loopback, logging to a file."""

    def __init__(
        self,
        command: list[str],
        port: int,
        log: Path,
        environment: Callable[[], dict[str, str]],
    ) -> None:
        """`environment` is asked for at each start."""
        self.command = command
        self.port = port
        self.log = log
        self._environment = environment
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

    def start(self, while_waiting: Callable[[], None] = lambda: None) -> float:
        """Start and wait until it is ready; returns the seconds that took.

        To be called on a thread that lives as long as the server shall. Raises `ServerError`.
        """
        began_s = time.monotonic()
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "emberkv.app.leash", *self.command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment(),
                start_new_session=True,
            )
        while not self.is_healthy():
            if self._process.poll() is not None:
                raise ServerError(
                    f"the server ended with {self._process.returncode}\n{self.tail()}"
                )
            if time.monotonic() - began_s > READY_S:
                raise ServerError(f"the server was not ready in {READY_S:.0f} s\n{self.tail()}")
            while_waiting()
            time.sleep(_POLL_S)
        return time.monotonic() - began_s

    def is_healthy(self) -> bool:
        """Whether the server says that it is ready."""
        try:
            return httpx.get(f"{self.url}/health", trust_env=False, timeout=5).is_success
        except httpx.HTTPError:
            return False

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


class OwnServer:
    """A server with the user's layout, in a `with` block, and what can be done to it.

    Its instance, request log and disk directory are its own, below `directory`; sizes, chunks and
    the engine's flags are the user's. `spec` is for drills. `plain` leaves the tiers out.
    """

    def __init__(
        self,
        options: launch.ServeOptions,
        directory: Path,
        *,
        spec: tuple[str, str] = (launch.SPEC, launch.SPEC_MODULE),
        environment: Mapping[str, str] | None = None,
        plain: bool = False,
    ) -> None:
        """Check what was asked for; raises `UsageError` for what can't work."""
        self.instance = f"own-{uuid.uuid4().hex[:12]}"
        self.request_log = directory / f"{self.instance}.jsonl"
        self.disk = None if options.disk is None else directory / "disk"
        if self.disk is not None:
            self.disk.mkdir(exist_ok=True)
        self.options = replace(
            options, instance=self.instance, request_log=self.request_log, disk=self.disk
        )
        port = free_port()
        surroundings = _environment(environment or {})
        flags = ("--host", "127.0.0.1", "--port", str(port))
        started = replace(
            self.options, vllm_arguments=(*_without_place(options.vllm_arguments), *flags)
        )
        launch.check(started, surroundings)
        arguments = ["serve", options.model, *started.vllm_arguments]
        if not plain:
            arguments = launch.vllm_arguments(started, surroundings, spec)
        name = "plain" if plain else "tiers"
        log = directory / f"{name}.log"
        self.process = ServerProcess(
            launch.engine_command(arguments), port, log, lambda: surroundings
        )
        self.plain = plain

    @property
    def url(self) -> str:
        return self.process.url

    def __enter__(self) -> Self:
        try:
            self.process.start()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    def page(self) -> Page:
        """The metrics as they stand. Raises `ServerError`."""
        return Page(self._call("GET", "/metrics").text)

    def reset_device(self) -> None:
        """Empty the device's cache and no tier, as soon as nothing holds its blocks."""
        self.wait_until(
            lambda: bool(self._call("POST", "/reset_prefix_cache").json()["success"]),
            "the device's cache could be reset",
        )

    def empty_ram(self) -> None:
        """Empty the RAM tier and leave the disk: by a stop, the end of the keeper, and a start."""
        self.process.stop()
        kill_keeper(self.instance)
        self.process.start()

    def restart_after_kill(self) -> None:
        """SIGKILL the server, leave the keeper alone, and start again."""
        self.process.kill()
        self.process.start()

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Ask again and again. Raises `ServerError` if it is not so in `SETTLE_S`."""
        deadline_s = time.monotonic() + SETTLE_S
        while not condition():
            if time.monotonic() > deadline_s:
                raise ServerError(
                    f"it took more than {SETTLE_S:.0f} s until {what}\n{self.process.tail()}"
                )
            time.sleep(_POLL_S / 4)

    def end(self) -> None:
        """End everything that this server started; may be called twice."""
        self.process.stop()
        kill_keeper(self.instance)

    def _call(self, method: str, path: str) -> httpx.Response:
        try:
            return httpx.request(
                method, self.url + path, timeout=60, trust_env=False
            ).raise_for_status()
        except httpx.HTTPError as error:
            raise ServerError(f"{path}: {error!r}\n{self.process.tail()}") from error


def _without_place(arguments: tuple[str, ...]) -> tuple[str, ...]:
    """The user's flags without those that say where and to whom a server answers."""
    kept: list[str] = []
    skips = False
    for argument in arguments:
        if skips:
            skips = False
        elif argument.partition("=")[0] in _PLACE_FLAGS:
            skips = "=" not in argument
        else:
            kept.append(argument)
    return tuple(kept)


def _environment(more: Mapping[str, str]) -> dict[str, str]:
    """The user's, and vLLM's development routes, of which `/reset_prefix_cache` is one."""
    own = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONUNBUFFERED": "1"}
    environment = {**os.environ, **own, **more}
    environment.pop("VLLM_API_KEY", None)  # only this program asks
    return environment


def process_tree(root: int) -> list[int]:
    """A process and all its descendants that live now; empty if it is gone."""
    children: dict[int, list[int]] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # ended meanwhile
        if fields[0] != "Z":
            children.setdefault(int(fields[1]), []).append(int(status.parent.name))
    alive = {pid for pids in children.values() for pid in pids}
    found = [root] if root in alive else []
    for pid in found:
        found += children.get(pid, [])
    return found


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
        if instance.encode() in arguments and not set(_KEEPER_MODULES).isdisjoint(arguments):
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
        with suppress(ProcessLookupError):
            os.kill(pid, how)
    deadline_s = time.monotonic() + STOP_S
    while any(process_tree(pid) for pid in pids):
        if time.monotonic() > deadline_s:
            raise ServerError(f"processes {pids} don't end")
        time.sleep(_POLL_S)
