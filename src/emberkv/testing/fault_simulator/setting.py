"""What one simulated world is made of: drawn from its seed, before anything happens in it."""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import Final

import xxhash

from emberkv.core.economy import Terms
from emberkv.core.limits import Limits
from emberkv.core.retention import Quotas
from emberkv.domain.types import ChunkKey, TenantName
from emberkv.policy.eviction import EVICTION_POLICIES

MAX_WAIT_S: Final = 3.0
MAX_STALL_S: Final = 1.0
CHUNK_BYTES: Final = 32
TOKENS_PER_CHUNK: Final = 4
TENANTS: Final = (TenantName("a"), TenantName("b"))


class Fault(enum.Enum):
    """What the simulator makes go wrong, or unusually."""

    COPY_HANGS = "copy_hangs"  # never reported: only its keeper's death ends it
    COPY_LATE = "copy_late"  # long after the tier has been given up for stalled
    REPORT_TWICE = "report_twice"
    REPORTS_HELD_UP = "reports_held_up"  # in the socket, behind one another
    READ_FAILS = "read_fails"
    WRITE_FAILS = "write_fails"
    DISK_FULL = "disk_full"
    DISK_BITS_FLIP = "disk_bits_flip"
    DISK_SLOT_GONE = "disk_slot_gone"
    DISK_SLOT_SWAPPED = "disk_slot_swapped"  # two payloads change places
    DISK_WRITE_TORN = "disk_write_torn"  # by the end of the process that wrote
    RAM_BITS_FLIP = "ram_bits_flip"  # between two engines
    KEEPER_DIES = "keeper_dies"
    KEEPER_DIES_TWICE = "keeper_dies_twice"  # before its successor has named what it holds
    DISK_DOES_NOT_SETTLE = "disk_does_not_settle"  # what an earlier engine left queued hangs
    DISK_SCAN_FAILS = "disk_scan_fails"
    RESET = "reset"
    RESET_FAILS = "reset_fails"
    RESET_LATE = "reset_late"
    RESET_WITHOUT_KEEPER = "reset_without_keeper"
    KILLED = "killed"  # the engine; keeper and RAM stay
    ALL_KILLED = "all_killed"  # RAM is gone
    STOPPED = "stopped"  # cleanly: RAM is let go
    CLOCK_JUMPS = "clock_jumps"
    CLOCK_STANDS = "clock_stands"
    ABORT = "abort"
    ABORT_WHILE_WAITING = "abort_while_waiting"
    ABORT_WHILE_LOADING = "abort_while_loading"
    PREEMPTION = "preemption"
    DEVICE_RESET = "device_reset"  # every running request is preempted between two steps
    GATE_MOVED = "gate_moved"
    TIER_EMPTIED = "tier_emptied"
    POLICY_CHANGED = "policy_changed"
    HINTED = "hinted"
    NO_DEVICE_ROOM = "no_device_room"  # answered, and not scheduled
    NOT_ASKED = "not_asked"  # a waiting request is passed over for a step
    BURST = "burst"


class Answer(enum.Enum):
    """How one look-up pass of a request was answered: each branch of the protocol."""

    NOTHING_KNOWN = "nothing_known"
    ALL_IN_RAM = "all_in_ram"
    HEAD_IN_RAM = "head_in_ram"  # and the rest nowhere
    COLLECTED = "collected"  # some of it below: a promotion is planned
    WAIT = "wait"
    HELD = "held"  # it would be computed now, and make another late that came before it
    PUT_OFF = "put_off"  # preempted, and perhaps running
    SETTLED_WHOLE = "settled_whole"
    SETTLED_IN_PART = "settled_in_part"
    SETTLED_WITHOUT = "settled_without"


@dataclass(frozen=True, slots=True)
class WorldPlan:
    """A world's shape and temper. `trouble` scales how often things go wrong, 0 not at all."""

    seed: int
    slot_counts: tuple[int, ...]
    policies: tuple[str, ...]
    limits: Limits
    terms: Terms
    quotas: Quotas
    tells: bool  # the engine tells of prompts, keys and steps, as our connector does
    trouble: float
    copy_s: float
    audited: bool

    @classmethod
    def of_seed(cls, seed: int) -> WorldPlan:
        """The plan of a seed, always the same."""
        chance = Random(seed)
        slot_counts = [chance.choice((1, 2, 3, 4, 6, 8, 8, 12))]
        if chance.random() < 0.93:
            slot_counts.append(chance.choice((1, 2, 4, 8, 12, 16, 24, 32)))
        names = sorted(EVICTION_POLICIES)
        limits = Limits(
            write_behind_chunks=chance.choice((1, 2, 4, 16)),
            promotion_chunks=chance.choice((1, 2, 4, 16)),
            max_wait_s=MAX_WAIT_S,
            max_stall_s=MAX_STALL_S,
        )
        return cls(
            seed,
            tuple(slot_counts),
            tuple(chance.choice(names) for _ in slot_counts),
            limits,
            Terms(TOKENS_PER_CHUNK, probe_chunks=chance.choice((1, 2, 4))),
            Quotas(tenants=tuple((name, chance.choice((0.0, 0.2, 0.4))) for name in TENANTS)),
            tells=chance.random() < 0.75,
            trouble=chance.choice((0.0, 0.3, 1.0, 1.0, 2.0, 3.0)),
            copy_s=chance.choice((0.01, 0.05, 0.2)),
            audited=chance.random() < 0.125,
        )


@dataclass(slots=True)
class Seen:
    """How often what has happened."""

    counts: Counter[enum.Enum] = field(default_factory=Counter)

    def note(self, what: enum.Enum, times: int = 1) -> None:
        self.counts[what] += times


class Clock:
    """Virtual monotonic time."""

    __slots__ = ("now_s",)

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Setting:
    """What every part of one world shares."""

    def __init__(self, plan: WorldPlan, seen: Seen) -> None:
        self.plan = plan
        self.seen = seen
        self.clock = Clock()
        self.chance = Random(f"world {plan.seed}")
        self.quiet = False  # at the end nothing goes wrong any more

    def strikes(self, fault: Fault, probability: float) -> bool:
        """Whether a fault happens now; if it does it is counted."""
        if self.quiet or self.chance.random() >= probability * self.plan.trouble:
            return False
        self.seen.note(fault)
        return True


@cache
def payload_of(key: ChunkKey, epoch: int) -> bytes:
    """The bytes that the weights of an epoch compute for a chunk."""
    words = [xxhash.xxh3_128_digest(key, seed=2 * epoch + half) for half in (0, 1)]
    return b"".join(words)


assert len(payload_of(ChunkKey(b"k"), 0)) == CHUNK_BYTES
