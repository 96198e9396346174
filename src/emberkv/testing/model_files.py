"""Model directories of a few kilobytes, for what reads a model's files and loads no model."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Final

LLAMA: Final[Mapping[str, object]] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "dtype": "float32",
}
"""A `config.json` of a small Llama: 2 layers, 2 KV heads of 32."""


def write_safetensors(path: Path, tensors: Mapping[str, tuple[str, int]], seed: int = 0) -> None:
    """Write a sound file of random bytes: the type and the size in bytes of each tensor."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, size_bytes) in tensors.items():
        header[name] = {"dtype": dtype, "shape": [], "data_offsets": [end, end + size_bytes]}
        end += size_bytes
    text = json.dumps(header).encode()
    data = random.Random(seed).randbytes(end)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def write_model(directory: Path, config: Mapping[str, object] = LLAMA) -> Path:
    """Make a model directory: a configuration, and 160 KiB of weights that fit none."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(dict(config)))
    write_safetensors(
        directory / "model.safetensors", {"a": ("F32", 128 << 10), "b": ("BF16", 32 << 10)}
    )
    return directory
