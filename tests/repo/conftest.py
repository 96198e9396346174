"""What the repository's tests share: the names of our modules, found without importing any."""

from __future__ import annotations

from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src"


@pytest.fixture(scope="session")
def neutral_modules() -> list[str]:
    """Every module but the engines' adapters, which need an engine, and entry points."""
    names = (
        ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
        for path in sorted((SOURCE / "emberkv").rglob("*.py"))
        if path.stem != "__main__"
    )
    return [name for name in names if not name.startswith("emberkv.engines.")]
