"""A live keeper that strangers feed junk: it lives on, serves its engine, and takes no memory."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from junk import damaged, nested, plain_values, reshaped
from keeper_processes import NAMES, SLOTS, Process, Stage, until

from emberkv.live.arena import ArenaGeometry
from emberkv.live.keeper.address import try_connect
from emberkv.live.keeper.channel import MAX_FRAME_BYTES, PROTOCOL
from emberkv.live.keeper.messages import (
    Bye,
    CopyOrder,
    Hello,
    KeeperConfig,
    ResetTiers,
    Role,
    Seal,
    StatusRequest,
    Submit,
    encode,
)

CONVERSATIONS = 60
MAX_GROWTH_BYTES = 64 << 20

hello = Hello(Role.MANAGER, "stranger", 1, 0, KeeperConfig(SLOTS, 8192), (("model", "m"),))
messages = st.sampled_from(
    [
        hello,
        msgspec.structs.replace(hello, role=Role.WORKER),
        msgspec.structs.replace(hello, rejoins=True, populated_slots=SLOTS),
        Submit((CopyOrder(1, 0, 1, (b"k",), (None,), (0,), (0,)),)),
        Seal((0, 1)),
        ResetTiers(1),
        Bye(),
        StatusRequest(),
    ]
)
junk = (
    messages.map(encode)
    | reshaped(messages)
    | damaged(messages.map(encode))
    | plain_values.map(msgspec.msgpack.encode)
    | st.sampled_from([100, 100_000]).map(nested)
)


def framed(payload: bytes) -> bytes:
    return struct.pack("<II", PROTOCOL, len(payload)) + payload


pieces = junk.map(framed) | st.binary(max_size=40) | damaged(junk.map(framed))


@contextlib.contextmanager
def stranger(play: Stage) -> Iterator[socket.socket]:
    """A connection of this user's to the keeper."""
    sock = try_connect(play.instance)
    assert sock is not None
    with sock:
        sock.settimeout(10)
        yield sock


def memory_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def serves(engine: Process, transfer: int) -> None:
    """The engine gets its chunks down and up again."""
    down = {"ram_slot": 0, "disk_slot": 0, "up": False, "wait": True}
    assert engine.do("copy", transfer=transfer, names=NAMES, **down)["outcomes"] == ["ok"] * 6
    up = {"ram_slot": 10, "disk_slot": 0, "up": True, "wait": True}
    assert engine.do("copy", transfer=transfer + 1, names=NAMES, **up)["outcomes"] == ["ok"] * 6
    assert engine.do("holds", names=NAMES, first_slot=10)["same"] == [True] * 6


def sends_until_cut_off(sock: socket.socket, piece: bytes, growth_bytes: Callable[[], int]) -> None:
    with contextlib.suppress(ConnectionError):
        while True:
            assert growth_bytes() < MAX_GROWTH_BYTES
            sock.sendall(piece)


@pytest.fixture
def engine(play: Stage) -> Process:
    made, _ = play.with_disk().engine("a")
    made.do("found")
    made.do("store", names=NAMES, first_slot=0)
    return made


def pid_of(play: Stage) -> int:
    status = play.status()
    assert status is not None
    return status.pid


def test_a_keeper_that_is_fed_junk_serves_its_engine(play: Stage, engine: Process) -> None:
    pid = pid_of(play)
    before_bytes, before_files = memory_bytes(pid), descriptors(pid)

    @settings(max_examples=CONVERSATIONS, suppress_health_check=list(HealthCheck), database=None)
    @given(talk=st.lists(pieces, max_size=8), with_file=st.booleans(), cut=st.booleans())
    def feed(talk: list[bytes], with_file: bool, cut: bool) -> None:
        with stranger(play) as sock, contextlib.suppress(ConnectionError):
            for piece in talk:
                if with_file and piece:
                    socket.send_fds(sock, [piece], [0])
                else:
                    sock.sendall(piece[: len(piece) // 2] if cut else piece)

    feed()
    serves(engine, 10)
    assert pid_of(play) == pid
    until(lambda: descriptors(pid) <= before_files, "what strangers opened is closed")
    assert memory_bytes(pid) - before_bytes < MAX_GROWTH_BYTES
    assert "Traceback" not in play.log.read_text()


def test_who_asks_without_reading_is_cut_off(play: Stage, engine: Process) -> None:
    pid = pid_of(play)
    before_bytes = memory_bytes(pid)
    asked = framed(encode(StatusRequest())) * 1000
    with stranger(play) as sock:
        sends_until_cut_off(sock, asked, lambda: memory_bytes(pid) - before_bytes)
    assert memory_bytes(pid) - before_bytes < MAX_GROWTH_BYTES
    serves(engine, 10)


@pytest.mark.parametrize("length", [(1 << 20) + 1, MAX_FRAME_BYTES + 1, 2**32 - 1])
def test_a_stranger_gets_no_memory_for_a_long_message(
    play: Stage, engine: Process, length: int
) -> None:
    pid = pid_of(play)
    before_bytes = memory_bytes(pid)
    with stranger(play) as sock:
        sock.sendall(struct.pack("<II", PROTOCOL, length))
        sends_until_cut_off(sock, bytes(1 << 16), lambda: memory_bytes(pid) - before_bytes)
    serves(engine, 10)


def test_descriptors_of_strangers_are_closed(play: Stage, engine: Process) -> None:
    pid = pid_of(play)
    before_files = descriptors(pid)
    with stranger(play) as sock:
        for _ in range(200):
            socket.send_fds(sock, [framed(encode(StatusRequest()))], [0])
            assert sock.recv(1 << 16)
        assert descriptors(pid) < before_files + 20
    until(lambda: descriptors(pid) <= before_files, "they are closed")
    serves(engine, 10)


def test_a_second_hello_ends_the_conversation(play: Stage, engine: Process) -> None:
    said = framed(encode(hello))
    with stranger(play) as sock:
        sock.sendall(said + said)
        assert sock.recv(1 << 16) == b""
    serves(engine, 10)


def test_memory_that_may_shrink_is_turned_down(play: Stage, engine: Process) -> None:
    engine.do("close")
    until(lambda: play.listeners() == [], "the keeper ends")
    worker = play.process()
    play.config["disk"] = None
    play.join(worker, ["worker"], "a")
    geometry = ArenaGeometry(SLOTS, play.config["chunk_bytes"])
    loose = os.memfd_create("loose")
    os.ftruncate(loose, geometry.total_bytes)
    rejoining = Hello(
        Role.MANAGER,
        "a",
        os.getpid(),
        0,
        KeeperConfig(SLOTS, play.config["chunk_bytes"], 600.0),
        tuple((play.namespace or {}).items()),
        rejoins=True,
        populated_slots=SLOTS,
    )
    try:
        with stranger(play) as sock:
            socket.send_fds(sock, [framed(encode(rejoining))], [loose])
            assert b"may shrink" in sock.recv(1 << 16)
        status = play.status()
        assert status is not None
        assert status.arena_bytes == geometry.total_bytes  # the worker keeps what it has
    finally:
        os.close(loose)
