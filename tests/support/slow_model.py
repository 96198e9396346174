"""A model whose prompts are worth loading, even from a disk on a busy machine."""

from __future__ import annotations

from pathlib import Path

from emberkv.testing.models import make_random_model


def make_slow_model(directory: Path) -> Path:
    """Write a random model that computes some 5,000 tokens/s, of 12 KiB a token in float32."""
    return make_random_model(
        directory, hidden_size=384, layers=12, heads=6, kv_heads=2, head_dim=64
    )
