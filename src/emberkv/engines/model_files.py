"""The files of a model on local disk: where they are, how large, and which content they have.

A digest of all weights would take minutes for a large model and only prove what two cheaper things
show: the name, size and time of every file, and a sample of its bytes. The sample holds the whole
header of a safetensors file (names, types and shapes), the middle of its tensors and evenly spread
ranges, so that new values under an old size and time are seen as well.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from emberkv.errors import StorageError

SAMPLE_BYTES: Final = 4096
SAMPLES_PER_MODEL: Final = 1024
MIN_SAMPLES_PER_FILE: Final = 16
READ_WHOLE_BYTES: Final = 64 << 20
MAX_HEADER_BYTES: Final = 100 << 20

SAFETENSORS: Final = ".safetensors"
WEIGHT_SUFFIXES: Final = (SAFETENSORS, ".bin", ".pt")
"""In the order in which a loader that takes any of them prefers them."""

# Says nothing of what the model computes from given tokens.
_TOKENIZER_FILES: Final = frozenset(
    {
        "added_tokens.json",
        "chat_template.json",
        "generation_config.json",
        "merges.json",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.json",
    }
)
_HUB_SNAPSHOT: Final = re.compile(r"models--(?P<name>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})/?$")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A model's directory on local disk; `revision` is its commit if the hub's cache holds it."""

    name: str
    directory: Path
    revision: str | None = None


def find_snapshot(
    model: str, revision: str | None = None, cache_dir: str | None = None
) -> Snapshot | None:
    """The local directory of a model given by path or hub name; None if there is none.

    Asks no network: a hub name is looked up in the local cache only. The same snapshot gets the
    same name, whether the model was given by its hub name or by its place in the cache.
    """
    directory = Path(model).absolute() if Path(model).is_dir() else None
    if directory is None:
        directory = _cached_on_hub(model, revision, cache_dir)
    if directory is None:
        return None
    from_hub = _HUB_SNAPSHOT.search(str(directory))
    if from_hub:
        return Snapshot(from_hub["name"].replace("--", "/"), directory, from_hub["commit"])
    return Snapshot(model, directory)


def _cached_on_hub(model: str, revision: str | None, cache_dir: str | None) -> Path | None:
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        return None
    for name in ("config.json", "params.json"):
        try:
            found = try_to_load_from_cache(model, name, cache_dir=cache_dir, revision=revision)
        except HFValidationError:
            return None
        if isinstance(found, str):
            return Path(found).parent
    return None


def weight_files(directory: Path, suffixes: Sequence[str] = WEIGHT_SUFFIXES) -> tuple[Path, ...]:
    """The weight files a loader would take: those of the first suffix of which there are any."""
    for suffix in suffixes:
        found = sorted(path for path in directory.glob(f"*{suffix}") if path.is_file())
        if found:
            return tuple(found)
    return ()


def digest_weights(files: Sequence[Path]) -> str:
    """A digest of the weight files' names, sizes, times and sampled content.

    Reads at most `READ_WHOLE_BYTES`, or about a thousand small ranges and the headers; raises
    `StorageError` if a file can't be read.
    """
    digest = hashlib.sha256()
    total_bytes = sum(_size_bytes(path) for path in files)
    samples = max(MIN_SAMPLES_PER_FILE, SAMPLES_PER_MODEL // max(1, len(files)))
    for path in files:
        try:
            with path.open("rb", buffering=0) as file:
                state = os.fstat(file.fileno())
                facts = f"{path.name}\0{state.st_size}\0{state.st_mtime_ns}\n"
                digest.update(facts.encode(errors="surrogateescape"))
                if total_bytes <= READ_WHOLE_BYTES:
                    digest.update(hashlib.file_digest(file, "sha256").digest())
                else:
                    _digest_samples(digest.update, file.fileno(), path, samples)
        except OSError as error:
            raise _unreadable(path, error) from error
    return digest.hexdigest()


def _digest_samples(update: Callable[[bytes], None], fd: int, path: Path, samples: int) -> None:
    size_bytes = os.fstat(fd).st_size
    places = [index * size_bytes // samples for index in range(samples)]
    places.append(max(0, size_bytes - SAMPLE_BYTES))
    if path.suffix == SAFETENSORS:
        header, data_start = _read_safetensors_header(fd, path)
        update(header)
        places += _tensor_middles(header, data_start, path, samples)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    for place in sorted(set(places)):
        update(os.pread(fd, SAMPLE_BYTES, place))


def _tensor_middles(header: bytes, data_start: int, path: Path, limit: int) -> list[int]:
    """The middle of each tensor, or of `limit` of them spread over the file."""
    middles = sorted(
        data_start + (start + end) // 2 for _, start, end in _tensors(header, path) if end > start
    )
    step = max(1, -(-len(middles) // limit))
    return middles[::step]


def digest_descriptions(directory: Path, *, with_code: bool) -> str:
    """A digest of what describes the model beside its weights: configurations, and code if run.

    Tokenizer files are left out: a chunk's key is made of token ids.
    """
    suffixes = (".json", ".py") if with_code else (".json",)
    files = sorted(
        path
        for path in directory.iterdir()
        if path.suffix in suffixes and path.name not in _TOKENIZER_FILES and path.is_file()
    )
    digest = hashlib.sha256()
    for path in files:
        content = _read(path)
        digest.update(f"{path.name}\0{len(content)}\n".encode(errors="surrogateescape"))
        digest.update(content)
    return digest.hexdigest()


def read_config(directory: Path) -> Mapping[str, object] | None:
    """The model's `config.json`, or None where it has none that can be read."""
    try:
        config = json.loads((directory / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None


_FLOAT_BYTES: Final = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


def weights_bytes(files: Iterable[Path], float_bytes: int | None = None) -> int:
    """Memory that the weights take once loaded.

    `float_bytes` is the size per value to which a loader converts ordinary floating-point tensors;
    None counts every tensor as it is stored. Files without a header count by their size.
    """
    total_bytes = 0
    for path in files:
        if path.suffix != SAFETENSORS:
            total_bytes += _size_bytes(path)
            continue
        try:
            with path.open("rb", buffering=0) as file:
                header, _ = _read_safetensors_header(file.fileno(), path)
        except OSError as error:
            raise _unreadable(path, error) from error
        for dtype, start, end in _tensors(header, path):
            stored = _FLOAT_BYTES.get(dtype)
            scale = float_bytes / stored if float_bytes and stored else 1
            total_bytes += round((end - start) * scale)
    return total_bytes


def _read_safetensors_header(fd: int, path: Path) -> tuple[bytes, int]:
    """The header's JSON text, and where the data begin."""
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    header = os.pread(fd, length, 8) if length <= MAX_HEADER_BYTES else b""
    if not header or len(header) != length:
        raise StorageError(f"{path} is no sound safetensors file; download the model again")
    return header, 8 + length


def _tensors(header: bytes, path: Path) -> list[tuple[str, int, int]]:
    """Type, first and last byte (relative to the data) of each tensor that a header names."""
    found: list[tuple[str, int, int]] = []
    try:
        for name, entry in json.loads(header).items():
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                found.append((str(entry["dtype"]), int(start), int(end)))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StorageError(f"{path} has a damaged header; download the model again") from error
    return found


def _size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise _unreadable(path, error) from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> StorageError:
    return StorageError(f"{path} can't be read: {error.strerror}")
