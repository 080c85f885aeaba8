"""TRPO's update and the keys that it excludes."""

from __future__ import annotations

import pytest

from tests.unit.config.rules.recipes import GAE, errors, recipe

TRPO = (
    *("algorithm.trust_region.kl_limit=0.01", "algorithm.objective.name=unclipped", "model.dtype=float32"),
    "rollout.context_length=256",
)


def test_minimal_recipe_is_valid() -> None:
    assert recipe(*TRPO, "actor.layout.dp=2", "algorithm.kl.coefficient=0.1").algorithm.trust_region.kl_limit == 0.01
    recipe(*TRPO, GAE, "critic.tokens_per_microbatch=1024")


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        (
            "algorithm.objective.name=clip",
            "TRPO maximizes the unclipped surrogate. Fix: set algorithm.objective.name=unc",
        ),
        (
            "batch.prompts_per_update=8",
            "TRPO makes a single update per step, starting at the old policy. Fix: ",
        ),
        (
            "batch.epochs=2",
            "TRPO makes a single update per step. Fix: set batch.epochs=1, or algorithm.trust_region.kl_limit",
        ),
        ("model.dtype=bfloat16", "TRPO's finite differences are too small for other dtypes. Fix: "),
        (
            "actor.lora.rank=8",
            (
                "TRPO's vectors have the shapes of the full weights. Fix: set actor.lora.rank=null, or "
                "algorithm.trust_region.kl"
            ),
        ),
        (
            "actor.optimizer.name=muon",
            "TRPO's step replaces the optimizer's. Fix: set actor.optimizer.name=adamw, or algorithm.trust_region.kl",
        ),
        (
            "algorithm.correction.old=rollout",
            "TRPO's divergence from the old policy must start at 0. Fix: set algorithm.correction.",
        ),
    ],
)
def test_incompatible_keys_are_rejected_by_name(override: str, reason: str) -> None:
    (line,) = errors(*TRPO, override)
    assert f"{override}: with algorithm.trust_region.kl_limit=0.01, {reason}" in line


def test_value_head_on_the_actor_is_rejected() -> None:
    (line,) = errors(*TRPO, GAE, "critic.shared_backbone=true")
    assert (
        "critic.shared_backbone=true: with algorithm.trust_region.kl_limit=0.01, TRPO's divergence does not include a "
        "value head"
    ) in line


def test_trust_region_keys_require_a_limit() -> None:
    (line,) = errors("algorithm.trust_region.damping=0.01")
    assert "algorithm.trust_region.damping=0.01: has no effect unless algorithm.trust_region.kl_limit" in line
