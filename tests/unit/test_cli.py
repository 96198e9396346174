"""The command line as a user meets it: what it prints, where, and its exit status."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import xxhash

import emberkv
from emberkv.app.cli import main
from emberkv.domain.namespace import Namespace
from emberkv.domain.types import ChunkKey, Slot
from emberkv.engines.vllm.compat import engine_version
from emberkv.tiers.base import Record
from emberkv.tiers.format import (
    DATA_FILE,
    HEADER_BYTES,
    INDEX_FILE,
    NAMESPACE_FILE,
    RECORD_BYTES,
    StoredNamespace,
)
from emberkv.tiers.slab import Slab
from emberkv.tiers.slab_directory import SlabDirectory

CHUNK_BYTES = 8192
COMMANDS = (
    "serve",
    "status",
    "top",
    "why",
    "hits",
    "control",
    "doctor",
    "inspect",
    "verify",
    "purge",
    "baseline",
    "load",
    "selfcheck",
    "drill",
)


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


Command = Callable[..., Done]


@pytest.fixture
def emberkv_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run a command in this process, as the console script does."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)

    def run(*arguments: str | Path) -> Done:
        capsys.readouterr()
        status = main([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        return Done(status, printed.out, printed.err)

    return run


def console_script(*arguments: str | Path) -> Done:
    """Run the installed script in a process of its own."""
    done = subprocess.run(
        [Path(sys.executable).with_name("emberkv"), *arguments],
        check=False,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env=os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"},
    )
    return Done(done.returncode, done.stdout, done.stderr)


def namespace(dtype: str) -> Namespace:
    return Namespace.of({"engine": "vllm", "model.name": "/models/one", "model.dtype": dtype})


def open_slab(root_dir: Path, dtype: str, chunks: int) -> Slab:
    names = namespace(dtype)
    stored = StoredNamespace(bytes.fromhex(names.digest), dict(names.fields))
    directory = SlabDirectory(root_dir, 4 << 20)
    slab = directory.open_slab(stored, CHUNK_BYTES, slab_bytes=1 << 20)
    for number in range(chunks):
        payload = bytes([number + 1]) * CHUNK_BYTES
        key = ChunkKey(hashlib.sha256(bytes([number])).digest())
        record = Record(key, None, Slot(number), xxhash.xxh3_64_intdigest(payload))
        slab.write([record], [memoryview(payload)])
    return slab


@contextmanager
def served(root_dir: Path, dtype: str, chunks: int) -> Iterator[None]:
    """A slab that somebody, this process, has open."""
    slab = open_slab(root_dir, dtype, chunks)
    try:
        yield
    finally:
        slab.close()


@pytest.fixture
def tier(tmp_path: Path) -> Path:
    """A disk tier with slabs of two namespaces, 3 and 5 chunks, and a file of the user's."""
    open_slab(tmp_path, "float32", 3).close()
    open_slab(tmp_path, "bfloat16", 5).close()
    (tmp_path / "notes.txt").write_text("mine")
    return tmp_path


def slab_path(tier: Path, dtype: str) -> Path:
    return tier / f"emberkv-{namespace(dtype).short}"


