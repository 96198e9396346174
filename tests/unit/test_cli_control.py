"""status, control, why and top as an operator meets them, against a manager in this process."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
from operated_engine import operations_on, prompt, serve, served
from scripted_engine import RAM_SLOTS, A, B, Engine, chain

from emberkv.app.cli import main
from emberkv.core.gates import SHUT, Gate
from emberkv.domain.namespace import Namespace
from emberkv.domain.types import DISK, ChunkKey, RequestId, Slot
from emberkv.live.control import address
from emberkv.live.control.server import ControlServer
from emberkv.tiers.base import Record
from emberkv.tiers.format import StoredNamespace
from emberkv.tiers.slab_directory import SlabDirectory

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(address.RUNTIME_DIR_VARIABLE, str(tmp_path / "run"))


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def server(engine: Engine) -> Iterator[ControlServer]:
    server = served(operations_on(engine))
    yield server
    server.close()


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: str | Path) -> tuple[int, str, str]:
        capsys.readouterr()
        status = main([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return call


# ── status ───────────────────────────────────────────────────────────────────────────────────────


def test_status_without_a_server(run: Run) -> None:
    assert run("status") == (0, "no server of yours runs here, or its control socket is off\n", "")
    assert run("status", "--json")[1].strip() == "[]"
    status, _, error = run("status", "blue")
    assert status == 1
    assert "start one with emberkv serve" in error


def test_status_shows_all_servers_or_one(run: Run, engine: Engine, server: ControlServer) -> None:
    serve(engine, A, chain("x", 3))
    other = served(operations_on(Engine(), "green"))
    status, shown, _ = run("status")
    assert status == 0
    assert "blue: emberkv" in shown
    assert "green: emberkv" in shown
    assert "keeper 4711" in shown
    assert "prompt tokens: device 0 %, ram 0 %, disk 0 %, computed 100 % of 33" in shown
    facts = json.loads(run("status", "bl", "--json")[1])  # the beginning of a name will do
    assert [each["instance"] for each in facts] == ["blue"]
    assert facts[0]["tiers"][0]["chunks"] == 3
    status, _, error = run("control", "purge")
    assert status == 2
    assert "name one of blue, green" in error
    assert run("status", "red")[0] == 2
    other.close()


def test_status_tells_of_a_server_that_is_not_well(
    run: Run, engine: Engine, server: ControlServer
) -> None:
    engine.manager._strict = False
    engine.manager.give_up(RuntimeError("a defect"))
    status, shown, _ = run("status")
    assert status == 1
    assert "ram is down: an error of emberkv: RuntimeError('a defect')" in shown


# ── control ──────────────────────────────────────────────────────────────────────────────────────


def test_every_command_is_carried_out(
    run: Run, engine: Engine, server: ControlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.driver, "begin_reset", lambda: None)
    serve(engine, A, chain("x", 3))
    assert run("control", "policy", "ram", "arc")[:2] == (
        0,
        "blue: tier ram evicts by arc from now on\n",
    )
    status, shown, _ = run("control", "-i", "blue", "budget", "max_wait_s=2", "max_stall_s=0.5")
    assert (status, shown) == (0, "blue: in force: max_wait_s = 2, max_stall_s = 0.5\n")
    assert engine.manager.stack.limits.max_wait_s == 2
    assert run("control", "purge", "ram")[1] == "blue: RAM is empty\n"
    assert run("control", "purge", "disk")[1] == "blue: the disk tier is empty\n"
    done = json.loads(run("control", "--json", "purge")[1])
    assert done == {"instance": "blue", "done": "everything was forgotten", "undone": None}


def test_tiers_are_shut_and_opened(run: Run) -> None:
    engine = Engine()
    server = served(operations_on(engine))
    serve(engine, A, chain("x", 2))
    status, shown, _ = run("control", "tier", "disk", "off")
    assert (status, shown) == (0, "blue: tier disk is shut: neither read nor written\n")
    assert engine.manager.stack.gates[DISK] == SHUT
    assert run("control", "tier", "ram", "off")[0] == 0
    assert json.loads(run("status", "--json")[1])[0]["tiers"][0]["gate"] == "off"
    assert run("control", "tier", "ram", "drain")[0] == 0
    engine.manager.stack.set_gate(DISK, Gate(load_share=0.25))
    assert "25 %" in run("status")[1]
    server.close()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("tier", "tape", "on"), "no tier 'tape'"),
        (("tier", "ram", "ajar"), "'ajar' is not one of"),
        (("policy", "ram", "fifo"), "there are: lru, arc"),
        (("purge", "tape"), "'tape' is not one of"),
        (("budget", "max_wait_s"), "NAME=VALUE"),
        (("budget", "max_wait_s=-1"), "a number from 0"),
        (("budget", "max_wait_s=nan"), "a number from 0"),
        (("budget", "patience=1"), "no budget 'patience'"),
        (("budget",), "Missing argument"),
    ],
)
def test_wrong_use_is_told(
    run: Run, server: ControlServer, arguments: tuple[str, ...], said: str
) -> None:
    status, shown, error = run("control", *arguments)
    assert (status, shown) == (2, "")
    assert said in error
    assert error.count("\n") == 1


# ── why ──────────────────────────────────────────────────────────────────────────────────────────


def test_why_tells_of_a_request(run: Run, engine: Engine, server: ControlServer) -> None:
    serve(engine, A, chain("x", 3))
    serve(engine, B, [*chain("x", 3), *chain("y", 2)])
    status, shown, _ = run("why", "client-b")
    assert status == 0
    summary, _, head, first, second, rest = shown.rstrip().split("\n")
    assert summary.startswith(
        "client-b got 30 of 53 prompt tokens (0 device, 30 RAM, 0 disk); from"
    )
    assert head.split() == ["chunks", "tokens", "where", "why"]
    assert first.split() == ["0-2", "0-29", "RAM", "used"]
    assert second.split()[:3] == ["3-4", "30-49", "nowhere"]
    assert rest.split()[:3] == ["-", "50-52", "nowhere"]
    assert "stored in RAM" in run("why", "client-b", "--history")[1]
    facts = json.loads(run("why", "b", "--json")[1])
    assert facts["summary"] == summary
    assert [each["place"] for each in facts["stretches"]] == ["ram", "nowhere"]
    assert facts["stretches"][1]["keys"] == [key.hex() for key in chain("y", 2)]
    status, _, error = run("why", "nobody")
    assert status == 2
    assert "the newest are client-b, client-a" in error


def test_why_tells_of_token_ids(
    run: Run, engine: Engine, server: ControlServer, tmp_path: Path
) -> None:
    serve(engine, A, chain("x", 3))
    file = tmp_path / "tokens.json"
    file.write_text(json.dumps(prompt("x", 3)))
    status, shown, _ = run("why", "--token-ids", file)
    assert status == 0
    assert shown.startswith("A request would get 30 of 30 tokens from the tiers now (30 RAM, 0 di")
    assert "would be used" in shown
    shown = run("why", "--token-ids", file, "--cache-salt", "s")[1]
    assert "nobody has offered it since the record began" in shown
    for wrong in ('{"a": 1}', "[true]", "nonsense"):
        file.write_text(wrong)
        assert run("why", "--token-ids", file)[0] == 2


@pytest.mark.parametrize(
    "arguments",
    [(), ("a", "--prompt", "b"), ("--prompt", "b"), ("a", "--cache-salt", "s"),
     ("--prompt", "b", "--server", "localhost:8000")],
)  # fmt: skip
def test_why_refuses_what_it_can_not_answer(
    run: Run, server: ControlServer, arguments: tuple[str, ...]
) -> None:
    status, _, error = run("why", *arguments)
    assert status == 2
    assert error.count("\n") == 1


def test_why_finds_other_namespaces_that_have_the_chunks(run: Run, tmp_path: Path) -> None:
    theirs = Namespace.of({"model.name": "tiny", "model.dtype": "float32"})
    ours = Namespace.of({"model.name": "tiny", "model.dtype": "bfloat16"})
    slab = SlabDirectory(tmp_path, 1 << 20).open_slab(
        StoredNamespace(bytes.fromhex(theirs.digest), dict(theirs.fields)), 4096
    )
    (key,) = chain("x", 1)
    slab.write([Record(ChunkKey(key), None, Slot(0), 0)], [memoryview(bytes(4096))])
    slab.close()
    server = served(operations_on(Engine(), root_dir=str(tmp_path), namespace=ours))
    file = tmp_path / "tokens.json"
    file.write_text(json.dumps(prompt("x", 2)))
    shown = run("why", "--token-ids", file)[1]
    assert f"stored under namespace {theirs.short}" in shown
    assert "model.dtype (float32, here bfloat16)" in shown
    (other,) = json.loads(run("why", "--token-ids", file, "--json")[1])["elsewhere"]
    assert other == {
        "namespace": theirs.digest,
        "chunks": 1,
        "fields": {"model.dtype": {"there": "float32", "here": "bfloat16"}},
    }
    server.close()


class _Tokenizer(BaseHTTPRequestHandler):
    """vLLM's routes for tokens, as far as they are used; keeps what it was asked."""

    asked: list[dict[str, Any]]

    def do_GET(self) -> None:
        self._say({"data": [{"id": "tiny"}, {"id": "adapter", "parent": "tiny"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        if body.get("model") == "absent":
            self._say({"error": {"message": "no such model"}}, 404)
            return
        self._say({"tokens": prompt("x", 3), "count": 30})

    def _say(self, answer: dict[str, Any], status: int = 200) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def tokenizer() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    asked: list[dict[str, Any]] = []
    handler = type("Tokenizer", (_Tokenizer,), {"asked": asked})
    with HTTPServer(("127.0.0.1", 0), handler) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}/v1", asked
        http.shutdown()
        thread.join()


def test_why_has_the_server_make_the_tokens(
    run: Run,
    engine: Engine,
    server: ControlServer,
    tmp_path: Path,
    tokenizer: tuple[str, list[dict[str, Any]]],
) -> None:
    url, asked = tokenizer
    serve(engine, A, chain("x", 3))
    for option in ("--prompt", "--prompt-file"):
        text: str | Path = "hello"
        if option == "--prompt-file":
            text = tmp_path / "text"
            text.write_text("hello")
        status, shown, _ = run("why", option, text, "--server", url, "--no-special-tokens")
        assert status == 0
        assert "A request would get 30 of 30 tokens" in shown
        assert asked[-1] == {"prompt": "hello", "add_special_tokens": False}
    chat = tmp_path / "chat.json"
    messages = [{"role": "user", "content": "hello"}]
    body = {"model": "x", "messages": messages, "temperature": 0, "cache_salt": "s"}
    chat.write_text(json.dumps(body))
    shown = run("why", "--messages", chat, "--server", url, "--model", "tiny")[1]
    assert asked[-1] == {"messages": messages, "model": "tiny"}
    assert "would get none" in shown  # under its salt
    chat.write_text(json.dumps(messages))
    assert run("why", "--messages", chat, "--server", url)[0] == 0
    for model, said in (("absent", "no such model"), ("adapter", "LoRA adapter")):
        status, _, error = run("why", "--prompt", "x", "--server", url, "--model", model)
        assert status == 2
        assert said in error


# ── top ──────────────────────────────────────────────────────────────────────────────────────────


def test_top_prints_one_frame(run: Run, engine: Engine, server: ControlServer) -> None:
    for at in range(3):
        serve(engine, RequestId(f"r{at}"), chain(f"c{at}", RAM_SLOTS))
    status, shown, _ = run("top", "--once")
    assert status == 0
    assert "blue" in shown
    assert "hits" in shown
    assert "evicted from RAM" in shown
    status, _, error = run("top")
    assert status == 2
    assert "--once" in error


def on_a_terminal(arguments: list[str], keys: bytes, until: bytes) -> tuple[int, bytes]:
    """Run the console script on a terminal of 80 x 24; press keys once `until` has been shown."""
    parent, child = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
    process = subprocess.Popen(
        [sys.executable, "-c", "import sys; from emberkv.app.cli import main; sys.exit(main())",
         *arguments],
        stdin=child, stdout=child, stderr=child, env=environment, start_new_session=True,
    )  # fmt: skip
    os.close(child)
    shown = b""
    pressed = False
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        if not wait([parent], 0.1):
            if process.poll() is not None:
                break
            continue
        with suppress(OSError):
            piece = os.read(parent, 65536)
            shown += piece
            if until in shown and not pressed:
                pressed = True
                os.write(parent, keys)
            if piece:
                continue
        break
    os.close(parent)
    return process.wait(10), shown


def test_top_draws_on_a_terminal_and_q_ends_it(engine: Engine, server: ControlServer) -> None:
    serve(engine, A, chain("x", 3))
    status, shown = on_a_terminal(["top", "--interval", "0.1"], b"q", b"hits")
    assert status == 0, shown
    assert b"blue" in shown
    assert b"\x1b[?1049h" in shown  # another screen, and back
    assert b"\x1b[?1049l" in shown


def test_a_frame_fits_80_columns(engine: Engine) -> None:
    from rich.console import Console

    from emberkv.app import screen

    operations = operations_on(engine, "an-instance-with-a-long-name-that-goes-on-and-on")
    operations.facts["costs"] = lambda: {f"figure_{at}": 0.123456 for at in range(10)}
    serve(engine, A, chain("x", 3))
    before = screen.Moment(operations.status(), 10.0)
    for at in range(6):
        serve(engine, RequestId(f"r{at}"), chain(f"c{at}", RAM_SLOTS))
    console = Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(screen.frame(screen.Moment(operations.status(), 12.0), before))
    lines = console.export_text().splitlines()
    console.file.close()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert any("computed 100 %" in line for line in lines)
    assert any("3 ended/s" in line for line in lines)
