"""The control socket: private, named after its instance, and proof against whoever speaks on it."""

from __future__ import annotations

import os
import socket
import stat
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberkv.errors import ControlError, UsageError
from emberkv.live.control import address
from emberkv.live.control.client import ControlClient
from emberkv.live.control.messages import (
    MAX_REQUEST_BYTES,
    PROTOCOL,
    Answer,
    Done,
    GateName,
    Purge,
    PurgeScope,
    Request,
    ServerStatus,
    SetBudget,
    SetGate,
    SetPolicy,
    StatusRequest,
    WhyPrompt,
    WhyRequest,
    decode_answer,
    decode_request,
    encode,
)
from emberkv.live.control.server import MAX_CONNECTIONS, ControlServer


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "run"
    monkeypatch.setenv(address.RUNTIME_DIR_VARIABLE, str(directory))
    return directory


Serve = Callable[..., ControlServer]


@pytest.fixture
def serve() -> Iterator[Serve]:
    servers: list[ControlServer] = []

    def start(
        name: str, answer: Callable[[Request], Answer] | None = None, **more: float
    ) -> ControlServer:
        answer = answer or (lambda request: Done(type(request).__name__))
        servers.append(ControlServer(address.listen(name), answer, **more))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def ask(name: str, request: Request) -> str:
    with ControlClient(name) as client:
        return client.ask(request, Done).what


# ── the address ──────────────────────────────────────────────────────────────────────────────────


def test_directory_and_socket_are_the_users_alone(runtime: Path, serve: Serve) -> None:
    serve("blue")
    assert stat.S_IMODE(runtime.stat().st_mode) == 0o700
    assert stat.S_IMODE((runtime / "blue.sock").stat().st_mode) == 0o600
    assert ask("blue", StatusRequest()) == "StatusRequest"
    assert address.instances() == ["blue"]


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_directory_that_others_can_enter_is_not_used(runtime: Path, mode: int) -> None:
    runtime.mkdir()
    runtime.chmod(mode)
    with pytest.raises(ControlError, match="yours alone"):
        address.listen("blue")
    with pytest.raises(ControlError, match="yours alone"):
        address.connect("blue")


def test_a_directory_behind_a_symbolic_link_is_not_used(runtime: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    runtime.symlink_to(tmp_path / "real")
    with pytest.raises(ControlError):
        address.listen("blue")


def test_the_file_goes_with_the_server(runtime: Path, serve: Serve) -> None:
    server = serve("blue")
    server.close()
    server.close()
    assert list(runtime.iterdir()) == []
    with pytest.raises(ControlError, match="no server 'blue'"):
        ControlClient("blue")


def test_what_a_killed_server_left_is_removed(runtime: Path, serve: Serve) -> None:
    code = (
        "import os, signal; from emberkv.live.control.address import listen;"
        "listen('blue'); listen('green'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    source = str(Path(address.__file__).parents[3])
    environment = os.environ | {"PYTHONPATH": source}
    subprocess.run([sys.executable, "-c", code], check=False, env=environment)
    assert {path.name for path in runtime.iterdir()} == {"blue.sock", "green.sock"}
    serve("blue")  # takes the name over
    assert address.instances() == ["blue"]  # and the other one goes
    assert {path.name for path in runtime.iterdir()} == {"blue.sock"}
    assert ask("blue", StatusRequest())


def test_a_second_server_of_one_instance_gets_a_name_of_its_own(serve: Serve) -> None:
    first = serve("blue", lambda _: Done("first"))
    second = serve("blue", lambda _: Done("second"))
    assert first.name == "blue"
    assert second.name == f"blue-{os.getpid()}"
    assert ask("blue", StatusRequest()) == "first"
    assert ask(second.name, StatusRequest()) == "second"
    first.close()
    assert address.instances() == [second.name]


def test_a_server_never_removes_the_socket_of_its_successor(serve: Serve, runtime: Path) -> None:
    first = serve("blue")
    (runtime / "blue.sock").unlink()
    serve("blue")
    first.close()
    assert ask("blue", StatusRequest())


def test_many_servers_start_at_once_and_each_is_found(serve: Serve) -> None:
    names: list[str] = []
    threads = [
        threading.Thread(target=lambda at=at: names.append(serve(f"server-{at}").name))  # type: ignore[misc]
        for at in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert address.instances() == sorted(names)


def test_a_path_may_be_longer_than_a_sockets_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, serve: Serve
) -> None:
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    deep.parent.mkdir()
    monkeypatch.setenv(address.RUNTIME_DIR_VARIABLE, str(deep))
    serve("x" * 64)
    assert ask("x" * 64, StatusRequest())


def test_the_session_directory_comes_before_tmp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(address.RUNTIME_DIR_VARIABLE)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert address.runtime_dirs()[0] == tmp_path / "emberkv"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "absent"))
    assert tmp_path not in address.runtime_dirs()[0].parents
    assert address.runtime_dirs()[-1] == Path(f"/tmp/emberkv-{os.geteuid()}")


