"""`emberkv doctor`: check this machine and a configuration, and say what to mend."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from emberkv.app.cli.options import DIRECTORY, SIZE, ManyOptions, as_json, console, print_json
from emberkv.errors import EmberError, UsageError

if TYPE_CHECKING:
    from emberkv.app.findings import Finding

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "bold red"}


@click.command("doctor", cls=ManyOptions, short_help="Check this machine and a configuration.")
@click.option("--model", help="The model that is to be served, to know what the engine needs.")
@click.option("--ram", "ram_bytes", type=SIZE, help="The RAM tier to check, as for serve.")
@click.option("--disk", type=DIRECTORY, metavar="DIR", help="The disk tier's directory.")
@click.option("--disk-size", "disk_bytes", type=SIZE, help="The disk tier's size.")
@click.option("--reserve", "reserve_bytes", type=SIZE, help="As for serve.")
@click.option(
    "--kv-transfer-config",
    metavar="JSON",
    help="What a plain vllm serve is given, to be checked instead of --ram and --disk.",
)
@as_json
@click.argument("vllm_arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- VLLM_FLAG ...]")
def command(given: Mapping[str, Any]) -> int:
    """Check this machine and a configuration, and say what to mend.

    Without options only the machine is checked. Exit status 1 if something fails.
    """
    findings = _findings(given)
    if given["as_json"]:
        print_json([asdict(finding) for finding in findings])
    else:
        _show(findings)
    return int(any(finding.level == "fail" for finding in findings))


def _findings(given: Mapping[str, Any]) -> list[Finding]:
    from emberkv.app import findings as checks
    from emberkv.app.fit import RamPlan, default_reserve_bytes
    from emberkv.app.machine import is_orphaned_engine, this_machine
    from emberkv.engines.vllm import command_line, compat
    from emberkv.live.keeper.status import find_keepers

    version = compat.engine_version()
    is_tested = version is not None and compat.is_tested(version)
    found = [checks.check_engine(version, compat.TESTED_VERSIONS, is_tested=is_tested)]
    ram_bytes, disk, disk_bytes = given["ram_bytes"], given["disk"], given["disk_bytes"]
    default_hash = command_line.PORTABLE_HASH
    transfer = given["kv_transfer_config"]
    if transfer is not None:
        if ram_bytes or disk or disk_bytes:
            raise UsageError("give --kv-transfer-config, or --ram and --disk, not both")
        of_config, config = checks.read_transfer_config(transfer)
        found += of_config
        default_hash = command_line.DEFAULT_HASH
        if config is not None:
            ram_bytes = config.ram_bytes
        if config is not None and config.disk is not None:
            disk = config.disk.root_dir
            disk_bytes = None if config.disk.size_is_default else config.disk.size_bytes
    flags = command_line.Flags(given["vllm_arguments"])
    on_cpu = command_line.is_cpu_build(os.environ)
    machine = this_machine()
    plan = None
    if ram_bytes is not None:
        reserve_bytes = given["reserve_bytes"] or default_reserve_bytes(machine)
        engine = command_line.Launch(given["model"] or "", flags, os.environ, on_cpu=on_cpu)
        needs = tuple(engine.memory_needs(machine.ram_bytes))
        plan = RamPlan(ram_bytes, reserve_bytes, needs, machine)
    found.append(checks.check_memory(machine, plan))
    found.append(checks.check_shm(machine))
    found.append(checks.check_locked_memory(machine, ram_bytes, on_cpu=on_cpu))
    found += _disk_findings(disk, disk_bytes)
    found.append(checks.check_hash(flags, default_hash, os.environ))
    found += checks.check_keepers(find_keepers(), is_orphaned_engine)
    found.append(checks.check_ghosts(_ghosts()))
    found += checks.check_offloading_flags(flags, by_spec="OffloadingConnector" in (transfer or ""))
    found.append(checks.check_reset(os.environ))
    return found


def _disk_findings(directory: Path | None, size_bytes: int | None) -> list[Finding]:
    from emberkv.app import findings as checks
    from emberkv.app.machine import direct_io_works, disk_space
    from emberkv.tiers.slab_directory import describe_slabs

    if directory is None:
        return []
    try:
        space = disk_space(directory)
        works = direct_io_works(directory)
        slabs = describe_slabs(directory)
    except EmberError as error:
        do = "make it usable for this user, or name another directory"
        return [checks.Finding("disk", checks.Level.FAIL, str(error), do)]
    return [
        checks.check_disk(space, size_bytes, direct_io=works),
        *checks.check_slabs(slabs, size_bytes),
    ]


def _ghosts() -> list[str]:
    """Files that vLLM's own offloading leaves in shared memory when it is killed."""
    try:
        names = os.listdir("/dev/shm")
    except OSError:
        return []
    return sorted(name for name in names if name.startswith("vllm_offload_"))


def _show(findings: list[Finding]) -> None:
    if not sys.stdout.isatty():
        for finding in findings:
            do = f" -> {finding.do}" if finding.do else ""
            print(f"{finding.level:<4}  {finding.check}: {finding.found}{do}")
        return
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=True, header_style="bold")
    for title, ratio in (("", None), ("check", None), ("found", 3), ("what to do", 2)):
        table.add_column(title, ratio=ratio, overflow="fold")
    for finding in findings:
        level = Text(finding.level, style=_COLOURS[finding.level])
        table.add_row(level, finding.check, Text(finding.found), Text(finding.do))
    console().print(table)
