"""The pages of options and keys say what the code does."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from emberkv import config, config_guard
from emberkv.app.cli import serve
from emberkv.config import Config, DiskConfig
from emberkv.core.guard import GuardConfig, Return

ROOT = Path(__file__).resolve().parents[2]
FIELDS = {"cpu_bytes_to_use": "ram_bytes", "secondary_tiers": "disk"}
DISK_FIELDS = {"n_read_threads": "read_threads", "n_write_threads": "write_threads"}

Rows = dict[str, list[str]]


def tables() -> dict[str, Rows]:
    """The tables of the page on the configuration: section, key, cells of its row."""
    found: dict[str, Rows] = {}
    section = ""
    for line in (ROOT / "docs/reference/config.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        elif line.startswith("| `"):
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            for key in re.findall(r"`(\w+)`", cells[0]):
                found.setdefault(section, {})[key] = cells
    return found


@pytest.mark.parametrize(
    ("section", "keys"),
    [
        ("Keys of emberkv", config.OWN_KEYS),
        ("Keys of a disk tier", config.TIER_KEYS),
        ("Keys of the guard", config_guard.GUARD_KEYS),
        ("Keys of the engine", config.ENGINE_KEYS),
        (
            "Keys of vLLM's tiering that are refused",
            (*config.NATIVE_KEYS_NOT_HERE, *config.NATIVE_TIER_TYPES_NOT_HERE),
        ),
    ],
)
def test_every_key_has_its_row_and_every_row_its_key(section: str, keys: tuple[str, ...]) -> None:
    assert set(tables()[section]) == set(keys)


def shown(value: object) -> str:
    if value is None or value == ():
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def test_defaults_are_those_of_the_code() -> None:
    defaults, disk = Config(ram_bytes=1), DiskConfig(Path("x"), 1)
    for key, cells in tables()["Keys of emberkv"].items():
        if key not in ("cpu_bytes_to_use", "instance"):
            assert cells[2] == shown(getattr(defaults, FIELDS.get(key, key))), key
    for key, field in DISK_FIELDS.items():
        assert tables()["Keys of a disk tier"][key][2] == shown(getattr(disk, field))


def test_defaults_of_the_guard_are_those_of_the_code() -> None:
    rules = GuardConfig(budgets=())
    for key, cells in tables()["Keys of the guard"].items():
        if key == "budgets":
            continue
        value = getattr(rules, "returns" if key == "return" else key)
        if isinstance(value, Return):
            value = value.value
        assert cells[2] == shown(list(value) if isinstance(value, tuple) else value), key


@pytest.mark.parametrize(
    ("key", "choices"),
    [("eviction_policy", config.EVICTION_POLICY_NAMES), ("on_busy_disk", config.ON_BUSY_DISK)],
)
def test_choices_are_those_of_the_code(key: str, choices: tuple[str, ...]) -> None:
    assert tables()["Keys of emberkv"][key][1] == ", ".join(f"`{name}`" for name in choices)


def test_the_options_named_beside_keys_are_options_of_serve() -> None:
    known = {option for parameter in serve.command.params for option in parameter.opts}
    named = {cells[3].strip("`") for cells in tables()["Keys of emberkv"].values()}
    assert named - {""} <= known
    page = (ROOT / "docs/reference/config.md").read_text(encoding="utf-8")
    own = known - {"model", "vllm_arguments", "--reserve", "--print-command"}
    assert {option for option in own if f"`{option}`" not in page} == set()


def test_the_tables_of_options_are_those_of_the_commands() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/cli_reference.py", "--check"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
