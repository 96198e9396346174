"""What `selfcheck` and `drill` refuse before they start anything, and how they print."""

from __future__ import annotations

import json
import math
import os
import signal
from pathlib import Path

import pytest

from emberkv.app.agreement import Comparison, Verdict
from emberkv.app.cli import drill, main, selfcheck
from emberkv.app.cli.own import ended_in_order, own_directory, serve_options, server_parameters
from emberkv.app.drilling.drills import DRILLS
from emberkv.app.drilling.scene import ANSWER_TOKENS, CLIENTS, Row, shape_of
from emberkv.app.launch import ServeOptions
from emberkv.app.selfcheck import Finding, Source, finding, prompt_lengths
from emberkv.app.selfcheck import Row as CheckRow
from emberkv.engines.vllm.command_line import Flags, Launch
from emberkv.errors import UsageError, WorldError


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a wrong use is told."""
    assert main(list(arguments)) == 2
    error = capsys.readouterr().err.strip().splitlines()
    return error[-1]


SIZES = ("model", "--ram", "1GiB")


def test_a_drill_that_is_none_is_refused_with_the_nearest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = refusal(capsys, "drill", *SIZES, "--only", "hang-disk")
    assert "no drill 'hang-disk'; did you mean 'hung-disk'?" in said


def test_without_a_disk_its_drills_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = drill._chosen((), has_disk=False)
    assert [each.name for each in chosen] == ["clock-step", "kill-and-restart", "cache-loss"]
    assert "without --disk there is no io-errors" in capsys.readouterr().err
    assert "give --disk" in refusal(capsys, "drill", *SIZES, "--only", "full-disk")


def test_prompts_below_a_chunk_would_drill_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, "drill", *SIZES, "--prompt-tokens", "100", "--chunk-tokens", "256")
    assert "less than one chunk of 256" in said


def test_a_chunk_has_one_size(capsys: pytest.CaptureFixture[str]) -> None:
    both = ("--chunk-tokens", "64", "--blocks-per-chunk", "2")
    assert "not both" in refusal(capsys, "selfcheck", *SIZES, *both)


def test_a_disk_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    disk = ("--disk", "/nowhere/at/all", "--disk-size", "1GiB")
    assert "create the directory first" in refusal(capsys, "selfcheck", *SIZES, *disk)


@pytest.mark.parametrize("command", [selfcheck.command, drill.command])
def test_options_that_name_a_running_server_are_not_taken(command: object) -> None:
    names = {parameter.name for parameter in command.params}  # type: ignore[attr-defined]
    assert not names & {"instance", "request_log", "on_busy_disk", "print_command"}
    assert {"ram_bytes", "disk", "disk_bytes", "keep_s", "vllm_arguments"} <= names


def test_what_is_given_is_what_serve_would_take() -> None:
    given = {each.name: None for each in server_parameters()} | {
        "model": "m",
        "ram_bytes": 5,
        "vllm_arguments": ("--x",),
        "chunk_tokens": (1, 2),
        "as_json": True,
    }
    options = serve_options(given, without=("chunk_tokens",))
    assert options == ServeOptions(model="m", ram_bytes=5, vllm_arguments=("--x",))


def test_a_servers_files_lie_in_the_disk_tiers_directory_and_are_removed(tmp_path: Path) -> None:
    with own_directory(tmp_path, "drill") as directory:
        assert directory.parent == tmp_path
        (directory / "disk").mkdir()
    assert list(tmp_path.iterdir()) == []


def test_a_termination_ends_a_block_as_an_interrupt_does() -> None:
    def be_terminated() -> None:
        with ended_in_order():
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        be_terminated()
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_end_of_a_servers_log_is_shown_before_the_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(WorldError) as caught, ended_in_order():
        raise WorldError("the server ended with 1\n── log\nout of memory")
    assert str(caught.value) == "the server ended with 1"
    assert capsys.readouterr().err == "── log\nout of memory\n"


# ── what a check and a drill say ─────────────────────────────────────────────────────────────────


def row(source: Source, verdict: Verdict, loaded: int = 64, problem: str = "") -> CheckRow:
    return CheckRow(32, 96, source, loaded, Comparison(verdict, 0.1, 0.2), problem)


GOOD = [row(source, Verdict.EQUAL) for source in Source]


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        (GOOD, Finding.AGREES),
        ([*GOOD, row(Source.RAM, Verdict.CANNOT_TELL)], Finding.AGREES),
        ([*GOOD[1:], row(Source.COMPUTED, Verdict.TIE)], Finding.AGREES),
        ([*GOOD[:-1], row(Source.DISK, Verdict.CANNOT_TELL)], Finding.BLIND),
        ([*GOOD[:-1], row(Source.DISK, Verdict.EQUAL, loaded=0)], Finding.BLIND),
        ([*GOOD, row(Source.DISK, Verdict.EQUAL, problem="elsewhere")], Finding.ELSEWHERE),
        ([*GOOD, row(Source.RAM, Verdict.DIFFERENT)], Finding.DIFFERENT),
        ([row(Source.RAM, Verdict.DIFFERENT, problem="elsewhere")], Finding.DIFFERENT),
    ],
)
def test_a_check_says_the_worst_of_its_rows(rows: list[CheckRow], found: Finding) -> None:
    assert finding(rows) is found


def test_a_row_agrees_only_if_it_is_right_and_from_the_right_place() -> None:
    assert row(Source.RAM, Verdict.TIE).facts()["agrees"] is True
    assert row(Source.RAM, Verdict.DIFFERENT).facts()["agrees"] is False
    assert row(Source.RAM, Verdict.EQUAL, problem="elsewhere").facts()["agrees"] is False


@pytest.mark.parametrize("chunk_tokens", [1, 16, 32, 256])
def test_prompts_lie_on_both_sides_of_a_chunks_border(chunk_tokens: int) -> None:
    lengths = prompt_lengths(chunk_tokens, 100_000)
    assert {chunk_tokens, chunk_tokens + 1, 3 * chunk_tokens} <= set(lengths)
    assert min(lengths) <= max(1, chunk_tokens // 2)
    assert max(lengths) >= 16 * chunk_tokens
    assert max(prompt_lengths(chunk_tokens, 300)) <= 300


def test_a_drills_row_has_four_facts() -> None:
    facts = Row("slow-disk", True, "fine", 1.23456).facts()
    assert facts == {"drill": "slow-disk", "passed": True, "detail": "fine", "p99_ratio": 1.235}
    assert Row("slow-disk", False, "dead", None).facts()["p99_ratio"] is None


def test_every_drill_has_a_name_of_its_own() -> None:
    assert len({each.name for each in DRILLS}) == len(DRILLS) == 10


@pytest.mark.parametrize("flags", [(), ("--num-gpu-blocks-override", "100")])
def test_caches_of_a_drill_hold_less_than_what_returns(flags: tuple[str, ...]) -> None:
    given = ("--block-size", "32", *flags)
    options = ServeOptions(model="m", ram_bytes=1 << 40, vllm_arguments=given)
    shape = shape_of(options, Launch("m", Flags(given), {}, on_cpu=True), 320)
    needed = math.ceil((320 + ANSWER_TOKENS) / 32)
    assert shape.device_blocks >= CLIENTS * needed
    assert shape.returning * needed > shape.device_blocks
    assert shape.whole_tokens == 320


def test_a_disk_that_cannot_keep_what_returns_is_refused(tmp_path: Path) -> None:
    """Its policy would evict every prompt before it returns, and a drill would call it lost."""
    model = {"num_hidden_layers": 12, "num_key_value_heads": 2, "num_attention_heads": 6}
    config = model | {"head_dim": 64, "hidden_size": 384, "model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    given = ("--block-size", "32", "--dtype", "float32")
    engine = Launch(str(tmp_path), Flags(given), {}, on_cpu=True)
    assert engine.kv_bytes_per_token() == 12 << 10

    def options(disk_bytes: int) -> ServeOptions:
        return ServeOptions(
            model=str(tmp_path),
            ram_bytes=1 << 30,
            disk=tmp_path,
            disk_bytes=disk_bytes,
            vllm_arguments=given,
        )

    with pytest.raises(UsageError, match=r"--disk-size 64MiB cannot keep two rounds.*give 117"):
        shape_of(options(64 << 20), engine, 416)
    assert shape_of(options(128 << 20), engine, 416).returning == 8


def test_a_check_without_a_directory_is_refused() -> None:
    with pytest.raises(UsageError), own_directory(Path("/nowhere/at/all"), "drill"):
        pass
