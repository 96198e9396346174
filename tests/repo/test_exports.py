"""What the package says of itself is true."""

from __future__ import annotations

import importlib
import pkgutil

import emberkv


def test_every_exported_name_exists() -> None:
    missing = []
    for info in pkgutil.walk_packages(emberkv.__path__, "emberkv."):
        if info.name.startswith("emberkv.engines.") or info.name.endswith(".__main__"):
            continue  # an engine may not be installed, and its adapters' names are its own
        module = importlib.import_module(info.name)
        missing += [
            f"{info.name}.{n}" for n in getattr(module, "__all__", ()) if not hasattr(module, n)
        ]
    assert missing == []