# ── what is said ─────────────────────────────────────────────────────────────────────────────────


def test_errors_of_a_command_reach_the_client_by_kind(serve: Serve) -> None:
    def answer(request: Request) -> Answer:
        match request:
            case StatusRequest():
                raise UsageError("say it otherwise")
            case Purge():
                raise ControlError("it hangs")
            case SetPolicy():
                raise RuntimeError("a defect")
        return Done("well")

    serve("blue", answer)
    with ControlClient("blue") as client:
        with pytest.raises(UsageError, match="say it otherwise"):
            client.ask(StatusRequest(), ServerStatus)
        with pytest.raises(ControlError, match="it hangs"):
            client.ask(Purge(PurgeScope.ALL), Done)
        with pytest.raises(ControlError, match="a defect"):
            client.ask(SetPolicy("ram", "lru"), Done)
        assert client.ask(WhyRequest("a"), Done).what == "well"
        with pytest.raises(ControlError, match="something else"):
            client.ask(WhyRequest("a"), ServerStatus)


def test_a_server_that_does_not_answer_is_not_waited_for(serve: Serve) -> None:
    released = threading.Event()

    def hang(_: Request) -> Answer:
        released.wait(60)
        return Done("late")

    serve("blue", hang)
    with ControlClient("blue") as client, pytest.raises(ControlError, match="does not answer"):
        client.ask(StatusRequest(), Done, timeout_s=0.05)
    assert address.instances() == ["blue"]  # others get through meanwhile
    released.set()


def test_clients_that_hang_block_nobody(serve: Serve) -> None:
    """Idle ones are closed; while all places are taken, others are turned away, not hung."""
    serve("blue", idle_s=0.2)
    idle = [address.connect("blue") for _ in range(MAX_CONNECTIONS)]
    for sock in idle:
        sock.settimeout(10)
    with pytest.raises(ControlError, match="8 clients already"):
        ask("blue", StatusRequest())
    for sock in idle:
        assert sock.recv(1) == b""  # closed by the server
        sock.close()
    assert ask("blue", StatusRequest()) == "StatusRequest"


def frame(payload: bytes, protocol: int = PROTOCOL) -> bytes:
    return struct.pack("<II", protocol, len(payload)) + payload


def test_frames_that_can_not_be_meant_end_the_connection(serve: Serve) -> None:
    serve("blue")
    for header in (
        struct.pack("<II", PROTOCOL + 1, 4) + b"abcd",
        struct.pack("<II", PROTOCOL, MAX_REQUEST_BYTES + 1),
        b"GET / HTTP/1.1\r\n\r\n",
    ):
        with address.connect("blue") as sock:
            sock.settimeout(10)
            sock.sendall(header)
            assert sock.recv(1) == b""
    assert ask("blue", StatusRequest()) == "StatusRequest"


texts = st.text(max_size=20)
requests = st.one_of(
    st.builds(StatusRequest),
    st.builds(SetGate, texts, st.sampled_from(GateName)),
    st.builds(SetPolicy, texts, texts),
    st.builds(SetBudget, st.dictionaries(texts, st.floats(allow_nan=False), max_size=3)),
    st.builds(Purge, st.sampled_from(PurgeScope)),
    st.builds(WhyRequest, texts),
    st.builds(WhyPrompt, st.lists(st.integers(0, 2**31 - 1), max_size=20), st.none() | texts),
)


@given(requests)
def test_what_is_encoded_is_decoded(request: Request) -> None:
    assert decode_request(encode(request)) == request


@given(st.one_of(st.binary(max_size=200), requests.map(encode)), st.data())
def test_the_parser_takes_any_bytes(payload: bytes, data: st.DataObject) -> None:
    """A request, or an error of msgspec's: nothing else, whatever bits are turned over."""
    mangled = bytearray(payload)
    for _ in range(data.draw(st.integers(0, 3))):
        if mangled:
            at = data.draw(st.integers(0, len(mangled) - 1))
            mangled[at] = data.draw(st.integers(0, 255))
    for decode in (decode_request, decode_answer):
        try:
            decode(bytes(mangled))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            continue


def test_a_server_fed_with_anything_goes_on(serve: Serve) -> None:
    """Random frames, broken streams, deep nesting; afterwards a client is served."""
    server = serve("blue", idle_s=5.0)
    nested = b"\x91" * 100_000
    payloads = [nested, b"", b"\xc1", os.urandom(1000), encode(SetBudget({"a": float("nan")}))]
    with address.connect("blue") as sock:
        sock.settimeout(10)
        for payload in payloads:
            sock.sendall(frame(payload))
            header = sock.recv(8, socket.MSG_WAITALL)
            length = struct.unpack("<II", header)[1]
            assert decode_answer(sock.recv(length, socket.MSG_WAITALL))
    for at in range(20):
        with address.connect("blue") as sock:
            sock.sendall(frame(encode(StatusRequest()))[: at + 1])
    assert ask("blue", StatusRequest()) == "StatusRequest"
    assert server.name == "blue"
