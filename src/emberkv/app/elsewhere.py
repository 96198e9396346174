"""Chunks that a server does not have, looked for in the slabs of other namespaces beside it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from emberkv.app import slabs
from emberkv.errors import EmberError
from emberkv.live.control.messages import Explanation
from emberkv.tiers.slab_directory import keys_of_slab


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """A namespace that holds chunks of the prompt, and in which fields it differs from ours.

    `fields`: name, the value there, the value here.
    """

    namespace: str
    chunks: frozenset[bytes]
    fields: tuple[tuple[str, str, str], ...]


def find(explanation: Explanation) -> list[Elsewhere]:
    """Other namespaces that hold chunks which are nowhere here; reads the indices, changes nothing.

    Nothing where there is no disk tier, or its directory can't be seen from here.
    """
    missing = {key for stretch in explanation.stretches for key in stretch.keys}
    if explanation.root_dir is None or not missing:
        return []
    try:
        return _search(Path(explanation.root_dir), missing, explanation)
    except (EmberError, OSError):
        return []


def _search(
    root_dir: Path, missing: Collection[bytes], explanation: Explanation
) -> list[Elsewhere]:
    found: list[Elsewhere] = []
    for slab in slabs.find(root_dir):
        digest = slabs.digest_of(slab)
        if slab.problem is not None or digest == explanation.namespace:
            continue
        chunks = frozenset(keys_of_slab(slab.directory)).intersection(missing)
        if chunks:
            theirs = {name: str(value) for name, value in slabs.fields_of(slab).items()}
            names = dict.fromkeys([*explanation.fields, *theirs])
            fields = tuple(
                (name, theirs.get(name, "-"), explanation.fields.get(name, "-"))
                for name in names
                if theirs.get(name) != explanation.fields.get(name)
            )
            found.append(Elsewhere(digest, chunks, fields))
    return found
