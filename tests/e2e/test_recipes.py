"""Recipes of papers on a tiny model: those that bring the most together, as they are but for size."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.test_train import REWARD, metrics_of
from tests.tiny_model import write_tiny_llama

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
TINY = (
    *("run.steps=3", "run.name=tiny", "run.export=false", "model.dtype=float32", "actor.layout={pp: 1}"),
    *("actor.layout.last_stage_layers=null", "actor.optimizer.lr=0.003", "rollout.kv_cache_gib=0.02"),
    *("batch.prompts_per_step=4", "batch.prompts_per_update=4", "cluster.object_store_mib=80"),
    f"rewards.functions=[{{function: '{REWARD}:digit_share', weight: 1.0}}]",
)


def run(name: str, folder: Path, *overrides: str) -> list[dict]:
    model = write_tiny_llama(folder / "model", num_kv_heads=2)
    recipe = ROOT / "configs" / f"smollm2-cpu-{name}.yaml"
    arguments = [str(recipe), f"model.path={model}", f"run.folder={folder / 'runs'}", *TINY, *overrides]
    command = [sys.executable, "-m", "megarl.cli", "train", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT)
    logs = "\n".join(file.read_text()[-2000:] for file in (folder / "runs/tiny/logs/attempt_1").glob("*"))
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{logs}"
    return metrics_of(folder / "runs" / "tiny")


def test_vc_ppo_with_the_kl_in_the_reward(tmp_path):
    steps = run("vc-ppo", tmp_path, "critic.layout.pp=1", "critic.warmup_steps=1", "batch.samples_per_prompt=2")
    assert ["policy/loss" in step for step in steps] == [False, True, True]
    assert steps[1]["kl/reward_token_k1"] == pytest.approx(0, abs=1e-6)  # the policy is still its reference
    assert abs(steps[2]["kl/reward_token_k1"]) > 1e-5
    assert all(step["value/grad_norm"] > 0 for step in steps)


def test_prime_rewards_tokens_by_what_it_learns_from_outcomes(tmp_path):
    steps = run("prime", tmp_path, "implicit_reward.layout.pp=1", "implicit_reward.success_above=0.2")
    assert all(step["implicit_reward/grad_norm"] > 0 and step["policy/grad_norm"] > 0 for step in steps)
