"""`emberkv verify`: read every chunk of a disk tier and compare it with its checksum."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from emberkv.app.cli.options import DIRECTORY, as_json, print_json, progress_bar
from emberkv.errors import StorageError

if TYPE_CHECKING:
    from emberkv.tiers.slab_directory import SlabInfo

_SHOWN_SLOTS = 10


@click.command("verify", short_help="Read every chunk of a disk tier and check it.")
@click.argument("directory", type=DIRECTORY)
@click.option("--namespace", metavar="DIGITS", help="Only the slab of this namespace.")
@as_json
def command(directory: Path, namespace: str | None, as_json: bool) -> int:
    """Read every chunk in DIRECTORY and compare it with its checksum, with the server up or down.

    Exit status 1 if a chunk or a slab is damaged. A server never serves a damaged chunk: it is a
    miss, computed again and overwritten.
    """
    from emberkv.app import slabs

    found = slabs.find(directory, namespace)
    facts = [_verify(slab) for slab in found]
    if as_json:
        print_json(facts)
    else:
        for each in facts:
            print(_line(each))
        if not facts:
            print(f"{directory} holds no slab of emberkv")
    return int(not all(each["sound"] for each in facts))


def _verify(slab: SlabInfo) -> dict[str, object]:
    from emberkv.app import slabs
    from emberkv.tiers.slab_verify import verify_slab

    facts: dict[str, object] = {
        "namespace": slabs.digest_of(slab),
        "directory": str(slab.directory),
        "sound": False,
        "problem": slab.problem,
    }
    try:
        with progress_bar(slabs.short_name(slab)) as progress:
            report = verify_slab(slab.directory, progress)
    except StorageError as error:
        return facts | {"problem": slab.problem or str(error)}
    return facts | {
        "sound": report.is_sound and slab.problem is None,
        "sound_chunks": report.sound,
        "changed_chunks": report.changed,
        "corrupt_slots": list(report.corrupt_slots),
        "unreadable_slots": list(report.unreadable_slots),
        "damaged_records": list(report.damaged_records),
    }


def _line(facts: dict[str, object]) -> str:
    """What was found in one slab, in one line."""
    parts = [f"{facts['sound_chunks']} chunks sound"] if "sound_chunks" in facts else []
    if facts.get("changed_chunks"):
        parts.append(f"{facts['changed_chunks']} rewritten meanwhile")
    for name, fact in (
        ("corrupt", "corrupt_slots"),
        ("unreadable", "unreadable_slots"),
        ("lost with a damaged record", "damaged_records"),
    ):
        slots = facts.get(fact)
        if isinstance(slots, list) and slots:
            more = ", …" if len(slots) > _SHOWN_SLOTS else ""
            shown = ", ".join(str(slot) for slot in slots[:_SHOWN_SLOTS])
            parts.append(f"{len(slots)} {name} (slots {shown}{more})")
    if facts["problem"]:
        parts.append(f"damaged: {facts['problem']}")
    return f"{str(facts['namespace'])[:16]}: {', '.join(parts)}"
