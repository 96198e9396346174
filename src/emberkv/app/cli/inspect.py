"""`emberkv inspect`: what a disk tier holds. Disturbs no server that uses it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from emberkv.app.cli.options import DIRECTORY, as_json, console, print_json

if TYPE_CHECKING:
    from rich.console import Console

    from emberkv.tiers.slab_directory import SlabInfo

_LONG_AGO_S = 48 * 3600


@click.command("inspect", short_help="Show what a disk tier holds.")
@click.argument("directory", type=DIRECTORY)
@click.option("--namespace", metavar="DIGITS", help="Only the slab of this namespace.")
@as_json
def command(directory: Path, namespace: str | None, as_json: bool) -> int:
    """Show what the disk tier in DIRECTORY holds, with its server up or down."""
    from emberkv.app import slabs

    found = slabs.find(directory, namespace)
    if as_json:
        print_json([slabs.facts_of(slab) for slab in found])
        return 0
    if not found:
        print(f"{directory} holds no slab of emberkv")
        return 0
    out = console()
    _show_slabs(out, found)
    _show_fields(out, found)
    return 0


def _show_slabs(out: Console, found: Sequence[SlabInfo]) -> None:
    from rich.table import Table

    from emberkv.app import slabs
    from emberkv.domain.units import format_size

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("namespace", "state", "last used"):
        table.add_column(title, overflow="fold")
    for title in ("chunks", "of", "chunk size", "size"):
        table.add_column(title, justify="right", no_wrap=True)
    for slab in found:
        state = f"in use, {slabs.owner_of(slab)}" if slab.in_use else slabs.state_of(slab)
        geometry = slab.geometry
        table.add_row(
            slabs.short_name(slab),
            state,
            _ago(time.time() - slab.last_used_s),
            str(slab.chunks),
            str(geometry.slot_count) if geometry else "?",
            format_size(geometry.payload_bytes) if geometry else "?",
            format_size(slab.size_bytes),
        )
    out.print(table)
    for slab in found:
        if slab.problem is not None:
            out.print(f"{slabs.short_name(slab)}: {slab.problem}", markup=False)


def _show_fields(out: Console, found: Sequence[SlabInfo]) -> None:
    """All fields of one namespace; of several, those in which they differ."""
    from rich.table import Table

    from emberkv.app import slabs

    one = len(found) == 1
    names = list(slabs.fields_of(found[0])) if one else slabs.differing_fields(found)
    if not names:
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("field" if one else "differs in", no_wrap=True)
    for slab in found:
        table.add_column("value" if one else slabs.short_name(slab), overflow="fold")
    for name in names:
        table.add_row(name, *(str(slabs.fields_of(slab).get(name, "-")) for slab in found))
    out.print()
    out.print(table, markup=False)


def _ago(seconds: float) -> str:
    """How long ago, in the largest unit that says something."""
    if seconds >= _LONG_AGO_S:
        return f"{seconds / 86400:.0f} days ago"
    if seconds >= 3600:
        return f"{seconds / 3600:.0f} h ago"
    return f"{max(0.0, seconds) / 60:.0f} min ago"
