"""What tests of faults share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from keeper_processes import Stage, stage


@pytest.fixture
def play(tmp_path: Path) -> Iterator[Stage]:
    """An instance of the keeper for one test, and the processes around it."""
    with stage(tmp_path) as opened:
        yield opened
