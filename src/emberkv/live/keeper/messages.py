"""What is said over the keeper's socket: typed messages, checked when they arrive.

    client → keeper   Hello  Submit  Seal  ResetTiers  Bye  StatusRequest
    keeper → client   Attached | Refused, then Populated  Short  Found  Progress  Down  Up
                      ResetDone;  Status

Slots, keys and levels travel as plain numbers and bytes; nothing is ever unpickled. Any change
here raises `PROTOCOL` in `emberkv.live.keeper.channel`.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec

from emberkv.domain.types import Copy, Entry, Outcome


class Role(enum.StrEnum):
    """Which side of an engine speaks: the scheduler's manager, or one of the workers."""

    MANAGER = "manager"
    WORKER = "worker"


class Refusal(enum.StrEnum):
    """Why a Hello is turned down."""

    CONFIG = "config"  # the user's mistake
    WORLD = "world"  # memory, disk
    SECOND_ENGINE = "second engine"  # another engine lives here
    ENDING = "ending"  # the keeper is about to exit; ask its successor


class DiskSettings(msgspec.Struct, frozen=True, array_like=True):
    """The disk tier as the keeper is asked to open it; `root_dir` is absolute.

    A default size is cut to half of the file system's free space.
    """

    root_dir: str
    size_bytes: int
    size_is_default: bool = False
    read_threads: int = 8
    write_threads: int = 4
    reserve_bytes: int = 0


class KeeperConfig(msgspec.Struct, frozen=True, array_like=True):
    """What manager and workers of one engine must ask for alike.

    `refuse_without_disk`: a disk tier that can't be opened is a reason not to start.
    """

    slot_count: int
    chunk_bytes: int
    keep_s: float = 600.0
    disk: DiskSettings | None = None
    refuse_without_disk: bool = False


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of everything that travels."""


class Hello(Message, frozen=True, array_like=True, tag="hello"):
    """Asks to be attached.

    A manager may leave `namespace` out and learns the workers'; it is answered when
    `worker_count` of them are attached. Who was attached to a keeper that died `rejoins`; the
    manager among them brings the memory, as a descriptor beside the message, with its
    `populated_slots`, and says how many `disk_slots` there must be again. `reset_owed`: what the
    disk holds must be dropped before use.
    """

    role: Role
    engine_id: str
    pid: int
    rank: int
    config: KeeperConfig
    namespace: tuple[tuple[str, str], ...] | None
    worker_count: int = 0
    rejoins: bool = False
    populated_slots: int | None = None
    disk_slots: int | None = None
    reset_owed: bool = False


class Attached(Message, frozen=True, array_like=True, tag="attached"):
    """The answer to Hello; the arena's descriptor comes beside it.

    `slot_counts` run from RAM down. `disk_failure` says why a disk that was asked for is not
    among them.
    """

    pid: int
    namespace: tuple[tuple[str, str], ...]
    slot_counts: tuple[int, ...]
    taken_over: bool
    disk_failure: str | None


class Refused(Message, frozen=True, array_like=True, tag="refused"):
    """The other answer to Hello; the reason is a line for the user."""

    refusal: Refusal
    reason: str


class CopyOrder(msgspec.Struct, frozen=True, array_like=True):
    """A `Copy`. `parents` is only the first chunk's if each later parent is the key before."""

    transfer: int
    source: int
    target: int
    keys: tuple[bytes, ...]
    parents: tuple[bytes | None, ...]
    source_slots: tuple[int, ...]
    target_slots: tuple[int, ...]


class Submit(Message, frozen=True, array_like=True, tag="submit"):
    """Asks for copies; each chunk is answered once, in some Progress."""

    copies: tuple[CopyOrder, ...]


class Seal(Message, frozen=True, array_like=True, tag="seal"):
    """Asks for checksums of READY rows."""

    slots: tuple[int, ...]


class ResetTiers(Message, frozen=True, array_like=True, tag="reset"):
    """Asks to make everything held unusable; answered by ResetDone of the same number."""

    number: int


