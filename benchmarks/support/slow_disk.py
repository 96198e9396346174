"""A disk made slow, or hung, for whatever server is started: the same for every one of them.

A small library put before libc's reads and writes (`slow_disk.c`) waits before each call on a file
below one directory. It needs a C compiler, and no rights.
"""

from __future__ import annotations

import mmap
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")


@dataclass(frozen=True)
class Slowness:
    """What every read and write is made to take; 0 bytes/s is no limit."""

    latency_s: float = 0.0
    bytes_per_s: float = 0.0

    def __str__(self) -> str:
        limit = f" {self.bytes_per_s / 1e6:g} MB/s" if self.bytes_per_s else ""
        return f"+{self.latency_s * 1e3:g} ms{limit}"


class SlowDisk:
    """The knobs of one directory's slowness."""

    def __init__(self, root: Path, work: Path) -> None:
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            raise SystemExit("this benchmark makes disks slow with a small C library: install cc")
        self._library = work / "slow_disk.so"
        subprocess.run(
            [compiler, "-O2", "-shared", "-fPIC", "-o", self._library, SOURCE, "-ldl"], check=True
        )
        control = work / "slow_disk.control"
        control.write_bytes(bytes(24))
        with control.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 24)
        self._control = control
        self._root = root
        self._slowness = Slowness()

    @contextmanager
    def in_environment(self) -> Iterator[None]:
        """Servers started inside are slowed."""
        mine = {
            "LD_PRELOAD": str(self._library),
            "SLOW_DISK_ROOT": str(self._root),
            "SLOW_DISK_CONTROL": str(self._control),
        }
        before = {name: os.environ.get(name) for name in mine}
        os.environ.update(mine)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value

    def set(self, slowness: Slowness) -> None:
        self._slowness = slowness
        self._write(hangs=False)

    def hang(self) -> None:
        """Let nothing end until `release`."""
        self._write(hangs=True)

    def release(self) -> None:
        self._write(hangs=False)

    def _write(self, *, hangs: bool) -> None:
        now = self._slowness
        self._map[:] = struct.pack("ddd", now.latency_s, now.bytes_per_s, float(hangs))
