"""What `emberkv serve` starts: the engine's command line, made and checked before it runs."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from emberkv import config as configuration
from emberkv.app.fit import RamPlan, default_reserve_bytes, require_chunk_fits, require_disk_fit
from emberkv.app.machine import (
    DiskSpace,
    Machine,
    disk_space,
    require_log_file,
    require_writable,
    this_machine,
)
from emberkv.domain.units import format_size
from emberkv.engines.vllm.command_line import (
    HASH_FLAG,
    PORTABLE_HASH,
    TRANSFER_FLAG,
    Flags,
    Launch,
    has_own_command,
    is_cpu_build,
    require_no_other_connector,
    unstable_hash,
)
from emberkv.errors import UsageError
from emberkv.live.arena import ArenaGeometry
from emberkv.live.guard import guard_rules
from emberkv.tiers.format import SlabGeometry

CONNECTOR = "EmberConnector"
CONNECTOR_MODULE = "emberkv.engines.vllm.connector"
SPEC = "EmberOffloadingSpec"
SPEC_MODULE = "emberkv.engines.vllm"
SERVER_MODULE = "vllm.entrypoints.openai.api_server"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """The options of `emberkv serve`; None means: not given, the configuration's default."""

    model: str
    ram_bytes: int
    disk: Path | None = None
    disk_bytes: int | None = None
    reserve_bytes: int | None = None
    chunk_tokens: int | None = None
    blocks_per_chunk: int | None = None
    eviction_policy: str | None = None
    keep_s: float | None = None
    max_wait_s: float | None = None
    max_stall_s: float | None = None
    max_slowdown: float | None = None
    request_log: Path | None = None
    instance: str | None = None
    model_identity: str | None = None
    on_busy_disk: str | None = None
    no_control: bool = False
    canary: float | None = None
    baseline: Path | None = None
    guard: Path | None = None
    vllm_arguments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.disk is not None and self.disk_bytes is None:
            raise UsageError("--disk needs --disk-size: say how large the disk tier may become")
        if self.disk is None and self.disk_bytes is not None:
            raise UsageError("--disk-size needs --disk: say in which directory")
        if self.chunk_tokens is not None and self.blocks_per_chunk is not None:
            raise UsageError("give --chunk-tokens or --blocks-per-chunk, not both")

    def extra_config(self, spec: tuple[str, str] = (SPEC, SPEC_MODULE)) -> dict[str, object]:
        """The keys for the engine's `kv_connector_extra_config`, checked."""
        disk = None
        if self.disk is not None:
            place = str(self.disk.absolute())
            disk = [{"type": "fs", "root_dir": place, "size_bytes": self.disk_bytes}]
        log = None if self.request_log is None else str(self.request_log.absolute())
        keys: dict[str, object] = {
            "spec_name": spec[0],
            "spec_module_path": spec[1],
            "cpu_bytes_to_use": self.ram_bytes,
            "secondary_tiers": disk,
            "block_size": self.chunk_tokens,
            "blocks_per_chunk": self.blocks_per_chunk,
            "eviction_policy": self.eviction_policy,
            "keep_s": self.keep_s,
            "max_wait_s": self.max_wait_s,
            "max_stall_s": self.max_stall_s,
            "max_slowdown": self.max_slowdown,
            "request_log": log,
            "instance": self.instance,
            "model_identity": self.model_identity,
            "on_busy_disk": self.on_busy_disk,
            "control": False if self.no_control else None,
            "canary": self.canary,
            "baseline": None if self.baseline is None else str(self.baseline.absolute()),
            "guard": None if self.guard is None else read_guard(self.guard),
            # Answers are part of the next turn's prompt.
            "offload_prompt_only": False,
        }
        given = {key: value for key, value in keys.items() if value is not None}
        guard_rules(configuration.parse(given))
        return given


def read_guard(path: Path) -> object:
    """The guard's rules from a file of JSON. Raises `UsageError` if it can't be read."""
    try:
        rules = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"can't read the guard's rules {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is no JSON: {error}") from error
    if rules is None:
        raise UsageError(f"{path} holds no rules of a guard: null")
    return rules


def vllm_arguments(
    options: ServeOptions,
    environment: Mapping[str, str],
    spec: tuple[str, str] = (SPEC, SPEC_MODULE),
) -> list[str]:
    """The arguments for `vllm`, from `serve` on. Raises `UsageError` for what can't go together."""
    flags = Flags(options.vllm_arguments)
    require_no_other_connector(flags)
    algorithm = flags.value(HASH_FLAG)
    reason = algorithm and unstable_hash(algorithm, environment)
    if reason:
        raise UsageError(reason)
    transfer = {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_role": "kv_both",
        "kv_connector_extra_config": options.extra_config(spec),
    }
    own = [TRANSFER_FLAG, json.dumps(transfer, separators=(",", ":"))]
    if algorithm is None:
        own += [HASH_FLAG, PORTABLE_HASH]
    return ["serve", options.model, *own, *options.vllm_arguments]


