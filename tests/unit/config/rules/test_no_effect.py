"""Keys without effect in a run are rejected."""

from __future__ import annotations

import pytest

from megarl.config.load import dump, load
from megarl.config.schema import Config
from tests.paths import BASE

GAE = "algorithm.advantage.estimator=gae"


def recipe(*overrides: str) -> Config:
    return load(BASE, ["model.path=m", "data.source=arithmetic", *overrides])


@pytest.mark.parametrize(
    ("key", "to", "line"),
    [
        (
            "algorithm.value.clip=0.2",
            [GAE],
            "algorithm.value.clip=0.2: has no effect unless algorithm.advantage.estimator=gae. Fix: set "
            "algorithm.advantage.estimator=gae, or remove the key (its default is null)",
        ),
        (
            "algorithm.value.aggregation=sequence_mean_of_token_means",
            [GAE],
            "algorithm.value.aggregation=sequence_mean_of_token_means: has no effect unless algorithm.adv",
        ),
        (
            "critic.optimizer.lr=1.0",
            [GAE],
            "critic.optimizer.lr=1.0: has no effect unless algorithm.advantage.estimator=gae. Fix: set "
            "algorithm.advantage.estimator=gae, or remove the key (its default is 1.0e-06)",
        ),
        ("critic.layout.dp=2", [GAE], "critic.layout.dp=2: has no effect unless algorithm.advantage.estimator=gae"),
        (
            "critic.shared_backbone=true",
            [GAE],
            "critic.shared_backbone=true: has no effect unless algorithm.advantage.estimator=gae",
        ),
        ("critic.offload=[gradients]", [GAE], "critic.offload=[gradients]: has no effect unless algorithm.adv"),
        (
            "reward_model.weight=2",
            ["reward_model.path=r"],
            "reward_model.weight=2.0: has no effect unless reward_model.path=PATH",
        ),
        (
            "algorithm.correction.weight_limit=null",
            ["algorithm.correction.weight=token"],
            "algorithm.correction.weight_limit=null: has no effect unless algorithm.correction.weight=token. Fix: set "
            "algorithm.correction.weight=token, or remove the key (its default is 2.0",
        ),
        (
            "algorithm.correction.mask_low=0.9",
            ["algorithm.correction.mask=token"],
            "algorithm.correction.mask_low=0.9: has no effect unless algorithm.correction.mask=token. Fix:",
        ),
        (
            "algorithm.kl.adaptive_horizon=2048",
            ["algorithm.kl={coefficient: 0.1, adaptive_target: 0.1}"],
            "algorithm.kl.adaptive_horizon=2048: has no effect unless algorithm.kl.adaptive_target=0.1. Fix:",
        ),
    ],
)
def test_key_is_an_error_until_it_has_an_effect(key, to, line):
    with pytest.raises(ValueError) as error:
        recipe(key)
    assert str(error.value).startswith(line) and "\n" not in str(error.value)
    recipe(key, *to)


@pytest.mark.parametrize("key", ["critic.optimizer.lr=1.0", "critic.path=c", "algorithm.value.aggregation=token_mean"])
def test_shared_backbone_rejects_separate_critic_keys(key):
    on_actor = (GAE, "critic.shared_backbone=true", "algorithm.objective.aggregation=token_mean")
    recipe(*on_actor, "algorithm.value={coefficient: 0.5, clip: 0.2}")
    recipe(GAE, key)
    if "aggregation" in key:  # base.yaml already has this value
        key = "algorithm.value.aggregation=sequence_mean_of_token_sums"
    with pytest.raises(ValueError, match=rf"^{key}: has no effect unless critic.shared_backbone=false. Fix: set"):
        recipe(*on_actor, key)


@pytest.mark.parametrize("key", ["cluster.spare_processes=true", "cluster.copy_every_steps=3"])
def test_recovery_needs_replaceable_ranks(key: str):
    recipe(key)
    with pytest.raises(ValueError, match=f"^{key}: has no effect unless cluster.replace_ranks=true"):
        recipe(key, "cluster.replace_ranks=false")


def test_values_of_the_base_recipe_are_accepted():
    recipe("critic.optimizer.lr=1e-6", "algorithm.value={coefficient: 1, clip: null}")


@pytest.mark.parametrize("key", ["algorithm.kl.estimator=k2", "implicit_reward.beta=9"])
def test_zero_coefficient_is_accepted_beside_others(key):
    for value in (0, 0.1):
        recipe(key, f"{key.rpartition('.')[0]}.coefficient={value}")


def test_recipe_without_a_base_file_may_keep_unused_keys(tmp_path):
    flat = tmp_path / "flat.yaml"
    flat.write_text(dump(recipe(GAE, "critic.optimizer.lr=1.0", "algorithm.value.clip=0.2")))
    assert load(flat, ["algorithm.advantage.estimator=grpo"]).critic.optimizer.lr == 1
