"""The slabs of a disk tier as commands see them: chosen, described, compared."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from emberkv.errors import UsageError
from emberkv.tiers.format import DIRECTORY_PREFIX, LOCK_FILE
from emberkv.tiers.slab_directory import SlabInfo, describe_slab, describe_slabs
from emberkv.tiers.slab_files import is_slab


def find(root_dir: Path, namespace: str | None = None) -> list[SlabInfo]:
    """The slabs of a directory, or those whose namespace begins with `namespace`, by name.

    A slab's own directory may be given too. Raises `UsageError` if none is meant.
    """
    slabs = [describe_slab(root_dir)] if is_slab(root_dir) else describe_slabs(root_dir)
    if namespace is None:
        return slabs
    wanted = namespace.lower().removeprefix(DIRECTORY_PREFIX)
    chosen = [slab for slab in slabs if wanted and digest_of(slab).startswith(wanted)]
    if not chosen:
        known = ", ".join(short_name(slab) for slab in slabs) or "none"
        raise UsageError(f"{root_dir} has no slab of namespace '{namespace}'; it has: {known}")
    if len(chosen) > 1:
        found = ", ".join(short_name(slab) for slab in chosen)
        raise UsageError(f"'{namespace}' may be any of {found}; give more digits")
    return chosen


def short_name(slab: SlabInfo) -> str:
    """The first digits of a slab's namespace, as in its directory's name."""
    return slab.directory.name.removeprefix(DIRECTORY_PREFIX)


def digest_of(slab: SlabInfo) -> str:
    """All digits of a slab's namespace, or those its name tells."""
    return slab.namespace.digest.hex() if slab.namespace else short_name(slab)


def owner_of(slab: SlabInfo) -> str:
    """Who has a slab open: `process 123`, as its lock file says."""
    with contextlib.suppress(OSError):
        text = (slab.directory / LOCK_FILE).read_bytes()[:20].decode(errors="replace").strip()
        if text.isdigit():
            return f"process {text}"
    return "another process"


def state_of(slab: SlabInfo) -> str:
    """In use, damaged, or free for the next engine."""
    if slab.problem is not None:
        return "damaged"
    return "in use" if slab.in_use else "free"


def facts_of(slab: SlabInfo) -> dict[str, object]:
    """Everything known of a slab, for programs."""
    geometry = slab.geometry
    return {
        "namespace": digest_of(slab),
        "directory": str(slab.directory),
        "state": state_of(slab),
        "owner": owner_of(slab) if slab.in_use else None,
        "problem": slab.problem,
        "chunks": slab.chunks,
        "slots": geometry.slot_count if geometry else None,
        "chunk_bytes": geometry.payload_bytes if geometry else None,
        "size_bytes": slab.size_bytes,
        "last_used": datetime.fromtimestamp(slab.last_used_s, UTC).isoformat(timespec="seconds"),
        "fields": dict(slab.namespace.fields) if slab.namespace else None,
    }


def differing_fields(slabs: Sequence[SlabInfo]) -> list[str]:
    """The namespace fields in which slabs differ, in the order in which they are first named."""
    known = [fields for slab in slabs if (fields := fields_of(slab))]
    names = dict.fromkeys(name for fields in known for name in fields)
    return [name for name in names if len({str(fields.get(name)) for fields in known}) > 1]


def fields_of(slab: SlabInfo) -> Mapping[str, object]:
    """What a slab's namespace was made from; nothing if it can't be read."""
    return slab.namespace.fields if slab.namespace else {}
