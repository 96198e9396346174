"""`emberkv serve` makes vLLM's command line, and refuses what can't work before it starts."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

from emberkv import config as configuration
from emberkv.app.launch import (
    ServeOptions,
    check_sizes,
    plain_command,
    require_places,
    summary,
    vllm_arguments,
)
from emberkv.app.machine import DiskSpace, Machine
from emberkv.engines.vllm.command_line import Flags, Launch
from emberkv.errors import ConfigError, UsageError
from emberkv.testing.model_files import write_model

GIB = 1 << 30
MACHINE = Machine(64 * GIB, "this machine's RAM", 60 * GIB, 32 * GIB, None)


def transfer_config(arguments: list[str]) -> dict[str, object]:
    found = json.loads(arguments[arguments.index("--kv-transfer-config") + 1])
    assert isinstance(found, dict)
    return found


def test_a_ram_tier_alone_needs_one_size() -> None:
    arguments = vllm_arguments(ServeOptions(model="org/m", ram_bytes=16 * GIB), {})
    assert arguments[:2] == ["serve", "org/m"]
    assert transfer_config(arguments) == {
        "kv_connector": "EmberConnector",
        "kv_connector_module_path": "emberkv.engines.vllm.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "EmberOffloadingSpec",
            "spec_module_path": "emberkv.engines.vllm",
            "cpu_bytes_to_use": 16 * GIB,
            "offload_prompt_only": False,
        },
    }


def test_every_option_becomes_a_key_that_the_configuration_reads(tmp_path: Path) -> None:
    options = ServeOptions(
        model="m",
        ram_bytes=16 * GIB,
        disk=tmp_path,
        disk_bytes=200 * GIB,
        blocks_per_chunk=4,
        eviction_policy="arc",
        keep_s=0.0,
        max_wait_s=5.0,
        max_stall_s=0.5,
        request_log=tmp_path / "requests.jsonl",
        instance="blue",
        model_identity="m 1",
        on_busy_disk="refuse",
    )
    extra = options.extra_config()
    assert extra["blocks_per_chunk"] == 4
    config = configuration.parse(extra)
    assert config.disk is not None
    assert (config.disk.root_dir, config.disk.size_bytes) == (tmp_path, 200 * GIB)
    assert (config.eviction_policy, config.keep_s, config.max_wait_s) == ("arc", 0.0, 5.0)
    assert (config.max_stall_s, config.instance, config.on_busy_disk) == (0.5, "blue", "refuse")
    assert (config.model_identity, config.request_log) == ("m 1", tmp_path / "requests.jsonl")


@pytest.mark.parametrize("said", ["null", "[" * 200_000, "rules"])
def test_a_file_without_rules_is_no_guard(tmp_path: Path, said: str) -> None:
    path = tmp_path / "guard.json"
    path.write_text(said)
    with pytest.raises(UsageError, match=r"guard\.json"):
        ServeOptions(model="m", ram_bytes=GIB, guard=path).extra_config()


def test_the_guards_rules_are_read_from_a_file(tmp_path: Path) -> None:
    rules = {"budgets": {"ttft_p99": 2.0}, "window_s": 30}
    path = tmp_path / "guard.json"
    path.write_text(json.dumps(rules))
    extra = ServeOptions(model="m", ram_bytes=GIB, guard=path).extra_config()
    assert extra["guard"] == rules
    found = configuration.parse(extra).guard
    assert found is not None
    assert found.rules.window_s == 30.0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "No such file"),
        ("{", "is no JSON"),
        ("[]", "must be an object"),
        ('{"budgets": {"ttft_p99": "1.05x"}}', "name one in baseline"),
    ],
)
def test_rules_that_can_not_be_read_start_nothing(
    tmp_path: Path, text: str | None, said: str
) -> None:
    path = tmp_path / "guard.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match=said):
        ServeOptions(model="m", ram_bytes=GIB, guard=path).extra_config()


def test_a_baseline_that_can_not_be_read_starts_nothing(tmp_path: Path) -> None:
    rules = tmp_path / "guard.json"
    rules.write_text('{"budgets": {"ttft_p99": "1.05x"}}')
    options = ServeOptions(model="m", ram_bytes=GIB, guard=rules, baseline=tmp_path / "none.json")
    with pytest.raises(UsageError, match="can't read the baseline"):
        options.extra_config()


def test_paths_are_made_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    extra = ServeOptions(
        model="m", ram_bytes=1, disk=Path("kv"), disk_bytes=1, request_log=Path("log")
    ).extra_config()
    assert extra["request_log"] == str(tmp_path / "log")
    assert str(tmp_path / "kv") in json.dumps(extra)


def test_the_hash_is_the_portable_one_unless_a_stable_one_is_given() -> None:
    arguments = vllm_arguments(ServeOptions(model="m", ram_bytes=1), {})
    assert Flags(arguments).value("--prefix-caching-hash-algo") == "sha256_cbor"
    given = ("--prefix-caching-hash-algo", "sha256")
    arguments = vllm_arguments(ServeOptions(model="m", ram_bytes=1, vllm_arguments=given), {})
    assert arguments.count("--prefix-caching-hash-algo") == 1
    assert Flags(arguments).value("--prefix-caching-hash-algo") == "sha256"


def test_a_hash_with_a_random_seed_is_refused() -> None:
    given = ("--prefix-caching-hash-algo", "xxhash")
    options = ServeOptions(model="m", ram_bytes=1, vllm_arguments=given)
    with pytest.raises(UsageError, match="random seed at every start"):
        vllm_arguments(options, {})
    assert vllm_arguments(options, {"PYTHONHASHSEED": "0"})


def test_what_vllm_is_given_comes_last_and_unchanged() -> None:
    given = ("--port", "8001", "--hf-overrides", '{"a b": 1}')
    arguments = vllm_arguments(ServeOptions(model="m", ram_bytes=1, vllm_arguments=given), {})
    assert tuple(arguments[-4:]) == given


def test_the_plain_command_is_what_a_shell_takes_apart_again() -> None:
    options = ServeOptions(model="a model's name", ram_bytes=1, vllm_arguments=("--x", '{"a": 1}'))
    arguments = vllm_arguments(options, {})
    program, *words = shlex.split(plain_command(arguments))
    assert program in ("vllm", sys.executable)  # the CPU build has no `vllm` that starts
    assert words[-len(arguments) + 1 :] == arguments[1:]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"disk": Path("/kv")}, "--disk needs --disk-size"),
        ({"disk_bytes": 1}, "--disk-size needs --disk"),
        ({"chunk_tokens": 32, "blocks_per_chunk": 2}, "not both"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    given: dict[str, object], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        ServeOptions(model="m", ram_bytes=1, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": ""}, "name is empty"),
        ({"model": "/no/such/model"}, "/no/such/model does not exist"),
        ({"request_log": Path("/no/such/place/log")}, "/no/such/place is no directory"),
        ({"request_log": Path("/tmp")}, "is a directory; name a file"),
        ({"disk": Path("/proc/sys"), "disk_bytes": 1}, "can't write in /proc/sys"),
    ],
)
def test_places_that_the_engine_could_not_use_are_refused_before_the_start(
    given: dict[str, object], message: str
) -> None:
    options = ServeOptions(**{"model": "m", "ram_bytes": 1, **given})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=message):
        require_places(options)


def test_a_chunk_is_a_whole_number_of_blocks() -> None:
    options = ServeOptions(model="m", ram_bytes=GIB, chunk_tokens=33)
    with pytest.raises(UsageError, match="33 is no multiple of the engine's block of 32"):
        check_sizes(options, engine("absent/m", "--block-size", "32"), MACHINE, None)


def test_values_that_the_configuration_refuses_are_refused_before_the_start() -> None:
    with pytest.raises(ConfigError, match="max_wait_s must be"):
        ServeOptions(model="m", ram_bytes=1, max_wait_s=0.0).extra_config()


def engine(model: Path | str, *arguments: str) -> Launch:
    return Launch(str(model), Flags(arguments), {"VLLM_CPU_KVCACHE_SPACE": "4"}, on_cpu=True)


def test_sizes_that_fit_are_summed_up_in_one_line(tmp_path: Path) -> None:
    options = ServeOptions(model="m", ram_bytes=16 * GIB, disk=tmp_path, disk_bytes=200 * GIB)
    plan = check_sizes(options, engine("absent/m"), MACHINE, DiskSpace(tmp_path, 300 * GIB, 0))
    assert summary(options, plan) == (
        f"RAM tier 16.0 GiB, disk tier 200.0 GiB in {tmp_path}; engine 4.0 GiB, reserve 6.4 GiB "
        "of 64.0 GiB RAM; /dev/shm 32.0 GiB (not used by the tiers)"
    )


def test_sizes_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    too_much_ram = ServeOptions(model="m", ram_bytes=60 * GIB)
    with pytest.raises(UsageError, match=r"at most --ram 53\.6GiB fits"):
        check_sizes(too_much_ram, engine("absent/m"), MACHINE, None)
    reserve = ServeOptions(model="m", ram_bytes=60 * GIB, reserve_bytes=1)
    with pytest.raises(UsageError, match="--reserve keeps 1 B"):
        check_sizes(reserve, engine("absent/m"), MACHINE, None)
    too_much_disk = ServeOptions(model="m", ram_bytes=GIB, disk=tmp_path, disk_bytes=200 * GIB)
    with pytest.raises(UsageError, match="at most --disk-size 100GiB fits"):
        check_sizes(too_much_disk, engine("absent/m"), MACHINE, DiskSpace(tmp_path, 100 * GIB, 0))


def test_tiers_smaller_than_a_chunk_of_a_known_model_are_refused(tmp_path: Path) -> None:
    """The model has 1,024 KV bytes per token as float32: a chunk of 4 blocks of 32 has 128 KiB."""
    model = engine(write_model(tmp_path), "--dtype", "float32", "--block-size", "32")
    fits = ServeOptions(model="m", ram_bytes=132 << 10, blocks_per_chunk=4)
    check_sizes(fits, model, MACHINE, None)
    small = ServeOptions(model="m", ram_bytes=128 << 10, blocks_per_chunk=4)
    with pytest.raises(
        UsageError, match=r"--ram 128KiB is smaller than one chunk of 128 tokens.*132KiB"
    ):
        check_sizes(small, model, MACHINE, None)
    small_disk = ServeOptions(
        model="m", ram_bytes=GIB, disk=tmp_path, disk_bytes=1000, chunk_tokens=32
    )
    with pytest.raises(UsageError, match="--disk-size 1000B is smaller than one chunk of 32"):
        check_sizes(small_disk, model, MACHINE, DiskSpace(tmp_path, GIB, 0))
