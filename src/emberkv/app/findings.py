"""What `emberkv doctor` looks at: each check takes facts and says what they mean and what to do."""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from emberkv import config as configuration
from emberkv.app.fit import RamPlan, require_disk_fit
from emberkv.app.launch import CONNECTOR, CONNECTOR_MODULE, SPEC, SPEC_MODULE
from emberkv.config import Config
from emberkv.domain.units import format_size
from emberkv.engines.vllm.command_line import (
    HASH_FLAG,
    OFFLOADING_FLAGS,
    PORTABLE_HASH,
    SEED_VARIABLE,
    WEIGHT_OFFLOADING_FLAG,
    Flags,
    unstable_hash,
)
from emberkv.errors import UsageError

if TYPE_CHECKING:
    from emberkv.app.machine import DiskSpace, Machine
    from emberkv.live.keeper.status import KeeperInfo
    from emberkv.tiers.slab_directory import SlabInfo

MIN_SHM_BYTES: Final = 64 << 20


class Level(enum.StrEnum):
    """How bad a finding is."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """What was checked, what was found, and what to do about it (nothing if all is well)."""

    check: str
    level: Level
    found: str
    do: str = ""


def check_engine(version: str | None, tested: Sequence[str], *, is_tested: bool) -> Finding:
    """Is the installed vLLM one that emberkv works with?"""
    releases = ", ".join(f"{minor}.x" for minor in tested)
    if version is None:
        return Finding(
            "engine",
            Level.FAIL,
            "no vLLM is installed beside this Python",
            f"install vLLM {releases} into the same environment",
        )
    if not is_tested:
        return Finding(
            "engine",
            Level.FAIL,
            f"vLLM {version} is not tested with this emberkv, which refuses to serve with it",
            f"install vLLM {releases}, or an emberkv that knows this version",
        )
    return Finding("engine", Level.OK, f"vLLM {version} is tested")


def check_memory(machine: Machine, plan: RamPlan | None) -> Finding:
    """Does the RAM tier fit, by the machine's size and by what is free now?"""
    free = (
        f"{format_size(machine.available_bytes)} free now, {machine.ram_limit} is "
        f"{format_size(machine.ram_bytes)}"
    )
    if plan is None:
        return Finding("memory", Level.OK, free, "give --ram to have a RAM tier checked")
    try:
        plan.require_fit()
    except UsageError as error:
        do = "make --ram, --reserve or the engine's share smaller"
        return Finding("memory", Level.FAIL, str(error), do)
    if plan.tier_bytes + plan.engine_bytes > machine.available_bytes:
        return Finding(
            "memory",
            Level.WARN,
            f"fits the machine, but not what is free: {free}",
            "end what holds the memory (an old server, another program), or make --ram smaller",
        )
    headroom = format_size(plan.most_bytes - plan.tier_bytes)
    return Finding("memory", Level.OK, f"fits, {headroom} beyond the reserve; {free}")


def check_shm(machine: Machine) -> Finding:
    """Is /dev/shm large enough for vLLM itself? The tiers do not use it."""
    if machine.shm_bytes is None:
        return Finding(
            "/dev/shm", Level.WARN, "is not there; vLLM's processes share data in it", "mount it"
        )
    size = format_size(machine.shm_bytes)
    if machine.shm_bytes <= MIN_SHM_BYTES:
        return Finding(
            "/dev/shm",
            Level.WARN,
            f"{size}, a container's default: vLLM with several workers may run out of it "
            "(the tiers need none)",
            "start the container with --shm-size=1g or --ipc=host",
        )
    return Finding("/dev/shm", Level.OK, f"{size} for vLLM's own use; the tiers need none")


def check_locked_memory(machine: Machine, ram_bytes: int | None, *, on_cpu: bool) -> Finding:
    """May as much memory be pinned for the device as the RAM tier has?"""
    if machine.locked_bytes is None:
        return Finding("locked memory", Level.OK, "no limit")
    size = format_size(machine.locked_bytes)
    if on_cpu or ram_bytes is None or machine.locked_bytes >= ram_bytes:
        why = "; serving on a CPU pins nothing" if on_cpu else ""
        return Finding("locked memory", Level.OK, f"limit {size}{why}")
    return Finding(
        "locked memory",
        Level.WARN,
        f"limit {size}, less than the RAM tier: where a driver counts pinned memory, "
        "copies fall back to slower ones",
        "raise it: ulimit -l unlimited, LimitMEMLOCK=infinity, or --ulimit memlock=-1",
    )


