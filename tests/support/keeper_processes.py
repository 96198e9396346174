"""Keepers and stand-ins for engine processes, started, told what to do, and killed by tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from emberkv.live.keeper.messages import Status
from emberkv.live.keeper.status import ask_status, find_keepers

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src"
DEADLINE_S = 60
CHUNK_BYTES = 8192
SLOTS = 32
NAMES = [f"chunk-{at}" for at in range(6)]


def until(condition: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Wait for a condition; fail, naming it, if it does not come."""
    end_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end_s, f"not within {deadline_s} s: {what}"
        time.sleep(0.005)


def is_running(pid: int) -> bool:
    """Whether a process still has memory: it exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def gone(pid: int) -> None:
    """Wait until a process has ended."""
    until(lambda: not is_running(pid), f"process {pid} ends")


def holders_of(inode: int) -> list[int]:
    """The processes that hold a memfd, by descriptor or mapping: it is memory while any does."""
    found = []
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        with suppress(OSError):
            if _holds(process, inode):
                found.append(int(process.name))
    return found


def _holds(process: Path, inode: int) -> bool:
    for line in (process / "maps").read_text().splitlines():
        if "memfd:emberkv-arena" in line and int(line.split()[4]) == inode:
            return True
    for entry in (process / "fd").iterdir():
        with suppress(OSError):
            if "memfd:emberkv-arena" in os.readlink(entry) and os.stat(entry).st_ino == inode:
                return True
    return False


class Process:
    """A stand-in process. A command that fails there fails here, unless `fails` says so."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, HERE / "stand_in.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(SOURCE)},
        )
        self.pid = self._process.pid

    def tell(self, do: str, **arguments: Any) -> None:
        """Give a command without waiting for its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        ready = wait([self._process.stdout], DEADLINE_S)
        assert ready, "the stand-in does not answer"
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        return found

    def do(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Give a command; its answer."""
        self.tell(do, **arguments)
        answer = self.answer()
        assert "error" not in answer, answer["error"]
        return answer

    def fails(self, do: str, **arguments: Any) -> str:
        """Give a command that must fail; the error."""
        self.tell(do, **arguments)
        return str(self.answer()["error"])

    def kill(self) -> None:
        """End it by SIGKILL; returns when it is gone."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()


class Stage:
    """What one test plays with: an instance of its own, and every process it has started."""

    def __init__(self, tmp_path: Path) -> None:
        self.instance = f"test-{os.getpid()}-{time.monotonic_ns()}"
        self.disk_dir = tmp_path / "disk"
        self.disk_dir.mkdir(parents=True)
        self.log = tmp_path / "keeper.log"
        self.gate = tmp_path / "gate"
        self.config: dict[str, Any] = {
            "slot_count": SLOTS,
            "chunk_bytes": CHUNK_BYTES,
            "keep_s": 600.0,
        }
        self.namespace: dict[str, str] | None = {"model": "m", "dtype": "float32"}
        self._processes: list[Process] = []
        self._keepers: list[subprocess.Popen[str]] = []
        self._keeper_pids: set[int] = set()

    def with_disk(self, **settings: Any) -> Stage:
        """Ask for a disk tier from now on."""
        disk = {"root_dir": str(self.disk_dir), "size_bytes": 100 * (CHUNK_BYTES + 4096)}
        self.config["disk"] = disk | settings
        return self

    def hanging_keeper(self) -> int:
        """Start a keeper whose disk has gates, before anyone else does; its pid."""
        keeper = subprocess.Popen(
            [sys.executable, HERE / "hanging_keeper.py", self.instance, self.gate, self.log],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(SOURCE)},
        )
        self._keepers.append(keeper)
        assert keeper.stdout is not None
        assert keeper.stdout.readline() == "ready\n"
        return keeper.pid

    def shut(self, name: str) -> None:
        """Let every call of this name hang from now on."""
        os.mkfifo(self.gate.with_suffix(f".{name}"))

    def open(self, name: str) -> None:
        """Let all that hang go on."""
        gate, opened = self.gate.with_suffix(f".{name}"), self.gate.with_suffix(f".{name}-opened")
        gate.rename(opened)
        os.close(os.open(opened, os.O_RDWR))  # a writer: every sleeping reader's open returns
        opened.unlink()

    def process(self) -> Process:
        self._processes.append(Process())
        return self._processes[-1]

    def join(self, process: Process, roles: list[str], engine: str, **options: Any) -> Any:
        answer = process.do("join", **self.join_arguments(roles, engine, **options))
        self._keeper_pids.add(answer.get("keeper_pid", 0))
        return answer

    def join_arguments(self, roles: list[str], engine: str, **options: Any) -> dict[str, Any]:
        return {
            "roles": roles,
            "instance": self.instance,
            "engine_id": engine,
            "config": self.config,
            "namespace": self.namespace,
            "options": {"log": str(self.log), **options},
        }

    def engine(self, name: str, **options: Any) -> tuple[Process, dict[str, Any]]:
        """One process that is worker and manager, attached."""
        process = self.process()
        return process, self.join(process, ["worker", "manager"], name, **options)

    def status(self) -> Status | None:
        return ask_status(self.instance)

    def listeners(self) -> list[str]:
        """Instances of this test that are listened for."""
        return [k.instance for k in find_keepers() if k.instance.startswith(self.instance)]

    def end(self) -> None:
        for process in self._processes:
            process.kill()
        for info in find_keepers():
            if info.instance.startswith(self.instance) and info.status is not None:
                self._keeper_pids.add(info.status.pid)
        for pid in self._keeper_pids - {0}:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for keeper in self._keepers:
            keeper.kill()
            keeper.wait()
            assert keeper.stdout is not None
            keeper.stdout.close()


@contextmanager
def stage(tmp_path: Path) -> Iterator[Stage]:
    """A stage whose every process is gone afterwards."""
    opened = Stage(tmp_path)
    try:
        yield opened
    finally:
        opened.end()
