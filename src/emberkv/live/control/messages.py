"""What is said over the control socket: typed messages, checked when they arrive.

    client → server   StatusRequest  SetGate  SetPolicy  SetBudget  Purge  WhyRequest  WhyPrompt
    server → client   ServerStatus   Done     Explanation   Refused

Any change here that an older side would misread raises `PROTOCOL`.
"""

from __future__ import annotations

import enum
from typing import Any, Final

import msgspec

PROTOCOL: Final = 0x0001_4B43
"""Client and server must be of the same."""

MAX_REQUEST_BYTES: Final = 16 << 20
MAX_ANSWER_BYTES: Final = 256 << 20
MAX_TOKENS: Final = 2_000_000
MAX_NAME_CHARACTERS: Final = 512


class GateName(enum.StrEnum):
    """How far a tier is to be open."""

    ON = "on"
    DRAIN = "drain"
    OFF = "off"


class PurgeScope(enum.StrEnum):
    """What is to be forgotten."""

    RAM = "ram"
    DISK = "disk"
    ALL = "all"


class Message(msgspec.Struct, frozen=True, tag_field="is"):
    """Base of everything that travels."""


# ── what a client asks ───────────────────────────────────────────────────────────────────────────


class StatusRequest(Message, frozen=True, tag="status?"):
    """Asks for a `ServerStatus`."""


class SetGate(Message, frozen=True, tag="gate"):
    """Opens, drains or shuts a tier; ends in `Done`."""

    tier: str
    gate: GateName


class SetPolicy(Message, frozen=True, tag="policy"):
    """Changes a tier's eviction policy; ends in `Done`."""

    tier: str
    policy: str


class SetBudget(Message, frozen=True, tag="budget"):
    """Changes limits in force; ends in `Done`, and all of them or none are changed."""

    limits: dict[str, float]


class Purge(Message, frozen=True, tag="purge"):
    """Forgets chunks; ends in `Done` once that is durable."""

    scope: PurgeScope


class WhyRequest(Message, frozen=True, tag="why request?"):
    """Asks for an `Explanation` of a request that was there."""

    request: str


class WhyPrompt(Message, frozen=True, tag="why prompt?"):
    """Asks for an `Explanation` of what a prompt would find now."""

    tokens: list[int]
    cache_salt: str | None = None


Request = StatusRequest | SetGate | SetPolicy | SetBudget | Purge | WhyRequest | WhyPrompt


# ── what a server answers ────────────────────────────────────────────────────────────────────────


class TierStatus(Message, frozen=True, tag="tier"):
    """One tier. `arriving` and `leaving` are chunks being copied to and from it."""

    name: str
    capacity_bytes: int
    used_bytes: int
    chunks: int
    pinned_chunks: int
    arriving_chunks: int
    leaving_chunks: int
    up: bool
    why_down: str | None
    gate: str
    load_share: float
    stores: bool
    eviction_policy: str


class WaitStatus(Message, frozen=True, tag="waits"):
    """The last `count` waits for promotions that ended; None without any."""

    count: int
    p50_s: float | None
    p99_s: float | None
    max_s: float | None


class Occurrence(Message, frozen=True, tag="occurrence"):
    """An event of late: what happened in a tier to how many chunks, how long ago."""

    age_s: float
    event: str
    tier: str | None
    chunks: int


class ServerStatus(Message, frozen=True, tag="status"):
    """How a server's tiers are. Totals are since its start; requests count when they end.

    `facts` holds what other parts of the server say of themselves, by name.
    """

    instance: str
    version: str
    pid: int
    keeper_pid: int | None
    serving: bool
    uptime_s: float
    namespace: str | None
    tokens_per_chunk: int
    chunk_bytes: int
    tiers: tuple[TierStatus, ...]
    requests_here: int
    requests_waiting: int
    tokens_by_source: dict[str, int]
    requests_by_reason: dict[str, int]
    chunks_by_event: dict[str, dict[str, int]]
    copied_bytes: dict[str, int]
    waits: WaitStatus
    limits: dict[str, float]
    occurrences: tuple[Occurrence, ...]
    facts: dict[str, Any]


class Done(Message, frozen=True, tag="done"):
    """A command has been carried out. `undone` says what of it could not be, if anything."""

    what: str
    undone: str | None = None


class Refused(Message, frozen=True, tag="refused"):
    """A command was not carried out; `mistake` if the one who asked must mend something."""

    reason: str
    mistake: bool


class Place(enum.StrEnum):
    """Where a chunk is, or was for a request that has been answered."""

    DEVICE = "device"  # the engine's own cache had it
    RAM = "ram"
    DISK = "disk"
    COMING = "coming"  # on its way up from disk
    WRITING = "writing"  # being computed, and stored as soon as that is done
    NOWHERE = "nowhere"


class Happened(Message, frozen=True, tag="happened"):
    """Something that happened to a chunk. `policy` is the one that chose it to be evicted.

    Without an event its whole tier, or every tier, was emptied, by `cause`.
    """

    age_s: float
    event: str | None
    tier: str | None
    policy: str | None = None
    cause: str | None = None


class Stretch(Message, frozen=True, tag="stretch"):
    """Chunks `first` … `end - 1` of a chain, to which the same applies.

    `usable`: a request gets them from there. `reason` says why not, in the words of the request
    log where those have one. `happened` is told of the first of them, oldest first. `keys` are
    given of chunks that are nowhere here.
    """

    first: int
    end: int
    place: Place
    usable: bool
    reason: str | None
    happened: tuple[Happened, ...] = ()
    asked_before: str | None = None
    keys: tuple[bytes, ...] = ()


class AskedRequest(Message, frozen=True, tag="asked request"):
    """A request that is or was there. `age_s` is since its arrival."""

    request: str
    external_id: str | None
    age_s: float
    ended: bool
    device_tokens: int
    ram_tokens: int
    disk_tokens: int
    wait_s: float
    load_s: float
    stored_chunks: int
    preemptions: int
    why_not_more: str


class Explanation(Message, frozen=True, tag="explanation"):
    """Where each chunk of a prompt is, or was when a request was answered.

    `request` is None for a dry run. `all_known`: the whole prompt's chunks are named; else only
    those that were looked up. The record of what happened begins `record_age_s` ago. `root_dir`
    is the disk tier's directory, `fields` are those of the namespace.
    """

    instance: str
    request: AskedRequest | None
    prompt_tokens: int | None
    tokens_per_chunk: int
    all_known: bool
    stretches: tuple[Stretch, ...]
    record_age_s: float | None
    root_dir: str | None
    namespace: str | None
    fields: dict[str, str]


Answer = ServerStatus | Done | Refused | Explanation

_REQUESTS: Final = msgspec.msgpack.Decoder(Request)
_ANSWERS: Final = msgspec.msgpack.Decoder(Answer)
_ENCODER: Final = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """A message's payload."""
    return _ENCODER.encode(message)


def decode_request(payload: bytes) -> Request:
    """What a client asks. Raises `msgspec.MsgspecError` for anything else."""
    return _REQUESTS.decode(payload)


def decode_answer(payload: bytes) -> Answer:
    """What a server answers. Raises `msgspec.MsgspecError` for anything else."""
    return _ANSWERS.decode(payload)
