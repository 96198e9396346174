"""The models that tests, benchmarks and the demo serve are made whole, once, and repeatably."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from emberkv.testing.models import SMOLLM2_NAME, make_random_model

PREPARE = Path(__file__).resolve().parents[2] / "scripts" / "prepare_model.py"

pytestmark = pytest.mark.engine


def test_smollm2_is_made_once_by_all_who_ask(tmp_path: Path) -> None:
    """Two processes at once, after a third was killed half-way: one whole model, no rest."""
    models = tmp_path / "emberkv" / "models"
    left_over = models / f".{SMOLLM2_NAME}.partial"
    left_over.mkdir(parents=True)
    (left_over / "config.json").write_text("half a")
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    askers = [
        subprocess.Popen(
            [sys.executable, PREPARE], env=environment, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    answers = [asker.communicate()[0].splitlines()[-1] for asker in askers]

    made = models / SMOLLM2_NAME
    assert [asker.returncode for asker in askers] == [0, 0]
    assert answers == [str(made)] * 2
    assert {p.name for p in models.iterdir()} == {SMOLLM2_NAME, f".{SMOLLM2_NAME}.lock"}
    assert "quantization_config" not in json.loads((made / "config.json").read_text())
    assert (made / "chat_template.jinja").is_file()


def test_a_random_model_is_repeatable(smollm2_dir: Path, tmp_path: Path) -> None:
    one, same, other = (
        make_random_model(tmp_path / name, seed=seed)
        for name, seed in (("one", 1), ("same", 1), ("other", 2))
    )

    def weights(model: Path) -> bytes:
        return (model / "model.safetensors").read_bytes()

    assert weights(one) == weights(same)
    assert weights(one) != weights(other)
    assert (one / "tokenizer.json").read_bytes() == (smollm2_dir / "tokenizer.json").read_bytes()


def test_a_random_model_has_the_shape_asked_for(tmp_path: Path) -> None:
    model = make_random_model(
        tmp_path / "m", hidden_size=96, layers=3, heads=4, kv_heads=1, head_dim=64
    )
    config = json.loads((model / "config.json").read_text())
    wanted = {
        "hidden_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 64,
    }
    assert {key: config[key] for key in wanted} == wanted