class Bye(Message, frozen=True, array_like=True, tag="bye"):
    """The engine stops on purpose: nothing need be kept for it."""


class StatusRequest(Message, frozen=True, array_like=True, tag="status?"):
    """May be asked by anyone of the same user, without Hello."""


class Progress(Message, frozen=True, array_like=True, tag="progress"):
    """Chunks `first` … of a copy have ended, one code of `OUTCOMES` each.

    `ended_s` is when, on the clock that all processes of a machine share.
    """

    transfer: int
    first: int
    codes: bytes
    busy_s: float
    ended_s: float


class FoundChunks(Message, frozen=True, array_like=True, tag="found"):
    """Chunks (key, parent, slot) that a tier holds from before; `last`: it has no more."""

    level: int
    entries: tuple[tuple[bytes, bytes | None, int], ...]
    last: bool


class PopulatedSlots(Message, frozen=True, array_like=True, tag="populated"):
    """RAM slots that are backed by memory and touched by nobody; workers hear of them too."""

    first_slot: int
    slot_count: int


class MemoryEnds(Message, frozen=True, array_like=True, tag="short"):
    """The arena stays at its first `slot_count` slots: there is no more memory."""

    slot_count: int
    reason: str


class Down(Message, frozen=True, array_like=True, tag="down"):
    """A tier can't be used for now."""

    level: int
    reason: str


class Up(Message, frozen=True, array_like=True, tag="up"):
    """A tier that was down can be used; what it holds is named next."""

    level: int
    slot_count: int


class ResetDone(Message, frozen=True, array_like=True, tag="reset done"):
    """A reset is durable, or why it is not."""

    number: int
    reason: str | None


class Holder(msgspec.Struct, frozen=True, array_like=True):
    """An attached process."""

    role: Role
    pid: int
    rank: int


class Status(Message, frozen=True, array_like=True, tag="status"):
    """How a keeper is doing. `seconds_left` is how long it will wait for a new engine."""

    pid: int
    instance: str
    namespace: tuple[tuple[str, str], ...]
    arena_bytes: int
    ready_chunks: int
    holders: tuple[Holder, ...]
    age_s: float
    seconds_left: float | None
    disk: str
    chunks_under_way: int


ToKeeper = Hello | Submit | Seal | ResetTiers | Bye | StatusRequest
FromKeeper = (
    Attached
    | Refused
    | Progress
    | FoundChunks
    | PopulatedSlots
    | MemoryEnds
    | Down
    | Up
    | ResetDone
    | Status
)

OUTCOMES = tuple(Outcome)
OUTCOME_CODES = {outcome: code for code, outcome in enumerate(OUTCOMES)}

_encoder = msgspec.msgpack.Encoder()
_keeper_decoder = msgspec.msgpack.Decoder(ToKeeper)
_client_decoder = msgspec.msgpack.Decoder(FromKeeper)

encode = _encoder.encode


def decode_for_keeper(frame: bytes) -> ToKeeper:
    """A message from a client. Raises `msgspec.MsgspecError` for anything else."""
    return _keeper_decoder.decode(frame)


def decode_for_client(frame: bytes) -> FromKeeper:
    """A message from the keeper. Raises `msgspec.MsgspecError` for anything else."""
    return _client_decoder.decode(frame)


def order_of(copy: Copy) -> CopyOrder:
    """A copy as it travels."""
    chained = copy.parents[1:] == copy.keys[:-1]
    return CopyOrder(
        copy.transfer,
        copy.source,
        copy.target,
        copy.keys,
        copy.parents[:1] if chained else copy.parents,
        copy.source_slots,
        copy.target_slots,
    )


def parents_of(order: CopyOrder) -> tuple[bytes | None, ...]:
    """The parent of each chunk of a copy that has arrived."""
    if len(order.parents) == len(order.keys):
        return order.parents
    return (*order.parents, *order.keys[:-1])


def found(level: int, entries: Sequence[Entry], *, last: bool) -> FoundChunks:
    """Entries as they travel."""
    return FoundChunks(level, tuple((e.key, e.parent, e.slot) for e in entries), last)
