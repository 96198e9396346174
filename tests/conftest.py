"""What every test shares: Hypothesis profiles, the time an engine test gets, the real model."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from emberkv.live.control.address import RUNTIME_DIR_VARIABLE
from emberkv.testing.models import prepare_smollm2

ENGINE_TIMEOUT_S = 900

MOST_OPEN_ARENAS = 32
"""Descriptors. Threads that are ending and the traceback logged last still hold some."""

# No deadline: how long an example takes says more of the machine than of the code.
for _name, _examples in (("dev", 50), ("ci", 200), ("nightly", 5000)):
    settings.register_profile(
        _name,
        max_examples=_examples,
        deadline=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if "CI" in os.environ else "dev")
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("engine") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(ENGINE_TIMEOUT_S))


@pytest.fixture(scope="session", autouse=True)
def runtime_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Control sockets of tests lie apart from those of the user's servers."""
    directory = tmp_path_factory.mktemp("runtime")
    directory.chmod(0o700)
    before = os.environ.get(RUNTIME_DIR_VARIABLE)
    os.environ[RUNTIME_DIR_VARIABLE] = str(directory)
    yield directory
    if before is None:
        del os.environ[RUNTIME_DIR_VARIABLE]
    else:
        os.environ[RUNTIME_DIR_VARIABLE] = before


@pytest.fixture(scope="module", autouse=True)
def _arenas_are_let_go(runtime_dir: Path) -> Iterator[None]:
    """Forgotten arenas hold memory and two descriptors each, and a run has thousands of them."""
    yield
    gc.collect()
    assert _open_arenas() <= MOST_OPEN_ARENAS, "tests leave the memory of arenas open"


@pytest.fixture(scope="module", autouse=True)
def _control_is_let_go(runtime_dir: Path) -> Iterator[None]:
    """An engine of this process that was forgotten would answer to `status` in later tests."""
    yield
    own = [
        path.name for path in runtime_dir.glob("*.sock") if path.stem.endswith(f"-{os.getpid()}")
    ]
    assert own == [], "tests leave engines of this process open"


def _open_arenas() -> int:
    names = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the listing's own
            names.append(os.readlink(link))
    return sum("emberkv-arena" in name for name in names)


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The directory of SmolLM2-135M-Instruct; its first use on a machine makes it."""
    return prepare_smollm2()
