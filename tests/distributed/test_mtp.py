"""The layer for multi-token prediction is kept, and does not change training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megarl.models.folder import read_config
from megarl.models.mtp import add_mtp
from tests.distributed.test_families import DEEPSEEK, GLM
from tests.forked import run_ranks
from tests.marks import exhaustive_but
from tests.parity import RankResult, config_of, random_groups, train, whole_tensors
from tests.tiny_model import add_mtp_layer, write_tiny_model

GROUPS = random_groups(0)
CASES = {
    "GLM-4.6: TP2, SP, EP2, ETP1": ("glm4_moe", GLM, "tp: 2, sequence_parallel: true, ep: 2, etp: 1"),
    "DeepSeek-V3: PP2": ("deepseek_v3", DEEPSEEK, "pp: 2, first_stage_layers: 2"),
}
KEPT = "actor.mtp.loss_coefficient=0.0"


def trained(folder: Path, layout: str, *overrides: str) -> list[RankResult]:
    config = config_of(folder, "actor.tokens_per_microbatch=256", f"actor.layout={{{layout}}}", *overrides)
    return run_ranks(config.actor.layout.world_size, train, config, folder, [GROUPS])


@pytest.mark.parametrize("case", exhaustive_but(CASES, "GLM-4.6: TP2, SP, EP2, ETP1"))
def test_prediction_layer_is_kept_and_changes_nothing(tmp_path, case):
    """The policy's gradients and updated weights are the same bits as without the layer."""
    family, sizes, layout = CASES[case]
    folder = add_mtp_layer(write_tiny_model(tmp_path / "model", family, **sizes))
    without, kept = trained(folder, layout), trained(folder, layout, KEPT)
    for one, other in zip(without, kept, strict=True):
        assert all(torch.equal(weight, other.weights[name]) for name, weight in one.weights.items())
        assert all(torch.equal(gradient, other.gradients[name]) for name, gradient in one.gradients.items())
        assert not any(gradient.any() for name, gradient in other.gradients.items() if name not in one.gradients)
    saved, weights = (
        load_file(folder / "model.safetensors"),
        whole_tensors(add_mtp(read_config(folder)), kept, "weights"),
    )
    layer = [name for name in weights if name.startswith(f"model.layers.{sizes['num_hidden_layers']}.")]
    assert len(layer) > 20 and all(torch.equal(weights[name], saved[name]) for name in layer)
