"""The namespace: everything that must be equal for the bytes of a chunk to be reusable.

A chunk's key names the tokens of a prefix and nothing else. Which model computed them, with which
weights, types, layout and hash, is the namespace's to say: equal digests mean reusable bytes, and
two namespaces that differ can name the fields in which they do.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from emberkv.errors import InvariantError

SHORT_DIGITS: Final = 16
_ENCODING: Final = b"emberkv namespace 1\n"


@dataclass(frozen=True)
class Namespace:
    """Named facts, in the order in which people read them; the order is not part of the digest."""

    fields: tuple[tuple[str, str], ...]

    def __post_init__(self) -> None:
        names = [name for name, _ in self.fields]
        if len(set(names)) != len(names) or not all(names):
            raise InvariantError(f"a namespace names each field once: {names}")

    @classmethod
    def of(cls, fields: Mapping[str, str]) -> Namespace:
        return cls(tuple(fields.items()))

    @cached_property
    def digest(self) -> str:
        """64 hex digits: SHA-256 over the fields, sorted by name."""
        body = json.dumps(dict(self.fields), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(_ENCODING + body.encode("ascii")).hexdigest()

    @property
    def short(self) -> str:
        """The first 16 hex digits of the digest, for names and messages."""
        return self.digest[:SHORT_DIGITS]

    def differences(self, other: Namespace) -> tuple[str, ...]:
        """The fields whose values differ or that only one side has: this side's order first."""
        mine, theirs = dict(self.fields), dict(other.fields)
        names = list(mine) + [name for name in theirs if name not in mine]
        return tuple(name for name in names if mine.get(name) != theirs.get(name))
