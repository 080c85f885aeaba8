"""Recipes of papers on a tiny model: those that bring the most together, as they are but for size."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.test_train import REWARD, metrics_of
from tests.paths import ROOT
from tests.tiny_model import write_tiny_llama

pytestmark = pytest.mark.slow
TINY = (
    *("run.steps=3", "run.export=false", "model.dtype=float32", "actor.layout={pp: 1}"),
    *("actor.layout.last_stage_layers=null", "actor.optimizer.lr=0.003", "rollout.kv_cache_gib=0.02"),
    *("batch.prompts_per_step=4", "batch.prompts_per_update=4", "cluster.object_store_mib=80"),
    f"rewards.functions=[{{function: '{REWARD}:digit_share', weight: 1.0}}]",
)


def run(name: str, folder: Path, *overrides: str) -> list[dict]:
    return metrics_of(stage(name, folder, write_tiny_llama(folder / "model", num_kv_heads=2), "tiny", *overrides))


def stage(name: str, folder: Path, model: Path, run_name: str, *overrides: str) -> Path:
    """Runs a recipe. Returns the run's folder."""
    recipe, made = ROOT / "configs" / f"smollm2-cpu-{name}.yaml", folder / "runs" / run_name
    arguments = [str(recipe), f"model.path={model}", f"run.folder={made.parent}", f"run.name={run_name}"]
    command = [sys.executable, "-m", "megarl.cli", "train", *arguments, *TINY, *overrides]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT)
    logs = "\n".join(file.read_text()[-2000:] for file in (made / "logs/attempt_1").glob("*"))
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{logs}"
    return made


@pytest.mark.exhaustive
def test_vc_ppo_with_the_kl_in_the_reward(tmp_path):
    steps = run("vc-ppo", tmp_path, "critic.layout.pp=1", "critic.warmup_steps=1", "batch.samples_per_prompt=2")
    assert ["policy/loss" in step for step in steps] == [False, True, True]
    assert steps[1]["kl/reward_to_go_token_k1"] == pytest.approx(0, abs=1e-6)  # the policy is still its reference
    assert abs(steps[2]["kl/reward_to_go_token_k1"]) > 1e-5
    assert all(step["value/grad_norm"] > 0 for step in steps)


@pytest.mark.exhaustive
def test_prime_rewards_tokens_by_what_it_learns_from_outcomes(tmp_path):
    steps = run("prime", tmp_path, "implicit_reward.layout.pp=1", "implicit_reward.success_above=0.2")
    assert all(step["implicit_reward/grad_norm"] > 0 and step["policy/grad_norm"] > 0 for step in steps)


def test_online_dpo_of_pairs_that_a_judge_prefers(tmp_path):
    """Who wins against whom: the mean of all shares is a half. The policy then says it of other samples."""
    steps = run("online-dpo", tmp_path, "rewards.functions=[]", f"rewards.judge={REWARD}:judge", "actor.layout.dp=2")
    assert all(step["reward/mean"] == step["reward/judge"] == pytest.approx(0.5) for step in steps)
    assert steps[0]["policy/loss"] == pytest.approx(0.693, abs=1e-3)  # it is still its reference
    assert steps[2]["policy/loss"] < 0.68 and steps[2]["preference/accuracy"] > 0.5
    assert all(step["preference/tied_share"] < 0.5 and step["mismatch/logprob_abs_max"] < 1e-4 for step in steps)
