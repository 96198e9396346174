"""Junk on the keeper's socket, in both directions: refused or meant, never an accident."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator, Sequence

import msgspec
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from junk import WIDE_EXTREMES, damaged, nested, plain_values, reshaped

from emberkv.domain.types import DISK, MAX_KEY_BYTES, RAM, ChunkKey, Copy, Slot, TransferId
from emberkv.errors import ConfigError, EmberError, KeeperError
from emberkv.live.arena import ArenaGeometry, create_memory
from emberkv.live.driver import CopyProgress, Found, Populated
from emberkv.live.keeper.channel import MAX_FRAME_BYTES, PROTOCOL, Channel
from emberkv.live.keeper.client import KeeperClient
from emberkv.live.keeper.joining import Joined, Joining, Place
from emberkv.live.keeper.messages import (
    OUTCOMES,
    Attached,
    Bye,
    CopyOrder,
    DiskSettings,
    Down,
    FoundChunks,
    Hello,
    KeeperConfig,
    MemoryEnds,
    PopulatedSlots,
    Progress,
    Refusal,
    Refused,
    ResetDone,
    ResetTiers,
    Role,
    Seal,
    Status,
    StatusRequest,
    Submit,
    Up,
    decode_for_client,
    decode_for_keeper,
    encode,
    parents_of,
)
from emberkv.live.keeper.tenancy import require_arena
from emberkv.live.keeper.worker import WorkerAttachment

RAM_SLOTS, DISK_SLOTS, CHUNK_BYTES = 8, 20, 4096
GEOMETRY = ArenaGeometry(RAM_SLOTS, CHUNK_BYTES)
SETTINGS = DiskSettings("somewhere", 1 << 20)
CONFIG = KeeperConfig(RAM_SLOTS, CHUNK_BYTES, 600.0, SETTINGS)
HELLO = Hello(Role.MANAGER, "engine", 1, 0, CONFIG, (("model", "m"),), worker_count=1)
FIELDS = (("model", "m"),)
PLACE = Place("fuzz", "engine")

keys = st.binary(min_size=1, max_size=MAX_KEY_BYTES)
slots = st.integers(0, DISK_SLOTS + 2)


@st.composite
def orders(draw: st.DrawFn) -> CopyOrder:
    count = draw(st.integers(1, 4))
    some = st.lists(slots, min_size=count, max_size=count).map(tuple)
    source = draw(st.sampled_from([RAM, DISK]))
    chunk_keys = tuple(draw(st.lists(keys, min_size=count, max_size=count)))
    return CopyOrder(
        draw(st.integers(0, 9)), source, 1 - source, chunk_keys, (None,), draw(some), draw(some)
    )


to_keeper = (
    st.just(HELLO)
    | st.builds(Submit, st.lists(orders(), max_size=3).map(tuple))
    | st.builds(Seal, st.lists(slots, max_size=5).map(tuple))
    | st.builds(ResetTiers, st.integers(0, 9))
    | st.just(Bye())
    | st.just(StatusRequest())
)
entries = st.lists(st.tuples(keys, st.none() | keys, slots), max_size=4).map(tuple)
seconds = st.floats(0, 9)
levels = st.integers(0, 1)
codes = st.lists(st.integers(0, len(OUTCOMES) - 1), max_size=5).map(bytes)
from_keeper = (
    st.just(Attached(1, FIELDS, (RAM_SLOTS, DISK_SLOTS), False, None))
    | st.builds(Refused, st.sampled_from(Refusal), st.text(max_size=9))
    | st.builds(Progress, st.integers(0, 3), st.integers(0, 5), codes, st.floats(0, 9), seconds)
    | st.builds(FoundChunks, levels, entries, st.booleans())
    | st.builds(PopulatedSlots, st.integers(0, RAM_SLOTS), st.integers(0, RAM_SLOTS))
    | st.builds(MemoryEnds, st.integers(0, RAM_SLOTS), st.text(max_size=9))
    | st.builds(Down, levels, st.text(max_size=9))
    | st.builds(Up, levels, st.integers(0, DISK_SLOTS))
    | st.builds(ResetDone, st.integers(0, 3), st.none() | st.text(max_size=9))
    | st.just(Status(1, "i", FIELDS, 1, 0, (), 0.0, None, "up", 0))
)


def junk_for(messages: st.SearchStrategy[msgspec.Struct]) -> st.SearchStrategy[bytes]:
    return (
        messages.map(encode)
        | reshaped(messages)
        | damaged(messages.map(encode))
        | plain_values.map(msgspec.msgpack.encode)
        | st.binary(max_size=60)
        | st.sampled_from([10, 500, 5000, 200_000]).map(nested)
    )


# ── messages ─────────────────────────────────────────────────────────────────────────────────────


def numbers_in(node: object) -> Iterator[int]:
    if isinstance(node, list):
        for child in node:
            yield from numbers_in(child)
    elif isinstance(node, int):
        yield node


@given(junk_for(to_keeper))
@example(nested(1_000_000))
@example(encode(HELLO) * 2)
def test_what_a_client_sends_is_refused_or_meant(raw: bytes) -> None:
    try:
        message = decode_for_keeper(raw)
    except msgspec.MsgspecError:
        return
    assert decode_for_keeper(encode(message)) == message
    assert all(number >= 0 for number in numbers_in(msgspec.msgpack.decode(encode(message))))
    match message:
        case Hello(config=config):
            assert min(config.slot_count, config.chunk_bytes) > 0
            assert (message.populated_slots or 0) <= config.slot_count
            assert config.keep_s < float("inf")
        case Submit(copies):
            for order in copies:
                assert len(parents_of(order)) == len(order.keys) == len(order.source_slots) > 0
                assert all(0 < len(key) <= MAX_KEY_BYTES for key in order.keys)
        case _:
            pass


@given(junk_for(from_keeper))
def test_what_a_keeper_sends_is_refused_or_meant(raw: bytes) -> None:
    try:
        message = decode_for_client(raw)
    except msgspec.MsgspecError:
        return
    assert decode_for_client(encode(message)) == message
    if isinstance(message, Progress):
        assert all(code < len(OUTCOMES) for code in message.codes)


@pytest.mark.parametrize(
    "change",
    [
        {"slot_count": 0},
        {"slot_count": -1},
        {"chunk_bytes": 0},
        {"chunk_bytes": 1 << 60},
        {"keep_s": -1.0},
        {"keep_s": float("nan")},
        {"keep_s": float("inf")},
        {"disk": msgspec.structs.replace(SETTINGS, read_threads=0)},
        {"disk": msgspec.structs.replace(SETTINGS, write_threads=1 << 20)},
    ],
)
def test_a_configuration_that_no_keeper_can_mean_is_the_users_mistake(
    change: dict[str, object],
) -> None:
    hello = msgspec.structs.replace(HELLO, config=msgspec.structs.replace(CONFIG, **change))
    with pytest.raises(msgspec.MsgspecError):
        decode_for_keeper(encode(hello))
    with pytest.raises(ConfigError, match="no keeper can be asked"):
        Joining(PLACE, hello, timeout_s=0.0, may_start=False)


# ── framing ──────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def pair() -> Iterator[tuple[socket.socket, Channel]]:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    channel = Channel(other, takes_descriptors=True)
    try:
        yield one, channel
    finally:
        one.close()
        channel.close()


def framed(payload: bytes) -> bytes:
    return struct.pack("<II", PROTOCOL, len(payload)) + payload


def frames_of(stream: bytes) -> tuple[list[bytes], bool]:
    """What a stream says, read the plain way: its whole frames, and whether it goes wrong."""
    found = []
    while len(stream) >= 8:
        protocol, length = struct.unpack("<II", stream[:8])
        if protocol != PROTOCOL or length > MAX_FRAME_BYTES:
            return found, True
        if len(stream) < 8 + length:
            break
        found.append(stream[8 : 8 + length])
        stream = stream[8 + length :]
    return found, False


headers = st.builds(
    lambda protocol, length: struct.pack("<II", protocol, length),
    st.just(PROTOCOL) | st.integers(0, 2**32 - 1),
    st.sampled_from([each for each in WIDE_EXTREMES if each < 2**32]) | st.integers(0, 40),
)
streams = st.lists(st.binary(max_size=40).map(framed) | headers | st.binary(max_size=12)).map(
    b"".join
)


@given(streams | damaged(streams.filter(bool)), st.lists(st.integers(1, 30)))
def test_a_stream_is_read_alike_in_whatever_pieces(stream: bytes, sizes: Sequence[int]) -> None:
    frames, goes_wrong = frames_of(stream)
    found: list[bytes] = []
    with pair() as (sender, channel):
        rest = stream
        for size in [*sizes, len(stream)]:
            with contextlib.suppress(BrokenPipeError):
                sender.sendall(rest[:size])
            rest = rest[size:]
            found += channel.receive()
        assert channel.closed == goes_wrong
    assert found == frames


def test_a_length_that_is_announced_takes_no_memory() -> None:
    with pair() as (sender, channel):
        sender.sendall(struct.pack("<II", PROTOCOL, MAX_FRAME_BYTES) + b"x")
        assert channel.receive() == []
        assert not channel.closed
        assert len(channel._received) == 9


# ── who listens to a keeper ──────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def memory_fd() -> Iterator[int]:
    fd = create_memory(GEOMETRY)
    yield fd
    os.close(fd)


@given(raw=junk_for(from_keeper), with_memory=st.booleans())
def test_an_answer_to_hello_attaches_or_says_why_not(
    memory_fd: int, raw: bytes, with_memory: bool
) -> None:
    joining = Joining(PLACE, HELLO, timeout_s=0.0, may_start=False)
    with pair() as (sender, channel):
        with contextlib.suppress(BlockingIOError):
            sender.setblocking(False)
            socket.send_fds(sender, [framed(raw)], [memory_fd] if with_memory else [])
        frames = channel.receive()
        assume(frames)  # the socket has taken it whole
        try:
            joined = joining._answered(channel, frames, PLACE.instance)
        except EmberError as error:
            assert isinstance(error, (ConfigError, KeeperError))  # noqa: PT017
            assert channel.closed
            return
        if joined is None:
            assert channel.closed
            return
        assert with_memory
        assert joined.answer.slot_counts[RAM] == RAM_SLOTS
        os.close(joined.memory_fd)


@contextlib.contextmanager
def attached(memory_fd: int) -> Iterator[tuple[socket.socket, KeeperClient]]:
    """A client, and the keeper's end of its socket. When the keeper is lost, it stays lost."""
    with pair() as (keeper, channel):
        answer = Attached(1, FIELDS, (RAM_SLOTS, DISK_SLOTS), False, None)
        joined = Joined(channel, answer, os.dup(memory_fd), PLACE.instance, [])
        client = KeeperClient(PLACE, HELLO, joined)
        try:
            yield keeper, client
        finally:
            client.close(clean=False)


