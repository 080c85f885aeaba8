"""Recipes that combine the most features, unchanged except for size, on a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.series import Series
from tests.e2e.test_train import REWARD, metrics_of
from tests.paths import CONFIGS

pytestmark = pytest.mark.slow
TINY = (
    *("run.steps=3", "run.export=false", "model.dtype=float32", "actor.layout={pp: 1}"),
    *("actor.layout.last_stage_layers=null", "actor.optimizer.lr=0.003", "rollout.kv_cache_gib=0.02"),
    *("batch.prompts_per_step=4", "batch.prompts_per_update=4", "cluster.object_store_mib=80"),
    f"rewards.functions=[{{function: '{REWARD}:digit_share', weight: 1.0}}]",
)


def run_recipe(series: Series, name: str, folder: Path, model: Path, *overrides: str) -> Path:
    """Run a recipe as a run of the same name. Return the run's folder."""
    place = (f"model.path={model}", f"run.folder={folder}", f"run.name={name}")
    series.train(CONFIGS / f"smollm2-cpu-{name}.yaml", *place, *TINY, *overrides)
    return folder / name


@pytest.mark.exhaustive
def test_vc_ppo_with_kl_in_the_reward(series, model, tmp_path):
    run = run_recipe(
        series, "vc-ppo", tmp_path, model, "critic.layout.pp=1", "critic.warmup_steps=1", "batch.samples_per_prompt=2"
    )
    steps = metrics_of(run)
    assert ["policy/loss" in step for step in steps] == [False, True, True]
    assert steps[1]["kl/reward_to_go_token_k1"] == pytest.approx(0, abs=1e-6)  # the policy still equals its reference
    assert abs(steps[2]["kl/reward_to_go_token_k1"]) > 1e-5
    assert all(step["value/grad_norm"] > 0 for step in steps)


@pytest.mark.exhaustive
def test_prime_trains_both_models(series, model, tmp_path):
    run = run_recipe(
        series, "prime", tmp_path, model, "implicit_reward.layout.pp=1", "implicit_reward.success_above=0.2"
    )
    steps = metrics_of(run)
    assert all(step["implicit_reward/grad_norm"] > 0 and step["policy/grad_norm"] > 0 for step in steps)


@pytest.mark.exhaustive
def test_online_dpo_learns_the_judges_preferences(series, model, tmp_path):
    """The judge compares pairs, so the mean win rate is a half. The policy learns the judge's preferences."""
    run = run_recipe(
        series,
        "online-dpo",
        tmp_path,
        model,
        "rewards.functions=[]",
        f"rewards.judge={REWARD}:judge",
        "actor.layout.dp=2",
    )
    steps = metrics_of(run)
    assert all(step["reward/mean"] == step["reward/judge"] == pytest.approx(0.5) for step in steps)
    assert steps[0]["policy/loss"] == pytest.approx(0.693, abs=1e-3)  # ln 2: the policy still equals its reference
    assert steps[2]["policy/loss"] < 0.68 and steps[2]["preference/accuracy"] > 0.5
    assert all(step["preference/tied_frac"] < 0.5 and step["mismatch/logprob_abs_max"] < 1e-4 for step in steps)
