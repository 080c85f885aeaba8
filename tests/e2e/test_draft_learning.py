"""Engines keep accepting draft tokens from an MTP layer that is trained with the policy."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest

from tests.e2e.test_train import REWARD, metrics_of, train
from tests.tiny_model import add_mtp_layer, write_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.learn]
GLM = dict(
    vocab_size=128,
    hidden_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    num_hidden_layers=2,
    intermediate_size=128,
    max_position_embeddings=256,
    first_k_dense_replace=1,
    moe_intermediate_size=32,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_shared_experts=1,
)
DRAFTS = ("rollout.speculative={method: mtp, tokens: 1}", "rollout.max_new_tokens=8", "checkpoint.every_steps=null")
HOT = "rollout.temperature=2.0"
"""High temperature, so that the policy finds the second sequence after it has learned the first."""
FIRST, SECOND = 30, 30
"""Number of steps that reward the first sequence of digits, and of those that then reward the second."""


def accepted(run: Path) -> list[float]:
    return [line["rollout/draft_accepted_frac"] for line in metrics_of(run)]


def test_trained_drafts_stay_accepted_while_the_policy_moves(tmp_path):
    """The same model continues with another reward, once with the layer trained and once with it frozen."""
    model = add_mtp_layer(write_tiny_model(tmp_path / "model", "glm4_moe", **GLM))

    def run(name: str, start: Path, function: str, steps: int, coefficient: float, *further: str) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        rewards = f"rewards.functions=[{{function: '{REWARD}:{function}'}}]"
        trained = f"actor.mtp.loss_coefficient={coefficient}"
        return train(folder, start, rewards, trained, f"run.steps={steps}", "run.export=true", *DRAFTS, *further)

    first = run("first", model, "first_sequence", FIRST, 1.0)
    risen = accepted(first)
    trained, frozen = (
        accepted(run(name, first / "model", "second_sequence", SECOND, coefficient, HOT))
        for name, coefficient in (("trained", 1.0), ("frozen", 0.0))
    )
    print("accepted", risen, trained, frozen, sep="\n")
    reached = fmean(risen[-3:])
    assert reached > 3 * risen[0]
    assert fmean(trained[-3:]) > 0.8 * reached
    assert fmean(frozen) < 0.7 * fmean(trained)
