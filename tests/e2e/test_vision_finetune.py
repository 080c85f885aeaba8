"""Supervised fine-tuning of a vision-language model, from images in a Parquet file to the exported model."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from PIL import Image
from transformers import AutoModelForImageTextToText

from tests.e2e.test_train import metrics_of
from tests.e2e.test_vision_train import train
from tests.paths import BASE
from tests.tiny_vision import build
from tests.unit.data.image_data import encoded

pytestmark = pytest.mark.slow

COLORS = {"red": (200, 10, 10), "blue": (10, 10, 200)}


def write_recipe(folder: Path) -> Path:
    build(folder / "model", "qwen3_vl")
    rows = [
        {
            "messages": [{"role": "user", "content": "<image>Color?"}, {"role": "assistant", "content": name}],
            "images": [{"bytes": encoded(Image.new("RGB", (64, 32 * (1 + i)), color)), "path": None}],
        }
        for i in range(2)
        for name, color in COLORS.items()
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "data.parquet")
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        yaml.safe_dump(
            {
                "base": str(BASE),
                "run": {"folder": str(folder / "runs"), "name": "tiny", "steps": 12},
                "model": {"path": str(folder / "model"), "dtype": "float32", "vision": True},
                "algorithm": {"objective": {"name": "sft", "aggregation": "token_mean"}},
                "actor": {"optimizer": {"lr": 0.01}, "tokens_per_microbatch": 512, "threads": 1},
                "rollout": {"context_length": 128},
                "batch": {"prompts_per_step": 4, "prompts_per_update": 4},
                "data": {"source": str(folder / "data.parquet"), "format": "messages", "image_column": "images"},
                "cluster": {"object_store_mib": 80},
            }
        )
    )
    return recipe


def test_fine_tuning_with_images_lowers_the_loss(series, tmp_path: Path) -> None:
    run = train(series, write_recipe(tmp_path))
    losses = [step["policy/nll"] for step in metrics_of(run)]
    assert len(losses) == 12
    # The names have 4 and 5 tokens with EOS, so without images the loss is at least 2 · ln 2 / 9 = 0.15.
    assert losses[-1] < 0.05
    before, after = (
        AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).model.visual.state_dict()
        for folder in (tmp_path / "model", run / "model")
    )
    assert not [name for name, value in before.items() if torch.equal(value, after[name])]