def copy(transfer: int, count: int) -> Copy:
    chain = tuple(ChunkKey(b"%d-%d" % (transfer, at)) for at in range(count))
    numbers = tuple(Slot(at) for at in range(count))
    return Copy(TransferId(transfer), RAM, DISK, chain, (None, *chain[:-1]), numbers, numbers)


@given(st.lists(junk_for(from_keeper), max_size=6))
@example([encode(Progress(1, 0, b"\0\0\0", 0.0, 0.0)), encode(Progress(1, 2, b"\0", 0.0, 0.0))])
@example([encode(Progress(2, 1 << 40, b"\0", 0.0, 0.0))])
@example([encode(PopulatedSlots(1, 1 << 40))])
@example([encode(FoundChunks(1, ((b"k", None, DISK_SLOTS),), True))])
@example([nested(100_000)])
def test_a_manager_hears_only_what_can_be(memory_fd: int, raws: list[bytes]) -> None:
    assume(sum(map(len, raws)) < 100_000)  # the socket takes it whole
    ended: dict[int, set[int]] = {0: set(), 1: set(), 2: set()}
    with rejoining_never(), attached(memory_fd) as (keeper, client):
        client.submit([copy(transfer, 3) for transfer in ended])
        for raw in raws:
            keeper.sendall(framed(raw))
        reports = [*client.poll(), *client.poll()]
        lost = client._channel.closed
        for report in reports:
            match report:
                case CopyProgress():
                    for index, _ in report.results:
                        assert index in range(3)
                        assert index not in ended[report.transfer]
                        ended[report.transfer].add(index)
                case Found():
                    limit = (RAM_SLOTS, DISK_SLOTS)[report.level]
                    assert all(0 <= entry.slot < limit for entry in report.entries)
                    assert all(0 < len(entry.key) <= MAX_KEY_BYTES for entry in report.entries)
                case Populated(first, count):
                    assert 0 <= first <= first + count <= RAM_SLOTS
                case _:
                    pass
        if lost:
            assert all(indices == {0, 1, 2} for indices in ended.values())


