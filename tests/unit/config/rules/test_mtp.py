import pytest

from tests.unit.config.rules.recipes import errors, recipe

TRAINED = "actor.mtp.loss_coefficient=0.1"
OF_TRPO = ("algorithm.trust_region.kl_limit=0.01", "algorithm.objective={name: unclipped}", "model.dtype=float32")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm.objective.name=dpo", "data.format=preferences"], "algorithm.objective.name=dpo has no per-token"),
        (["algorithm.objective.name=token_reward_model", "data.format=labels"], "has no per-token weights"),
        (OF_TRPO, "the step of TRPO (algorithm.trust_region.kl_limit) trains the policy only"),
    ],
)
def test_objectives_that_cannot_train_the_layer_are_rejected(overrides, message) -> None:
    found = errors(TRAINED, *overrides)
    assert any(line.startswith(f"{TRAINED}: ") and message in line for line in found), found
    assert recipe("actor.mtp.loss_coefficient=0.0", *overrides).actor.has_mtp


@pytest.mark.parametrize("overrides", [[], ["algorithm.objective.name=sft", "data.format=messages"]])
def test_objectives_with_token_weights_train_the_layer(overrides) -> None:
    assert recipe(TRAINED, *overrides).actor.mtp.is_trained
