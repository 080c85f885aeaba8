from __future__ import annotations

import pytest

from tests.unit.config.rules.recipes import errors

LORA = "actor.lora.rank=8"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ['actor.frozen=["model.norm.*"]'],
            "actor.frozen=['model.norm.*']: actor.lora.rank=8 already freezes the whole model",
        ),
        (
            ['actor.optimizer.no_weight_decay=["model.norm.*"]'],
            "actor.optimizer.no_weight_decay=['model.norm.*']: the patterns select tensors of the model, but",
        ),
        (
            ["actor.optimizer.name=muon"],
            "actor.optimizer.name=muon: with actor.lora.rank=8, only adapters are trained, and Muon does not support",
        ),
        (
            ["algorithm.objective.name=reward_model", "data.format=preferences"],
            "actor.lora.rank=8: with algorithm.objective.name=reward_model the actor has a new score head, which would",
        ),
        (
            ["algorithm.objective.name=token_reward_model", "data.format=labels"],
            "actor.lora.rank=8: with algorithm.objective.name=token_reward_model the actor has a new score head, which",
        ),
        (
            ["algorithm.advantage.estimator=gae", "critic.shared_backbone=true"],
            "actor.lora.rank=8: with critic.shared_backbone=true the actor has a new value head, which would not be "
            "trained",
        ),
        (
            ["actor.mtp.loss_coefficient=0.1"],
            "actor.mtp.loss_coefficient=0.1: with actor.lora.rank=8 only adapters are trained and checkpointed, but",
        ),
        (
            ["model.dtype=bfloat16", "actor.fp8=blockwise"],
            "actor.fp8=blockwise: with actor.lora.rank=8 engines compute with merged weights, but",
        ),
        (
            ["algorithm.kl={coefficient: 0.1, renew_steps: 2}"],
            "algorithm.kl.renew_steps=2: with actor.lora.rank=8 the reference is the model without adapters, which",
        ),
        (
            ["actor.offload=[gradients, parameters]"],
            "actor.offload=['gradients', 'parameters']: with actor.lora.rank=8 megarl keeps a copy of",
        ),
        (
            ["actor.megatron_overrides.model={moe_router_bias_update_rate: 0.001}"],
            "moe_router_bias_update_rate=0.001: with actor.lora.rank=8, checkpoints contain only adapters",
        ),
        (
            ["actor.megatron_overrides.model={moe_shared_expert_overlap: true}"],
            "moe_shared_expert_overlap=true: with actor.lora.rank=8 adapters communicate inside their layers",
        ),
    ],
)
def test_broken_rule_is_reported(overrides: list[str], message: str) -> None:
    assert any(message in line for line in errors(LORA, *overrides))


def test_adapter_keys_require_a_rank() -> None:
    (line,) = errors("actor.lora.alpha=16")
    assert "actor.lora.alpha=16.0: has no effect unless actor.lora.rank" in line
