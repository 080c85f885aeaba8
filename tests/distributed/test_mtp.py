"""The layer for multi-token prediction is kept, and does not change training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megarl.models.folder import read_config
from megarl.models.mtp import add_mtp
from megarl.resharding.families import huggingface_holder
from megarl.resharding.piece import whole
from megarl.resharding.transports.safetensors import SafetensorsFolder
from tests.distributed.test_families import DEEPSEEK, GATED_DELTA, GATED_DELTA_EXPERTS, GLM
from tests.forked import run_ranks
from tests.marks import exhaustive_but
from tests.parity import RankResult, config_of, random_groups, train, whole_tensors
from tests.tiny_model import add_mtp_layer, write_tiny_model

GROUPS = random_groups(0)
CASES = {
    "GLM-4.6: TP2, SP, EP2, ETP1": ("glm4_moe", GLM, "tp: 2, sequence_parallel: true, ep: 2, etp: 1"),
    "DeepSeek-V3: PP2": ("deepseek_v3", DEEPSEEK, "pp: 2, first_stage_layers: 2"),
    "Qwen3-Next: TP2, SP, EP2, ETP1": (
        "qwen3_next",
        GATED_DELTA | GATED_DELTA_EXPERTS | dict(intermediate_size=72, mlp_only_layers=[1]),
        "tp: 2, sequence_parallel: true, ep: 2, etp: 1",
    ),
    "Qwen3.5, tied: PP2": (
        "qwen3_5_text",
        GATED_DELTA | dict(intermediate_size=72, tie_word_embeddings=True),
        "pp: 2",
    ),
    "Qwen3.5, experts: PP2, EP2": ("qwen3_5_moe_text", GATED_DELTA | GATED_DELTA_EXPERTS, "pp: 2, dp: 2, ep: 2"),
}
KEPT = "actor.mtp.loss_coefficient=0.0"


def trained(folder: Path, layout: str, *overrides: str) -> list[RankResult]:
    config = config_of(folder, "actor.tokens_per_microbatch=256", f"actor.layout={{{layout}}}", *overrides)
    return run_ranks(config.actor.layout.world_size, train, config, folder, [GROUPS])


@pytest.mark.parametrize("case", exhaustive_but(CASES, "GLM-4.6: TP2, SP, EP2, ETP1", "Qwen3.5, tied: PP2"))
def test_prediction_layer_is_kept_and_changes_nothing(tmp_path, case):
    """The policy's gradients and updated weights are the same bits as without the layer."""
    family, sizes, layout = CASES[case]
    folder = add_mtp_layer(write_tiny_model(tmp_path / "model", family, **sizes))
    without, kept = trained(folder, layout), trained(folder, layout, KEPT)
    for one, other in zip(without, kept, strict=True):
        assert all(torch.equal(weight, other.weights[name]) for name, weight in one.weights.items())
        assert all(torch.equal(gradient, other.gradients[name]) for name, gradient in one.gradients.items())
        assert not any(gradient.any() for name, gradient in other.gradients.items() if name not in one.gradients)
    with SafetensorsFolder(folder) as saved:
        weights = whole_tensors(add_mtp(read_config(folder)), kept, "weights")
        layer = weights.keys() - huggingface_holder(read_config(folder)).shapes.keys()
        assert len(layer) >= 15 and all(
            torch.equal(weights[name], saved.read("", name, whole(tuple(weights[name].shape)))) for name in layer
        )
