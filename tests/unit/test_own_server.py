"""Servers of one's own: started, ended with all that they started, and never left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import scripted_server
from keeper_processes import gone, is_running

from emberkv.app.launch import ServeOptions
from emberkv.app.metrics_page import Page
from emberkv.app.own_server import OwnServer, ServerError, ServerProcess, free_port
from emberkv.errors import UsageError

STAND_IN = Path(scripted_server.__file__)
SOURCE = Path(__file__).resolve().parents[2] / "src"


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(SOURCE)}


def server_in(directory: Path, *command: str) -> ServerProcess:
    port = free_port()
    whole = list(command) or [sys.executable, str(STAND_IN), str(port)]
    return ServerProcess(whole, port, directory / "log", environment)


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_a_server_is_ready_after_start_and_gone_after_its_end(tmp_path: Path, end: str) -> None:
    server = server_in(tmp_path)
    server.start()
    assert server.is_healthy()
    pid = server.pid
    getattr(server, end)()
    assert not is_running(pid)
    assert not server.is_healthy()
    assert not server.running
    getattr(server, end)()  # nothing is left to do
    server.start()  # on the same port
    assert server.is_healthy()
    server.stop()


def test_a_server_that_ends_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    server = server_in(tmp_path, sys.executable, "-c", "print('no memory'); raise SystemExit(3)")
    with pytest.raises(ServerError, match=r"(?s)ended with 3.*no memory"):
        server.start()
    server.stop()


def test_a_server_ends_with_whoever_started_it(tmp_path: Path) -> None:
    port = free_port()
    code = f"""
import os, sys
from pathlib import Path
from emberkv.app.own_server import ServerProcess
command = [sys.executable, {str(STAND_IN)!r}, "{port}"]
server = ServerProcess(command, {port}, Path({str(tmp_path / "log")!r}), lambda: dict(os.environ))
server.start()
print(server.pid, flush=True)
sys.stdin.read()
"""
    starter = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    assert starter.stdout is not None
    assert starter.stdin is not None
    pid = int(starter.stdout.readline())
    assert is_running(pid)
    starter.send_signal(signal.SIGKILL)
    starter.wait()
    gone(pid)
    starter.stdout.close()
    starter.stdin.close()


def options(**other: object) -> ServeOptions:
    return ServeOptions(model="m", ram_bytes=1 << 20, **other)  # type: ignore[arg-type]


def test_place_and_keys_of_the_users_server_are_not_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    flags = ("--host", "0.0.0.0", "--port=80", "--api-key", "secret", "--dtype", "float32")
    server = OwnServer(options(vllm_arguments=flags, instance="live"), tmp_path)
    command = server.process.command
    assert command[-4:] == ["--host", "127.0.0.1", "--port", str(server.process.port)]
    assert not {"0.0.0.0", "--port=80", "secret", "--api-key"} & set(command)
    assert command[command.index("--dtype") + 1] == "float32"
    assert '"instance":"live"' not in " ".join(command)
    assert f'"instance":"{server.instance}"' in " ".join(command)


def test_a_disk_of_ones_own_lies_in_the_directory_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    server = OwnServer(options(disk=Path("/live"), disk_bytes=1 << 20), tmp_path)
    assert server.disk == tmp_path / "disk"
    assert f'"root_dir":"{tmp_path / "disk"}"' in " ".join(server.process.command)


def test_what_does_not_fit_the_machine_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        OwnServer(ServeOptions(model="m", ram_bytes=1 << 60), tmp_path)


def test_without_tiers_no_connector_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    server = OwnServer(options(), tmp_path, plain=True)
    assert "--kv-transfer-config" not in server.process.command


def test_a_page_without_a_metric_says_nothing_of_it() -> None:
    page = Page("")
    assert (page.chunks("disk"), page.chunks_under_way("disk"), page.finished_requests) == (0, 0, 0)
