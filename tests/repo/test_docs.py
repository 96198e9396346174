"""Documents that a program can check are checked: pages made from code, links, names, examples."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from emberkv import config
from emberkv.app.cli import serve
from emberkv.core.gates import Gate
from emberkv.core.guard import Cause, Evidence, GateChange, Signal
from emberkv.core.guard.figures import more_than_chance
from emberkv.core.guard.guard import CHANCE
from emberkv.domain.types import Level
from emberkv.engines.vllm import compat
from emberkv.observe.metrics import METRICS
from emberkv.observe.request_log import line_of
from emberkv.observe.requests import MissReason, RequestFacts

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
METRIC = re.compile(r"emberkv:(\w+)")
SUFFIXES = ("_total", "_bucket", "_sum", "_count")


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def code_blocks(page: Path, language: str) -> Iterator[str]:
    for found, body in CODE.findall(page.read_text(encoding="utf-8")):
        if found == language:
            yield body


@pytest.mark.parametrize("script", ["metrics_reference.py", "readme_performance.py"])
def test_made_pages_are_current(script: str) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / script, "--check"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_somewhere(page: Path) -> None:
    targets = LINK.findall(page.read_text(encoding="utf-8"))
    local = [target.partition("#")[0] for target in targets if "://" not in target]
    missing = [target for target in local if target and not (page.parent / target).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_metrics_that_are_mentioned_exist(page: Path) -> None:
    known = {metric.name.removeprefix("emberkv:") for metric in METRICS}
    for name in METRIC.findall(page.read_text(encoding="utf-8")):
        bare = [name, *(name.removesuffix(suffix) for suffix in SUFFIXES)]
        assert known.intersection(bare), f"emberkv:{name} is no metric"


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_configurations_that_are_shown_are_accepted(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    shown = [json.loads(block) for block in code_blocks(page, "json")]
    shown += [json.loads(found) for found in re.findall(r"--kv-transfer-config '(\{.*?\})'", text,
                                                        re.DOTALL) if "…" not in found]  # fmt: skip
    for whole in shown:
        if extra := whole.get("kv_connector_extra_config"):
            assert whole["kv_role"] == "kv_both"
            config.parse(extra)


def test_the_request_log_page_names_every_field_in_order() -> None:
    page = (ROOT / "docs/reference/request-log.md").read_text(encoding="utf-8")
    fields = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert fields == list(json.loads(line_of(RequestFacts("a"))))


def test_every_reason_is_explained() -> None:
    page = (ROOT / "docs/howto/read-the-metrics.md").read_text(encoding="utf-8")
    reasons = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    assert reasons == {reason.value for reason in MissReason}


def test_the_page_on_the_guard_shows_rules_that_are_accepted_and_every_cause() -> None:
    page = ROOT / "docs/howto/guard.md"
    (rules,) = code_blocks(page, "json")
    extra = {"cpu_bytes_to_use": 1 << 30, "baseline": "b.json", "guard": json.loads(rules)}
    assert config.parse(extra).guard is not None
    words = set(re.findall(r"^\| `(\w+)` [^\n]*\|", page.read_text("utf-8"), re.MULTILINE))
    signals = {signal.value for signal in Signal}
    assert words == {cause.value for cause in Cause} | signals


def test_the_evidence_that_the_page_on_the_guard_shows_is_what_is_said() -> None:
    page = (ROOT / "docs/howto/guard.md").read_text(encoding="utf-8")
    evidence = Evidence(Signal.FIRST_TOKEN, 3.02, 1.0, 600, 600, 1.0)
    change = GateChange(Level(1), Gate(0.0), Cause.BREACH, 0.0, 60.0, (evidence,))
    assert f"\n{change.reason}\n" in page
    fewest = {
        count: next(over for over in range(count) if more_than_chance(over, count, CHANCE))
        for count in (100, 1000)
    }
    assert f"{fewest[100]} of 100, or {fewest[1000]} of 1,000" in page


def test_native_keys_have_their_line_in_the_page_on_moving() -> None:
    page = (ROOT / "docs/howto/move-from-vllm-tiering.md").read_text(encoding="utf-8")
    for key in (*config.NATIVE_KEYS_NOT_HERE, *config.NATIVE_TIER_TYPES_NOT_HERE):
        assert f"`{key}`" in page


def test_the_readme_names_the_engine_version_that_is_tested() -> None:
    assert f"vLLM {compat.TESTED_VERSIONS[-1]} only" in (ROOT / "README.md").read_text("utf-8")


def test_the_example_runs() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "examples/core_in_memory.py"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert "orchard: 6 chunks from RAM, 0 from disk" in done.stdout
    assert "harbour: 2 chunks from RAM, 4 from disk" in done.stdout


def test_python_in_the_tutorial_runs(tmp_path: Path) -> None:
    page = (ROOT / "docs/tutorial/first-server.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"<<'EOF'\n(.*?)^EOF", page, re.MULTILINE | re.DOTALL)
    script = script.replace("/tmp/", f"{tmp_path}/")
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)
    bodies = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert set(bodies) == {"harbour", "orchard", "observatory"}
    assert all(5_000 < len(body["prompt"]) < 8_000 for body in bodies.values())


SERVE = re.compile(r"emberkv serve ((?:[^`\n]|\\\n)*)")


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_options_of_serve_that_are_shown_exist(page: Path) -> None:
    known = {option for parameter in serve.command.params for option in parameter.opts}
    for shown in SERVE.findall(page.read_text(encoding="utf-8")):
        own = shown.partition(" -- ")[0]
        used = set(re.findall(r"(?<!\S)\[?(--[a-z-]+)", own))
        assert used <= known, used - known
