"""What a drill's server shall suffer now: a small file, rewritten while the server runs.

The drill writes it; the drill's keeper and the drill's spec follow it. Its path is in an
environment variable that only a drill sets, and that only modules of this package read.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from emberkv.domain.types import Outcome
from emberkv.drills.faults import Fault, FaultyStorage, MixUp, Operation, Parts
from emberkv.errors import ConfigError

PLAN_VARIABLE: Final = "EMBERKV_DRILL_PLAN"
LOOK_S: Final = 0.02


class PlannedFault(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A `Fault` as it is written down; `hangs` holds calls until the plan no longer says so."""

    operation: Operation
    outcome: str | None = None
    hangs: bool = False
    latency_s: float = 0.0
    bytes_per_s: float | None = None
    mix_up: MixUp | None = None


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Everything that goes wrong at one time.

    `clock_offset_s` is added to the scheduler's clock. `loads` mixes up what a worker copies to the
    device. `ranks` and `layers` say how a chunk is divided, `foreign_slab` where another
    namespace's chunks are.
    """

    faults: tuple[PlannedFault, ...] = ()
    clock_offset_s: float = 0.0
    loads: MixUp | None = None
    ranks: int = 1
    layers: int = 2
    foreign_slab: str | None = None

    @property
    def parts(self) -> Parts:
        return Parts(self.ranks, self.layers)


NOTHING: Final = Plan()


def plan_path(environment: Mapping[str, str] = os.environ) -> Path:
    """Where this process's plan is. Raises `ConfigError` in a process that no drill has started."""
    path = environment.get(PLAN_VARIABLE)
    if not path or not Path(path).is_file():
        raise ConfigError(
            "emberkv.drills makes faults on purpose and serves nobody: `emberkv drill` starts it; "
            "set spec_module_path to emberkv.engines.vllm"
        )
    return Path(path)


def write_plan(path: Path, plan: Plan) -> None:
    """Put a plan in place of the last one, at once."""
    _replace(path, msgspec.json.encode(plan))


class Followed(msgspec.Struct, frozen=True):
    """What the keeper says of a plan: which file it follows, and how many chunks it met."""

    inode: int = 0
    chunks_met: int = 0


def followed(path: Path) -> Followed:
    """What the keeper that follows a plan has said last."""
    try:
        return msgspec.json.decode(_followed_path(path).read_bytes(), type=Followed)
    except FileNotFoundError:
        return Followed()


def is_followed(path: Path) -> bool:
    """Whether the keeper follows the plan as it is written now."""
    return followed(path).inode == path.stat().st_ino


def _followed_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.followed")


def _replace(path: Path, content: bytes) -> None:
    # Another keeper, or this one's last storage, may write the same file at the same time.
    partial = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}")
    partial.write_bytes(content)
    partial.rename(path)


class FollowedPlan:
    """The plan as it stands, looked at no more often than every `every_s`."""

    def __init__(self, path: Path, every_s: float = LOOK_S) -> None:
        self._path = path
        self._every_s = every_s
        self._seen: tuple[int, int] | None = None
        self._looked_at_s = -every_s
        self._plan = NOTHING

    @property
    def inode(self) -> int:
        """The file that was read last."""
        return 0 if self._seen is None else self._seen[0]

    def now(self) -> Plan:
        """The plan; the last one that could be read, if the file is gone."""
        now_s = time.monotonic()
        if now_s - self._looked_at_s >= self._every_s:
            self._looked_at_s = now_s
            self._look()
        return self._plan

    def _look(self) -> None:
        try:
            stat = self._path.stat()
            seen = (stat.st_ino, stat.st_mtime_ns)
            if seen != self._seen:
                self._plan = msgspec.json.decode(self._path.read_bytes(), type=Plan)
                self._seen = seen
        except FileNotFoundError:
            return


def faults_of(plan: Plan, release: threading.Event) -> list[Fault]:
    """The plan's faults for a storage; `release` is what lets hanging calls go on."""
    return [
        Fault(
            planned.operation,
            outcome=None if planned.outcome is None else Outcome(planned.outcome),
            release=release if planned.hangs else None,
            latency_s=planned.latency_s,
            bytes_per_s=planned.bytes_per_s,
            mix_up=planned.mix_up,
            parts=plan.parts,
        )
        for planned in plan.faults
    ]


def follow(storage: FaultyStorage, path: Path) -> None:
    """Keep a storage's faults as the plan has them, and say what they met, until it is closed."""
    reader = FollowedPlan(path, 0.0)
    last = NOTHING
    release = threading.Event()
    said: Followed | None = None
    while not storage.closed:
        plan = reader.now()
        if plan != last:
            last, held, release = plan, release, threading.Event()
            storage.plan(*faults_of(plan, release))
            held.set()
        now = Followed(reader.inode, storage.chunks_met)
        if said != now:
            said = now
            with suppress(FileNotFoundError):  # the drill is over, and its directory gone
                _replace(_followed_path(path), msgspec.json.encode(now))
        time.sleep(LOOK_S)
    release.set()
