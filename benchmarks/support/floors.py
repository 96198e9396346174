"""Floors: what the machine itself takes to move as many bytes."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import subprocess
from pathlib import Path

from support.timing import seconds

READ_JOBS = 8
"""As many as the keeper reads with."""


class MemcpyFloor:
    """A plain memcpy, by one thread, from a shared and populated memfd to private memory."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        memory = os.memfd_create("memcpy-floor")
        os.ftruncate(memory, size_bytes)
        self._maps = mmap.mmap(memory, size_bytes), mmap.mmap(-1, size_bytes)
        os.close(memory)
        for each in self._maps:
            each[:] = b"\1" * size_bytes
        self._addresses = [ctypes.addressof(ctypes.c_char.from_buffer(each)) for each in self._maps]

    def measure_s(self) -> float:
        """Seconds of one copy."""
        source, target = self._addresses
        return seconds(lambda: ctypes.memmove(target, source, self._size_bytes))


class FioFloor:
    """Fio reading so many bytes directly, in blocks of one chunk, with as many jobs as we have."""

    def __init__(self, directory: Path, chunks: int, chunk_bytes: int) -> None:
        per_job = -(-chunks // READ_JOBS)
        self._words = [
            "fio", "--name=floor", f"--filename={directory / 'fio.data'}", "--direct=1",
            f"--bs={chunk_bytes}", "--ioengine=psync", "--thread", f"--numjobs={READ_JOBS}",
            f"--size={per_job * chunk_bytes}", f"--offset_increment={per_job * chunk_bytes}",
            "--group_reporting", "--output-format=json",
        ]  # fmt: skip
        self._bytes = chunks * chunk_bytes
        self._run("write")

    def measure_s(self) -> float:
        """Seconds for all the bytes, at the rate that fio reports; its start is not counted."""
        return self._bytes / self._run("read")

    def _run(self, operation: str) -> float:
        words = [*self._words, f"--rw={operation}"]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        rate: float = json.loads(done.stdout)["jobs"][0][operation]["bw_bytes"]
        return rate
