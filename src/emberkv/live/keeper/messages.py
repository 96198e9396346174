"""What is said over the keeper's socket: typed messages, checked when they arrive.

    client → keeper   Hello  Submit  Seal  ResetTiers  Bye  StatusRequest
    keeper → client   Attached | Refused, then Populated  Short  Found  Progress  Down  Up
                      ResetDone;  Status

Slots, keys and levels travel as plain numbers and bytes; nothing is ever unpickled. What a message
can't mean by itself (a negative count, a key too long) is refused here; what it can't mean to its
receiver (a slot that there is not) by the receiver. Any change here raises `PROTOCOL` in
`emberkv.live.keeper.channel`.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from emberkv.domain.types import MAX_KEY_BYTES, Copy, Entry, Outcome

MAX_COUNT: Final = 1 << 48
MAX_THREADS: Final = 1024
MAX_SECONDS: Final = 1e9

Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Positive = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
Threads = Annotated[int, Meta(ge=1, le=MAX_THREADS)]
Seconds = Annotated[float, Meta(ge=0, le=MAX_SECONDS)]
TierLevel = Annotated[int, Meta(ge=0, le=1)]
Key = Annotated[bytes, Meta(min_length=1, max_length=MAX_KEY_BYTES)]
Name = Annotated[str, Meta(min_length=1, max_length=1 << 10)]
Slots = tuple[Count, ...]
Fields = tuple[tuple[str, str], ...]


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
    size_bytes: Count
    size_is_default: bool = False
    read_threads: Threads = 8
    write_threads: Threads = 4
    reserve_bytes: Count = 0


class KeeperConfig(msgspec.Struct, frozen=True, array_like=True):
    """What manager and workers of one engine must ask for alike.

    `refuse_without_disk`: a disk tier that can't be opened is a reason not to start.
    """

    slot_count: Positive
    chunk_bytes: Positive
    keep_s: Seconds = 600.0
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
    disk holds must be dropped before use; `renewed` as in `ResetTiers`.
    """

    role: Role
    engine_id: Name
    pid: Count
    rank: Count
    config: KeeperConfig
    namespace: Fields | None
    worker_count: Count = 0
    rejoins: bool = False
    populated_slots: Count | None = None
    disk_slots: Positive | None = None
    reset_owed: bool = False
    renewed: bool = False

    def __post_init__(self) -> None:
        _require_named_once(self.namespace or ())
        if self.populated_slots is not None and self.populated_slots > self.config.slot_count:
            raise ValueError("more slots are populated than there are")


class Attached(Message, frozen=True, array_like=True, tag="attached"):
    """The answer to Hello; the arena's descriptor comes beside it.

    `slot_counts` run from RAM down. `disk_failure` says why a disk that was asked for is not
    among them.
    """

    pid: Count
    namespace: Fields
    slot_counts: Annotated[tuple[Positive, ...], Meta(min_length=1, max_length=2)]
    taken_over: bool
    disk_failure: str | None

    def __post_init__(self) -> None:
        _require_named_once(self.namespace)


class Refused(Message, frozen=True, array_like=True, tag="refused"):
    """The other answer to Hello; the reason is a line for the user."""

    refusal: Refusal
    reason: str


class CopyOrder(msgspec.Struct, frozen=True, array_like=True):
    """A `Copy`. `parents` is only the first chunk's if each later parent is the key before."""

    transfer: Number
    source: TierLevel
    target: TierLevel
    keys: Annotated[tuple[Key, ...], Meta(min_length=1)]
    parents: tuple[Key | None, ...]
    source_slots: Slots
    target_slots: Slots

    def __post_init__(self) -> None:
        count = len(self.keys)
        if {len(self.source_slots), len(self.target_slots)} != {count}:
            raise ValueError("a copy names a source and a target for each chunk")
        if len(self.parents) not in {1, count}:
            raise ValueError("a copy names the first chunk's parent, or every one's")


class Submit(Message, frozen=True, array_like=True, tag="submit"):
    """Asks for copies; each chunk is answered once, in some Progress."""

    copies: tuple[CopyOrder, ...]


class Seal(Message, frozen=True, array_like=True, tag="seal"):
    """Asks for checksums of READY rows."""

    slots: Slots


class ResetTiers(Message, frozen=True, array_like=True, tag="reset"):
    """Asks to make everything held unusable; answered by ResetDone of the same number.

    If the engine is `renewed`, its weights may not be those of its namespace any more: what it
    stores from here on is for no other engine.
    """

    number: Number
    renewed: bool = False


class Bye(Message, frozen=True, array_like=True, tag="bye"):
    """The engine stops on purpose: nothing need be kept for it."""


class StatusRequest(Message, frozen=True, array_like=True, tag="status?"):
    """May be asked by anyone of the same user, without Hello."""


class Progress(Message, frozen=True, array_like=True, tag="progress"):
    """Chunks `first` … of a copy have ended, one code of `OUTCOMES` each.

    `ended_s` is when, on the clock that all processes of a machine share.
    """

    transfer: Number
    first: Count
    codes: bytes
    busy_s: Seconds
    ended_s: Seconds

    def __post_init__(self) -> None:
        if self.codes and max(self.codes) >= len(OUTCOMES):
            raise ValueError("a code that names no outcome")


class FoundChunks(Message, frozen=True, array_like=True, tag="found"):
    """Chunks (key, parent, slot) that a tier holds from before; `last`: it has no more."""

    level: TierLevel
    entries: tuple[tuple[Key, Key | None, Count], ...]
    last: bool


class PopulatedSlots(Message, frozen=True, array_like=True, tag="populated"):
    """RAM slots that are backed by memory and touched by nobody; workers hear of them too."""

    first_slot: Count
    slot_count: Count


class MemoryEnds(Message, frozen=True, array_like=True, tag="short"):
    """The arena stays at its first `slot_count` slots: there is no more memory."""

    slot_count: Count
    reason: str


class Down(Message, frozen=True, array_like=True, tag="down"):
    """A tier can't be used for now."""

    level: TierLevel
    reason: str


class Up(Message, frozen=True, array_like=True, tag="up"):
    """A tier that was down can be used; what it holds is named next."""

    level: TierLevel
    slot_count: Count


class ResetDone(Message, frozen=True, array_like=True, tag="reset done"):
    """A reset is durable, or why it is not."""

    number: Number
    reason: str | None


class Holder(msgspec.Struct, frozen=True, array_like=True):
    """An attached process."""

    role: Role
    pid: Count
    rank: Count


class Status(Message, frozen=True, array_like=True, tag="status"):
    """How a keeper is doing. `seconds_left` is how long it will wait for a new engine."""

    pid: Count
    instance: str
    namespace: Fields
    arena_bytes: Number
    ready_chunks: Count
    holders: tuple[Holder, ...]
    age_s: Seconds
    seconds_left: Seconds | None
    disk: str
    chunks_under_way: Count


def _require_named_once(fields: Fields) -> None:
    names = [name for name, _ in fields]
    if len(set(names)) != len(names) or not all(names):
        raise ValueError("a namespace names each field once")


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
    try:
        return _keeper_decoder.decode(frame)
    except RecursionError as error:
        raise msgspec.DecodeError("nested too deeply") from error


def decode_for_client(frame: bytes) -> FromKeeper:
    """A message from the keeper. Raises `msgspec.MsgspecError` for anything else."""
    try:
        return _client_decoder.decode(frame)
    except RecursionError as error:
        raise msgspec.DecodeError("nested too deeply") from error


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
