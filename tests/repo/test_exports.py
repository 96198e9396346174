"""What the package says of itself is true."""

from __future__ import annotations

import importlib


def test_every_exported_name_exists(neutral_modules: list[str]) -> None:
    missing = []
    for name in neutral_modules:
        module = importlib.import_module(name)
        missing += [f"{name}.{n}" for n in getattr(module, "__all__", ()) if not hasattr(module, n)]
    assert missing == []
