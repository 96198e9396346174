"""`emberkv purge`: remove slabs of a disk tier."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from emberkv.app.cli.options import DIRECTORY, as_json, print_json
from emberkv.errors import StorageError, UsageError

if TYPE_CHECKING:
    from emberkv.tiers.slab_directory import SlabInfo


@click.command("purge", short_help="Remove what a disk tier holds.")
@click.argument("directory", type=DIRECTORY)
@click.option("--namespace", metavar="DIGITS", help="Remove the slab of this namespace.")
@click.option("--all", "every", is_flag=True, help="Remove every slab.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@as_json
def command(directory: Path, namespace: str | None, every: bool, yes: bool, as_json: bool) -> int:
    """Remove slabs in DIRECTORY; other files there are left alone.

    A slab that a server has open stays: stop the server, or empty its tiers with
    emberkv control purge. Exit status 1 if one had to stay.
    """
    from emberkv.app import slabs

    if every == (namespace is not None):
        raise UsageError("say what to remove: --namespace DIGITS, or --all")
    found = slabs.find(directory, namespace)
    free = [slab for slab in found if not slab.in_use]
    if free and not yes and not _confirmed(free):
        print("nothing was removed", file=sys.stderr)
        return 1
    results = [_purge(slab) for slab in found]
    if as_json:
        print_json(results)
    else:
        for result in results:
            name = str(result["namespace"])[:16]
            print(f"{name}: removed" if result["removed"] else f"{name}: kept, {result['reason']}")
        if not results:
            print(f"{directory} holds no slab of emberkv")
    return int(not all(result["removed"] for result in results))


def _confirmed(free: list[SlabInfo]) -> bool:
    from emberkv.app import slabs
    from emberkv.domain.units import format_size

    if not sys.stdin.isatty():
        raise UsageError("there is no terminal to ask on; add --yes to remove without asking")
    for slab in free:
        size = format_size(slab.size_bytes)
        model = slabs.fields_of(slab).get("model.name", "unknown model")
        click.echo(f"{slabs.short_name(slab)}: {slab.chunks} chunks, {size}, {model}", err=True)
    return click.confirm(f"Remove {'these' if len(free) > 1 else 'it'} for good?", err=True)


def _purge(slab: SlabInfo) -> dict[str, object]:
    from emberkv.app import slabs
    from emberkv.tiers.slab_directory import purge_slab

    result: dict[str, object] = {
        "namespace": slabs.digest_of(slab),
        "directory": str(slab.directory),
    }
    if slab.in_use:
        reason = (
            f"in use by {slabs.owner_of(slab)}; stop its server first, or empty its tiers with "
            "emberkv control purge"
        )
        return result | {"removed": False, "reason": reason}
    try:
        purge_slab(slab.directory)
    except StorageError as error:
        return result | {"removed": False, "reason": str(error)}
    return result | {"removed": True, "reason": None}