def check_disk(space: DiskSpace, size_bytes: int | None, *, direct_io: bool) -> Finding:
    """Does the disk tier fit, and can it go around the page cache?"""
    free = f"{format_size(space.free_bytes)} free in {space.directory}"
    if size_bytes is not None:
        try:
            require_disk_fit(size_bytes, space)
        except UsageError as error:
            return Finding("disk", Level.FAIL, str(error), "make the tier smaller, or free space")
    if not direct_io:
        return Finding(
            "disk",
            Level.WARN,
            f"{free}; no direct I/O on this file system: reads go through the page cache and take "
            "memory from neighbours",
            "use a directory on a local ext4 or XFS disk",
        )
    return Finding("disk", Level.OK, f"{free}; direct I/O works")


def check_hash(flags: Flags, default: str, environment: Mapping[str, str]) -> Finding:
    """Do equal prefixes get equal keys after a restart?"""
    algorithm = flags.value(HASH_FLAG) or default
    reason = unstable_hash(algorithm, environment)
    if reason:
        return Finding(
            "block hash", Level.FAIL, reason, f"pass {HASH_FLAG} {PORTABLE_HASH} to vLLM"
        )
    if algorithm.endswith("_cbor"):
        seed = environment.get(SEED_VARIABLE)
        with_seed = f", seed from {SEED_VARIABLE}: keep it the same" if seed is not None else ""
        return Finding("block hash", Level.OK, f"{algorithm} is stable between starts{with_seed}")
    return Finding(
        "block hash",
        Level.WARN,
        f"{algorithm} hashes Python's pickle format, which may differ between processes and "
        "versions: some prefixes may not be found again",
        f"pass {HASH_FLAG} {PORTABLE_HASH} to vLLM (`emberkv serve` does)",
    )


def check_keepers(keepers: Sequence[KeeperInfo], is_orphan: Callable[[int], bool]) -> list[Finding]:
    """Who holds a RAM tier on this machine, and for whom?

    `is_orphan` tells of an engine's process whether its server has left it behind.
    """
    if not keepers:
        return [Finding("keepers", Level.OK, "none is running")]
    return [_check_keeper(keeper, is_orphan) for keeper in keepers]


def _check_keeper(keeper: KeeperInfo, is_orphan: Callable[[int], bool]) -> Finding:
    status, name = keeper.status, f"keeper '{keeper.instance}'"
    if status is None:
        return Finding(
            "keepers",
            Level.WARN,
            f"{name} does not answer",
            "see whether its server still serves; if not, end the process",
        )
    held = f"{name} (process {status.pid}) holds {format_size(status.arena_bytes)}"
    orphans = sorted({holder.pid for holder in status.holders if is_orphan(holder.pid)})
    if orphans:
        return Finding(
            "keepers",
            Level.WARN,
            f"{held} for an engine whose server is gone: vLLM leaves it behind when only "
            "the server is killed",
            f"end the engine, so that a new one can take its chunks over: kill -9 {orphans[0]}",
        )
    if status.holders:
        pids = ", ".join(sorted({str(holder.pid) for holder in status.holders}))
        return Finding("keepers", Level.OK, f"{held} for an engine that runs (process {pids})")
    left = "" if status.seconds_left is None else f" for {status.seconds_left:.0f} s more"
    return Finding(
        "keepers",
        Level.WARN,
        f"{held} of an engine that is gone{left}",
        f"start the server again to take its chunks over, or free the memory: kill {status.pid}",
    )


def check_ghosts(names: Sequence[str]) -> Finding:
    """Did vLLM's own offloading leave memory behind in /dev/shm?"""
    if not names:
        return Finding("ghost files", Level.OK, "none in /dev/shm")
    return Finding(
        "ghost files",
        Level.WARN,
        f"{len(names)} of vLLM's own offloading in /dev/shm hold memory: {', '.join(names[:3])}",
        "remove those whose server is gone",
    )


def check_slabs(slabs: Sequence[SlabInfo], size_bytes: int | None) -> list[Finding]:
    """What is on the disk tier already, and is any of it of no use?"""
    if not slabs:
        return [Finding("slabs", Level.OK, "the directory holds none yet")]
    findings = [
        Finding(
            "slabs",
            Level.WARN,
            f"{slab.problem}",
            f"remove it: emberkv purge {slab.directory.parent}",
        )
        for slab in slabs
        if slab.problem is not None
    ]
    total_bytes = sum(slab.size_bytes for slab in slabs)
    chunks = sum(slab.chunks for slab in slabs)
    count = f"slabs of {len(slabs)} namespaces" if len(slabs) > 1 else "1 slab"
    found = f"{count}, {format_size(total_bytes)}, {chunks} chunks"
    if len(slabs) > 1:
        findings.append(
            Finding(
                "slabs",
                Level.WARN,
                f"{found}: a server uses one of them, the others make room when it needs it, "
                "the least recently used first",
                f"see in what they differ: emberkv inspect {slabs[0].directory.parent}",
            )
        )
    elif size_bytes is not None and total_bytes > size_bytes:
        do = "nothing, if the tier is meant to shrink"
        findings.append(Finding("slabs", Level.WARN, f"{found}: more than the tier is to have", do))
    else:
        findings.append(Finding("slabs", Level.OK, found))
    return findings


