"""The page on rolling out: its commands, typed as they stand, on a real server with a small model.

Only the model, the port, the name and the directories are replaced, by the variables that the page
itself reads. How quick this machine is and how quiet is not this test's matter: a load may be over
its budget and a drill late, and nothing else may fail.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from page_script import Block, blocks_of, script_of, share_out
from slow_model import make_slow_model

from demo.server import end_processes, find_keeper, free_port, kill_keeper

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1150)]

PAGE = Path(__file__).resolve().parents[2] / "docs/howto/roll-out.md"
LATE = ("waited longer", "still wait", "first tokens took")


@pytest.fixture
def played(tmp_path: Path) -> Iterator[list[Block]]:
    """The blocks of the page with what they printed."""
    model = tmp_path / "model"
    make_slow_model(model)
    disk = tmp_path / "kv"
    disk.mkdir()
    blocks = list(blocks_of(PAGE))
    (tmp_path / "script.sh").write_text(script_of(blocks))
    name = f"roll-out-{tmp_path.name}"[-60:]
    environment = os.environ | {
        "MODEL": str(model),
        "PORT": str(free_port()),
        "WORK": str(tmp_path / "work"),
        "DISK": str(disk),
        "NAME": name,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    output = tmp_path / "output.txt"
    with output.open("w") as out:
        shell = subprocess.Popen(
            ["bash", tmp_path / "script.sh"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            shell.wait(timeout=1100)
        finally:
            _end(shell.pid)
            kill_keeper(name)
    said = output.read_text()
    assert share_out(said, blocks), said[-3000:]
    yield blocks
    assert find_keeper(name) is None


def _end(session: int) -> None:
    """End what the shell has started and left: everything in its session."""
    left = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.getsid(int(entry.name)) == session:
                    left.append(int(entry.name))
            except ProcessLookupError:
                continue
    end_processes(left, signal.SIGKILL)


def test_every_command_works_and_shows_what_the_page_says(played: list[Block]) -> None:
    assert len(played) >= 10
    for block in played:
        assert [each for each in block.failed if not _may_fail(block, *each)] == [], block.seen
        assert block.missing() == [], block.seen


def _may_fail(block: Block, status: int, command: str) -> bool:
    """Whether a command failed for no reason but that the machine is slow, or does other things."""
    if command.startswith("emberkv load"):
        return status == 1 and "figures are over 1.05x the baseline (!)" in block.seen
    if command.startswith("emberkv drill"):
        return status == 1 and any(late in block.seen for late in LATE)
    return False
