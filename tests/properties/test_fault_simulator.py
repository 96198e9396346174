"""The fault simulator finds nothing in the code, every planted defect, and does not go blind."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from simulated_mutants import MUTATIONS

from emberkv.errors import EmberError
from emberkv.testing.fault_simulator import Report, SimulationError, simulate

PROFILES = {"dev": 40_000, "ci": 200_000, "nightly": 10_000_000}
STEPS = PROFILES[os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if "CI" in os.environ else "dev")]
LEAST_PER_200_000_STEPS = 10
MUTANT_STEPS = 60_000


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Faults are what is wanted here: they need not be logged."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="module")
def report() -> Report:
    logging.disable(logging.CRITICAL)
    return simulate(0, STEPS)


@pytest.mark.timeout(4 * 3600)
def test_no_rule_is_broken_and_no_byte_wrong(report: Report) -> None:
    assert report.steps == STEPS
    assert report.loaded_chunks > STEPS / 20


def test_everything_that_can_happen_has(report: Report) -> None:
    least = LEAST_PER_200_000_STEPS * (STEPS // 200_000)
    assert not report.unseen(max(1, least))


def test_the_same_seed_runs_the_same_everywhere() -> None:
    code = "from emberkv.testing.fault_simulator import simulate as s; print(s(3, 6000).digest)"
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert digests == {simulate(3, 6000).digest + "\n"}


@pytest.mark.parametrize("name", sorted(MUTATIONS))
def test_a_planted_defect_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTATIONS[name](monkeypatch)
    with pytest.raises(SimulationError, match=r"^seed \d+, step \d+: ") as found:
        simulate(0, MUTANT_STEPS)
    assert isinstance(found.value.__cause__, (AssertionError, EmberError, KeyError))
    seed, step = found.value.seed, found.value.step
    with pytest.raises(SimulationError, match=rf"^seed {seed}, step {step}: "):
        simulate(seed, step)  # as the message says: the same again, at once


def test_there_are_enough_planted_defects() -> None:
    assert len(MUTATIONS) >= 20
