"""A small slab for tests of trouble: opened, refused, damaged."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from emberkv.errors import EmberError, StorageError
from emberkv.tiers.format import (
    SlabGeometry,
    StoredNamespace,
)
from emberkv.tiers.slab import Slab
from emberkv.tiers.slab_directory import SlabDirectory

CHUNK = 4096
SLOTS = 8
GEOMETRY = SlabGeometry(SLOTS, CHUNK)
SIZE = GEOMETRY.total_bytes
NAMESPACE = StoredNamespace(bytes(range(16)), {"model": "tiny", "chunk_tokens": 32})


def opened(root_dir: Path, namespace: StoredNamespace = NAMESPACE, chunk: int = CHUNK) -> Slab:
    return SlabDirectory(root_dir, SIZE).open_slab(namespace, chunk)


def open_files_below(root_dir: Path) -> list[Path]:
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            target = link.readlink()
            if target.is_relative_to(root_dir):
                found.append(target)
    return sorted(found)


def refused(root_dir: Path, message: str, kind: type[EmberError] = StorageError) -> None:
    before = open_files_below(root_dir)
    with pytest.raises(kind, match=message) as caught:
        opened(root_dir)
    assert "\n" not in str(caught.value)
    assert open_files_below(root_dir) == before


def directory_of(root_dir: Path) -> Path:
    return root_dir / NAMESPACE.directory_name


def flip(path: Path, offset: int, bit: int = 3) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (value,) = file.read(1)
        file.seek(offset)
        file.write(bytes([value ^ 1 << bit]))


@contextlib.contextmanager
def replaced(directory: Path, name: str, instead: Callable[[Path], int]) -> Iterator[None]:
    """Let this process's descriptor of a slab's file point at something else for a while."""
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            target = link.readlink()
            if target == directory / name:
                fd = int(link.name)
                break
    else:
        raise AssertionError(f"{name} is not open")
    kept, other = os.dup(fd), instead(target)
    os.dup2(other, fd)
    os.close(other)
    try:
        yield
    finally:
        os.dup2(kept, fd)
        os.close(kept)