def check_offloading_flags(flags: Flags, *, by_spec: bool = False) -> list[Finding]:
    """Is another kind of offloading on, or meant?

    `by_spec`: emberkv comes as a spec of vLLM's OffloadingConnector; there a size does no harm.
    """
    findings = []
    if flags.mentions(WEIGHT_OFFLOADING_FLAG):
        findings.append(
            Finding(
                "weight offloading",
                Level.WARN,
                f"{WEIGHT_OFFLOADING_FLAG} moves the model's weights to RAM and makes every step "
                "slower; it has nothing to do with the KV cache",
                "leave it out unless the weights do not fit on the device; tiers come with --ram",
            )
        )
    findings += [
        Finding(
            "KV offloading",
            Level.WARN if by_spec else Level.FAIL,
            f"{flag} replaces cpu_bytes_to_use"
            if by_spec
            else f"{flag} makes vLLM use a connector of its own instead of emberkv's",
            "leave it out; the size is --ram, or cpu_bytes_to_use in the configuration",
        )
        for flag in OFFLOADING_FLAGS
        if flags.mentions(flag)
    ]
    return findings or [
        Finding(
            "offloading flags",
            Level.OK,
            f"none in the way ({WEIGHT_OFFLOADING_FLAG} would move weights, not the KV cache)",
        )
    ]


def check_reset(environment: Mapping[str, str]) -> Finding:
    """Which reset reaches the tiers?"""
    served = environment.get("VLLM_SERVER_DEV_MODE", "0") not in ("", "0")
    where = "" if served else " (served only with VLLM_SERVER_DEV_MODE=1)"
    return Finding(
        "reset",
        Level.OK,
        f"POST /reset_prefix_cache{where} empties the device's cache only, not the tiers",
        "to empty the tiers too: POST /reset_prefix_cache?reset_external=true",
    )


def read_transfer_config(text: str) -> tuple[list[Finding], Config | None]:
    """Check the JSON of `--kv-transfer-config`; the tiers' configuration if it can be read."""
    check = "configuration"
    try:
        transfer = json.loads(text)
    except ValueError as error:
        return [Finding(check, Level.FAIL, f"is no JSON: {error}", "mind the shell's quotes")], None
    extra = transfer.get("kv_connector_extra_config") if isinstance(transfer, dict) else None
    if not isinstance(extra, dict):
        found = "has no object kv_connector_extra_config"
        return [Finding(check, Level.FAIL, found, "put emberkv's keys there")], None
    findings = _check_entry(transfer, extra)
    if extra.get("offload_prompt_only", True) is not False:
        findings.append(
            Finding(
                check,
                Level.WARN,
                "answers are not kept, though they are part of the next turn's prompt",
                'set "offload_prompt_only": false',
            )
        )
    try:
        config = configuration.parse(extra)
    except UsageError as error:
        return [*findings, Finding(check, Level.FAIL, str(error), "change that key")], None
    if not findings:
        findings.append(Finding(check, Level.OK, "every key is known and has a usable value"))
    return findings, config


def _check_entry(transfer: Mapping[str, object], extra: Mapping[str, object]) -> list[Finding]:
    """Does the configuration lead to emberkv at all?"""
    expected: dict[str, tuple[Mapping[str, object], str]] = {"kv_role": (transfer, "kv_both")}
    if transfer.get("kv_connector") == CONNECTOR:
        expected["kv_connector_module_path"] = (transfer, CONNECTOR_MODULE)
    elif transfer.get("kv_connector") != "OffloadingConnector":
        found = f"kv_connector is {transfer.get('kv_connector')!r}, which is not emberkv's"
        do = f"set it to {CONNECTOR} or OffloadingConnector"
        return [Finding("configuration", Level.FAIL, found, do)]
    expected["spec_name"] = (extra, SPEC)
    expected["spec_module_path"] = (extra, SPEC_MODULE)
    return [
        Finding(
            "configuration",
            Level.FAIL,
            f"{key} is {given.get(key)!r}",
            f'set it to "{value}"',
        )
        for key, (given, value) in expected.items()
        if given.get(key) != value
    ]
