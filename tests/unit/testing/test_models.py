"""The small models' refusals; what needs the heavy libraries is tested with the engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from emberkv.errors import UsageError
from emberkv.testing.models import make_random_model, models_dir


def test_models_are_kept_in_the_users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert models_dir() == Path("/elsewhere/emberkv/models")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/someone")
    assert models_dir() == Path("/someone/.cache/emberkv/models")


def test_a_random_model_overwrites_nothing(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("kept")
    with pytest.raises(UsageError, match="not empty"):
        make_random_model(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]