def plain_command(arguments: list[str]) -> str:
    """The command for a shell that starts the same engine without emberkv's command line."""
    if has_own_command():
        return shlex.join(["vllm", *arguments])
    return shlex.join([sys.executable, *_module_arguments(arguments)])


def engine_command(arguments: list[str]) -> list[str]:
    """What to execute: the engine that belongs to this Python. Raises `UsageError` if none does."""
    program = _vllm_program()
    if has_own_command():
        return [str(program), *arguments]
    return [sys.executable, "-W", "ignore", *_module_arguments(arguments)]


def _module_arguments(arguments: list[str]) -> list[str]:
    """The same server by its module, for builds whose `vllm` command can't start."""
    _, model, *flags = arguments
    return ["-m", SERVER_MODULE, "--model", model, *flags]


def _vllm_program() -> Path:
    program = Path(sys.executable).with_name("vllm")
    if not program.exists():
        raise UsageError(
            f"no vllm beside {sys.executable}: install it into the same environment, "
            "for instance with pip install 'emberkv[vllm]'"
        )
    return program


def check_sizes(
    options: ServeOptions, launch: Launch, machine: Machine, space: DiskSpace | None
) -> RamPlan:
    """Hold what was asked for against the machine. Raises `UsageError` for what does not fit."""
    reserve_bytes = options.reserve_bytes
    if reserve_bytes is None:
        reserve_bytes = default_reserve_bytes(machine)
    needs = tuple(launch.memory_needs(machine.ram_bytes))
    plan = RamPlan(options.ram_bytes, reserve_bytes, needs, machine)
    plan.require_fit()
    if space is not None and options.disk_bytes is not None:
        require_disk_fit(options.disk_bytes, space)
    _require_chunks(options, launch)
    return plan


def _require_chunks(options: ServeOptions, launch: Launch) -> None:
    """Raise `UsageError` for a chunk that is no whole number of blocks, or larger than a tier."""
    block_tokens = launch.block_tokens()
    chunk_tokens = options.chunk_tokens or block_tokens * (options.blocks_per_chunk or 1)
    if chunk_tokens % block_tokens:
        raise UsageError(
            f"--chunk-tokens {chunk_tokens} is no multiple of the engine's block of "
            f"{block_tokens} tokens"
        )
    token_bytes = launch.kv_bytes_per_token()
    if token_bytes is None:
        return
    chunk_bytes = token_bytes * chunk_tokens
    arena_bytes = ArenaGeometry(1, chunk_bytes).total_bytes
    require_chunk_fits("--ram", options.ram_bytes, arena_bytes, chunk_tokens)
    if options.disk_bytes is not None:
        slab_bytes = SlabGeometry(1, chunk_bytes).total_bytes
        require_chunk_fits("--disk-size", options.disk_bytes, slab_bytes, chunk_tokens)


def check(options: ServeOptions, environment: Mapping[str, str]) -> RamPlan:
    """Everything that can be said before a start. Raises `UsageError` for what can't work."""
    engine = Launch(
        options.model, Flags(options.vllm_arguments), environment, on_cpu=is_cpu_build(environment)
    )
    space = None if options.disk is None else disk_space(options.disk)
    require_places(options)
    return check_sizes(options, engine, this_machine(), space)


def require_places(options: ServeOptions) -> None:
    """Raise `UsageError` for a model, directory or file that the engine would find unusable."""
    if not options.model:
        raise UsageError("the model's name is empty: name a model, or a directory that holds one")
    if options.model.startswith(("/", "./", "../")) and not Path(options.model).exists():
        raise UsageError(f"{options.model} does not exist; name a model, or a directory with one")
    if options.disk is not None:
        require_writable(options.disk)
    if options.request_log is not None:
        require_log_file(options.request_log)


def summary(options: ServeOptions, plan: RamPlan) -> str:
    """What is about to be started, in one line."""
    disk = ""
    if options.disk is not None and options.disk_bytes is not None:
        disk = f", disk tier {format_size(options.disk_bytes)} in {options.disk}"
    shm = "" if plan.machine.shm_bytes is None else format_size(plan.machine.shm_bytes)
    engine = f"engine {format_size(plan.engine_bytes)}, " if plan.needs else ""
    return (
        f"RAM tier {format_size(options.ram_bytes)}{disk}; {engine}reserve "
        f"{format_size(plan.reserve_bytes)} of {format_size(plan.machine.ram_bytes)} RAM"
        + (f"; /dev/shm {shm} (not used by the tiers)" if shm else "")
    )