def test_the_version_and_the_commands_are_told() -> None:
    assert console_script("--version").stdout == f"emberkv, version {emberkv.__version__}\n"
    told = console_script("--help").stdout
    assert re.findall(r"^  (\w+) {2,}[A-Z]", told, flags=re.MULTILINE) == list(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_help_text(command: str, emberkv_command: Command) -> None:
    done = emberkv_command(command, "--help")
    assert done.returncode == 0
    assert "Options:" in done.stdout


def test_help_brings_in_no_engine_and_nothing_slow() -> None:
    code = """
import sys
from emberkv.app.cli import main
for command in ((), ("serve",), ("doctor",), ("inspect",), ("verify",), ("purge",)):
    main([*command, "--help"])
print("loaded", [name for name in ("vllm", "torch", "numpy", "rich") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "loaded []"


def test_nothing_asked_for_is_answered_with_the_help_text(emberkv_command: Command) -> None:
    done = emberkv_command()
    assert done.returncode == 2
    assert any(line.split()[:1] == ["serve"] for line in done.stderr.splitlines())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("serv", "m"), "no command 'serv'; did you mean 'serve'?"),
        (("serve",), "Missing argument 'MODEL'"),
        (("serve", "m"), "Missing option '--ram'"),
        (("serve", "m", "--ram", "1G"), "1GiB (1024) or 1GB (1000)?"),
        (("serve", "m", "--ram", "1GiB", "--disk", "/tmp"), "--disk needs --disk-size"),
        (("serve", "m", "--ram", "1GiB", "--disk-size", "1GiB"), "--disk-size needs --disk"),
        (("serve", "m", "--ram", "900TiB"), "--ram 900TiB is too large"),
        (("serve", "m", "--ram", "1GiB", "--", "--kv-offloading-size", "4"), "give --ram instead"),
        (("serve", "m", "--ram", "1GiB", "--", "--kv-transfer-config", "{}"), "leave it out"),
        (
            ("serve", "m", "--ram", "1GiB", "--", "--prefix-caching-hash-algo", "xxhash"),
            "use sha256_cbor",
        ),
        (("serve", "m", "--ram", "1GiB", "--disk", "", "--disk-size", "1GiB"), "path is empty"),
        (("serve", "m", "--ram", "1GiB", "--instance", "a b"), "instance must be"),
        (("serve", "m", "--ram", "1GiB", "--keep", "inf"), "is not a number of seconds"),
        (("inspect", "/no/such/directory"), "/no/such/directory does not exist"),
        (("purge", "/tmp"), "say what to remove"),
        (("doctor", "--ram", "1GiB", "--kv-transfer-config", "{}"), "not both"),
    ],
)
def test_wrong_use_is_one_line_and_status_2(
    arguments: tuple[str, ...], message: str, emberkv_command: Command
) -> None:
    done = emberkv_command(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("emberkv: ")
    assert done.stderr.count("\n") == 1
    assert message in done.stderr


def test_the_plain_command_is_printed_and_nothing_is_started(
    tmp_path: Path, emberkv_command: Command
) -> None:
    done = emberkv_command(
        *("serve", "org/m", "--ram", "1GiB", "--disk", tmp_path, "--disk-size", "1MiB"),
        *("--print-command", "--", "--port", "8001"),
    )
    assert done.returncode == 0
    assert done.stdout.count("\n") == 1
    assert "EmberConnector" in done.stdout
    assert done.stdout.endswith("--port 8001\n")
    assert list(tmp_path.iterdir()) == []


def test_the_scripts_exit_status_and_streams_are_those_of_the_command(tmp_path: Path) -> None:
    wrong = console_script("serve", "m", "--ram", "1G")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("emberkv: Invalid value for '--ram'")
    assert console_script("doctor", "--disk", tmp_path / "absent").returncode == 1
    assert console_script("inspect", tmp_path).returncode == 0


def test_a_disk_tier_larger_than_its_file_system_is_refused(
    tmp_path: Path, emberkv_command: Command
) -> None:
    done = emberkv_command(
        "serve", "m", "--ram", "1MiB", "--disk", tmp_path, "--disk-size", "900TiB"
    )
    assert done.returncode == 2
    assert re.search(
        r"--disk-size 900TiB is too large: .* at most --disk-size \S+ fits", done.stderr
    )


STAND_IN = """
import json, os, signal, sys
print(json.dumps([os.getpid(), sys.argv[1:]]), flush=True)
signal.pause()
"""


@pytest.mark.skipif(engine_version() is None, reason="serve needs a vLLM beside this Python")
def test_serve_becomes_the_engine_so_that_signals_reach_it(tmp_path: Path) -> None:
    """A package of vLLM's name stands in its place and tells how it was started."""
    for name in ("", "entrypoints", "entrypoints/openai", "entrypoints/cli"):
        (tmp_path / "vllm" / name).mkdir()
        (tmp_path / "vllm" / name / "__init__.py").touch()
    for name in ("openai/api_server.py", "cli/main.py"):
        (tmp_path / "vllm" / "entrypoints" / name).write_text(STAND_IN)
    program = Path(sys.executable).with_name("emberkv")
    command = [program, "serve", "m", "--ram", "1MiB", "--", "--port", "8001"]
    environment = {"PYTHONPATH": str(tmp_path), "VLLM_CPU_KVCACHE_SPACE": "1"}
    with subprocess.Popen(
        command, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        started = process.stdout.readline()
        process.terminate()
        assert process.wait() == -signal.SIGTERM
        assert process.stderr.read().startswith(b"emberkv: RAM tier 1.0 MiB; ")
    pid, arguments = json.loads(started)
    assert pid == process.pid
    assert "m" in arguments
    assert arguments[-2:] == ["--port", "8001"]


def test_doctor_checks_the_machine_a_tier_and_flags(tier: Path, emberkv_command: Command) -> None:
    done = emberkv_command(
        *("doctor", "--json", "--ram", "1MiB", "--disk", tier, "--disk-size", "4MiB"),
        *("--", "--cpu-offload-gb", "4"),
    )
    found = {each["check"]: each for each in json.loads(done.stdout)}
    assert found["memory"]["level"] == "ok"
    assert found["weight offloading"]["level"] == "warn"
    assert found["slabs"]["level"] == "warn"
    assert found["block hash"]["level"] == "ok"
    assert set(found["reset"]) == {"check", "level", "found", "do"}
    assert sorted(path.name for path in tier.iterdir() if path.name != "notes.txt") == sorted(
        slab_path(tier, dtype).name for dtype in ("float32", "bfloat16")
    )


def test_doctor_ends_with_1_if_something_fails(tmp_path: Path, emberkv_command: Command) -> None:
    done = emberkv_command("doctor", "--disk", tmp_path / "absent")
    assert done.returncode == 1
    assert "fail  disk: " in done.stdout
    assert emberkv_command("doctor", "--ram", "900TiB").returncode == 1


def test_inspect_shows_every_slab_and_in_what_they_differ(
    tier: Path, emberkv_command: Command
) -> None:
    done = emberkv_command("inspect", tier)
    assert done.returncode == 0
    for dtype, chunks in (("float32", 3), ("bfloat16", 5)):
        row = next(
            line for line in done.stdout.splitlines() if line.startswith(namespace(dtype).short)
        )
        assert f" {chunks} " in row
    assert "model.dtype" in done.stdout
    assert "model.name" not in done.stdout


def test_inspect_shows_all_fields_of_one_slab(tier: Path, emberkv_command: Command) -> None:
    for argument in (
        (tier, "--namespace", namespace("float32").short[:6]),
        (slab_path(tier, "float32"),),
    ):
        done = emberkv_command("inspect", *argument)
        assert "/models/one" in done.stdout
        assert namespace("bfloat16").short not in done.stdout


def test_inspect_gives_facts_as_json_with_the_server_up(
    tier: Path, emberkv_command: Command
) -> None:
    with served(tier, "bfloat16", 5):
        done = emberkv_command("inspect", tier, "--json")
    facts = {each["namespace"]: each for each in json.loads(done.stdout)}
    idle, busy = facts[namespace("float32").digest], facts[namespace("bfloat16").digest]
    assert (idle["state"], idle["chunks"], idle["owner"]) == ("free", 3, None)
    assert (busy["state"], busy["chunks"]) == ("in use", 5)
    assert busy["owner"] == f"process {os.getpid()}"
    assert busy["fields"] == dict(namespace("bfloat16").fields)
    assert busy["chunk_bytes"] == CHUNK_BYTES


def test_an_unknown_or_ambiguous_namespace_is_asked_back(
    tier: Path, emberkv_command: Command
) -> None:
    done = emberkv_command("inspect", tier, "--namespace", "zz")
    assert done.returncode == 2
    assert namespace("float32").short in done.stderr
    assert emberkv_command("verify", tier, "--namespace", "").returncode == 2


def test_an_empty_directory_holds_nothing(tmp_path: Path, emberkv_command: Command) -> None:
    for command in ("inspect", "verify"):
        done = emberkv_command(command, tmp_path)
        assert (done.returncode, done.stdout) == (0, f"{tmp_path} holds no slab of emberkv\n")
        assert json.loads(emberkv_command(command, tmp_path, "--json").stdout) == []


def test_verify_reads_every_chunk_with_the_server_up_or_down(
    tier: Path, emberkv_command: Command
) -> None:
    with served(tier, "bfloat16", 5):
        done = emberkv_command("verify", tier, "--json")
    assert done.returncode == 0
    counts = {each["namespace"]: each["sound_chunks"] for each in json.loads(done.stdout)}
    assert counts == {namespace("float32").digest: 3, namespace("bfloat16").digest: 5}
    done = emberkv_command("verify", tier, "--namespace", namespace("float32").short)
    assert done.stdout == f"{namespace('float32').short}: 3 chunks sound\n"


def test_verify_names_damaged_chunks_and_ends_with_1(tier: Path, emberkv_command: Command) -> None:
    with (slab_path(tier, "float32") / DATA_FILE).open("r+b") as data:
        data.seek(CHUNK_BYTES + 5)
        data.write(b"\xff")
    done = emberkv_command("verify", tier)
    assert done.returncode == 1
    assert "2 chunks sound, 1 corrupt (slots 1)" in done.stdout


def test_verify_names_damaged_records_and_ends_with_1(tier: Path, emberkv_command: Command) -> None:
    with (slab_path(tier, "float32") / INDEX_FILE).open("r+b") as index:
        index.seek(HEADER_BYTES + RECORD_BYTES + 60)
        index.write(b"\xff")
    done = emberkv_command("verify", tier)
    assert done.returncode == 1
    assert "2 chunks sound, 1 lost with a damaged record (slots 1)" in done.stdout


def damage_header(path: Path) -> None:
    with (path / INDEX_FILE).open("r+b") as index:
        index.seek(20)
        index.write(b"\xff\xff")


def damage_magic(path: Path) -> None:
    with (path / INDEX_FILE).open("r+b") as index:
        index.write(b"\xff")


def empty_the_index(path: Path) -> None:
    os.truncate(path / INDEX_FILE, 0)


def nest_the_namespace_deeply(path: Path) -> None:
    (path / NAMESPACE_FILE).write_text("[" * 200_000)


@pytest.mark.parametrize(
    "damage", [damage_header, damage_magic, empty_the_index, nest_the_namespace_deeply]
)
def test_a_damaged_slab_is_shown_and_can_be_purged(
    damage: Callable[[Path], None], tier: Path, emberkv_command: Command
) -> None:
    path = slab_path(tier, "float32")
    damage(path)
    assert "damaged" in emberkv_command("inspect", tier).stdout
    done = emberkv_command("verify", tier)
    assert done.returncode == 1
    assert "damaged: " in done.stdout
    done = emberkv_command("purge", tier, "--namespace", namespace("float32").short, "--yes")
    assert done.returncode == 0
    assert not path.exists()


def test_purge_removes_what_is_named_and_nothing_else(tier: Path, emberkv_command: Command) -> None:
    done = emberkv_command("purge", tier, "--namespace", namespace("float32").short, "--yes")
    assert done.returncode == 0
    assert not slab_path(tier, "float32").exists()
    assert slab_path(tier, "bfloat16").exists()
    done = emberkv_command("purge", tier, "--all", "--yes", "--json")
    assert [each["removed"] for each in json.loads(done.stdout)] == [True]
    assert [path.name for path in tier.iterdir()] == ["notes.txt"]


def test_purge_asks_and_removes_nothing_without_an_answer(
    tier: Path, emberkv_command: Command
) -> None:
    done = emberkv_command("purge", tier, "--all")
    assert done.returncode == 2
    assert "--yes" in done.stderr
    assert slab_path(tier, "float32").exists()


def test_purge_leaves_a_slab_in_use_and_says_what_to_do(
    tier: Path, emberkv_command: Command
) -> None:
    with served(tier, "bfloat16", 5):
        done = emberkv_command("purge", tier, "--all", "--yes")
    assert done.returncode == 1
    assert f"{namespace('float32').short}: removed" in done.stdout
    assert f"kept, in use by process {os.getpid()}" in done.stdout
    assert "emberkv control purge" in done.stdout
    assert slab_path(tier, "bfloat16").exists()


def test_a_reader_that_goes_away_is_no_error(tier: Path) -> None:
    program = Path(sys.executable).with_name("emberkv")
    with subprocess.Popen(
        [program, "inspect", tier, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 1
