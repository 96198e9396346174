"""What the tests on vLLM's scheduler share: rigs that are strict and closed after use."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from emberkv.engines.vllm.build import STRICT_VARIABLE

if TYPE_CHECKING:
    from rig_parts import Setup
    from scheduler_rig import Rig


@pytest.fixture
def make_rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Setup], Rig]]:
    """Make rigs whose manager raises what it would contain."""
    from scheduler_rig import Rig

    monkeypatch.setenv(STRICT_VARIABLE, "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    rigs: list[Rig] = []

    def make(setup: Setup) -> Rig:
        model_dir = tmp_path / f"model-{len(rigs)}"
        os.mkdir(model_dir)
        rigs.append(Rig(setup, model_dir))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()