class NoKeeper:
    """In place of `Rejoining`: nobody starts a keeper for these clients."""

    def __init__(self, *arguments: object) -> None:
        del arguments

    def stop(self) -> None:
        pass


@contextlib.contextmanager
def rejoining_never() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in ("client", "worker"):
            patch.setattr(f"emberkv.live.keeper.{module}.Rejoining", NoKeeper)
        yield


@given(st.lists(junk_for(from_keeper), max_size=4))
@example([encode(PopulatedSlots(1, 1 << 40))])
@example([encode(PopulatedSlots(1 << 47, 1))])
@example([b"junk"])
def test_a_worker_hears_only_what_can_be(memory_fd: int, raws: list[bytes]) -> None:
    assume(sum(map(len, raws)) < 100_000)
    hello = msgspec.structs.replace(HELLO, role=Role.WORKER)
    answer = Attached(1, FIELDS, (RAM_SLOTS,), False, None)
    with rejoining_never(), pair() as (keeper, channel):
        joined = Joined(channel, answer, os.dup(memory_fd), PLACE.instance, [])
        worker = WorkerAttachment(PLACE, hello, joined)
        with contextlib.suppress(BrokenPipeError):
            for raw in raws:
                keeper.sendall(framed(raw))
        worker.close()  # joins the thread that listens; an exception there would be a warning


def memory_of_right_size() -> int:
    fd = os.memfd_create("junk", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, GEOMETRY.total_bytes)
    return fd


STRANGE_MEMORY = {
    "a device": lambda: os.open("/dev/null", os.O_RDWR),
    "a directory": lambda: os.open("/", os.O_RDONLY),
    "an empty one": lambda: os.memfd_create("junk"),
    "an event": lambda: os.eventfd(0),
    "one that may shrink": memory_of_right_size,
    "another size": lambda: create_memory(ArenaGeometry(RAM_SLOTS + 1, CHUNK_BYTES)),
}


@pytest.mark.parametrize("kind", STRANGE_MEMORY)
def test_memory_that_is_no_arenas_is_refused(kind: str) -> None:
    fd = STRANGE_MEMORY[kind]()
    try:
        with pytest.raises(KeeperError):
            require_arena(fd, CONFIG)
    finally:
        os.close(fd)
