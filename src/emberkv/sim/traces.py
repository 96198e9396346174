"""Readers of request traces: who asked when for which chain of chunks.

The format is that of the Mooncake traces: one JSON object a line with `timestamp` in
milliseconds, `input_length` and `output_length` in tokens, and `hash_ids`, one per block of 512
tokens, head first, where equal ids name equal whole prefixes. A partial last block has an id, but
nobody can reuse it: the first `input_length // 512` ids count.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from emberkv.domain.types import ChunkKey
from emberkv.errors import UsageError

MOONCAKE_BLOCK_TOKENS = 512
ID_BYTES = 8


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request: its arrival since the trace's beginning, its tokens, its full chunks."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    keys: tuple[ChunkKey, ...]


def trace_lines(path: Path) -> Iterator[str]:
    """The lines of a trace file, plain or, by the suffix `.xz`, compressed.

    Raises `UsageError` if the file can't be read.
    """
    try:
        with lzma.open(path, "rt") if path.suffix == ".xz" else path.open() as file:
            yield from file
    except (OSError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise UsageError(f"the trace {path} can't be read: {error}") from error


def read_mooncake(lines: Iterable[str], *, blocks_per_chunk: int = 1) -> Iterator[TraceRequest]:
    """Requests of a Mooncake trace, with chunks of so many of its blocks.

    A chunk's key is the id of its last block, which names the whole prefix. Raises `UsageError`
    naming the first line that is not of this format.
    """
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            input_tokens = int(record["input_length"])
            ids = record["hash_ids"][: input_tokens // MOONCAKE_BLOCK_TOKENS]
            yield TraceRequest(
                record["timestamp"] / 1000,
                input_tokens,
                int(record["output_length"]),
                tuple(
                    ChunkKey(each.to_bytes(ID_BYTES, "big"))
                    for each in ids[blocks_per_chunk - 1 :: blocks_per_chunk]
                ),
            )
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise UsageError(
                f"line {number} is not of a Mooncake trace ({type(error).__name__}: {error})"
            ) from error
