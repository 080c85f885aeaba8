"""Save times of models with known sizes."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.config.load import load
from megarl.planner.hardware import read_cluster
from megarl.planner.phases import SPARE_PROCESS_BYTES
from megarl.planner.plan import plan_recipe
from megarl.planner.plan_text import table
from megarl.run.checkpoint_size import checkpoint_bytes
from tests.h100_recipes import RECIPES
from tests.published_models import CONFIGS
from tests.unit.planner.plan_cases import layout_keys, plan_of

EXPERTS = dict(tp=2, ep=8, etp=1, dp=16)


def test_save_time_of_70_billion_parameters(tmp_path: Path) -> None:
    """Llama-3.1-70B has 70,553,706,496 parameters of 2 + 12 bytes. Its 64 ranks on 8 nodes write equal amounts."""
    [recipe] = [recipe for recipe in RECIPES if "70b" in recipe.name]
    config = load(recipe.file, recipe.overrides(tmp_path))
    planned = plan_recipe(config, read_cluster("64xH100"), as_is=True)
    save = planned.best.save
    of_node = 70_553_706_496 * 14 / 8
    assert save.node_bytes == pytest.approx(of_node, rel=1e-3)
    assert save.writing == pytest.approx(of_node / 4e9, rel=1e-3) == pytest.approx(30.87, rel=1e-3)
    assert save.copying == pytest.approx(of_node / 8 / (0.74 * 64e9), rel=1e-3)
    assert "GB in 30.9 s at 4 GB/s, in the background" in table(planned)
    copies = "take 247 GB of shared memory on the fullest node, and twice that with a spare node; spare processes take"
    spares = f"{8 * SPARE_PROCESS_BYTES / 1e9:.2f} GB of host memory"
    assert f"copies of the ranks' state {copies} {spares}" in table(planned)


@pytest.mark.parametrize(
    ("model", "gpus", "sizes", "dtype"),
    [
        ("Qwen2.5-7B", 16, dict(tp=2, dp=4, cp=2), "float32"),
        pytest.param("Qwen2.5-7B", 16, dict(tp=2, dp=4, cp=2), "bfloat16", marks=pytest.mark.exhaustive),
        pytest.param("Qwen3-30B-A3B", 32, EXPERTS, "float32", marks=pytest.mark.exhaustive),
        ("Qwen3-30B-A3B", 32, EXPERTS, "bfloat16"),
    ],
)
def test_written_bytes_match_the_checkpoint_size(model: str, gpus: int, sizes: dict[str, int], dtype: str) -> None:
    plan = plan_of(model, f"{gpus}xH100", *layout_keys(**sizes), f"model.dtype={dtype}")
    size = checkpoint_bytes(plan.config, {"actor": CONFIGS[model]})
    assert plan.save.node_bytes * gpus / 8 == pytest.approx(size, rel=0.01)


def test_no_checkpoint_has_no_save_time() -> None:
    assert plan_of("Qwen2.5-7B", "8xH100", *layout_keys(dp=8), "checkpoint.every_steps=null").save is None
