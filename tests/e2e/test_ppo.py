"""Complete PPO runs whose critic has its own processes and a different layout than the actor.

tests/e2e/test_reward_model.py has the shorter PPO run that runs every time.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import pytest
from transformers import AutoModelForCausalLM

from megarl.models.value_head import KEY
from tests.e2e.run import read_trace
from tests.e2e.test_train import REWARD, ROUNDS, TURNS, metrics_of, train_in

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]
STEPS, WARMUP = 16, 2


@pytest.fixture(scope="module")
def learned(series, model, tmp_path_factory) -> Path:
    return train_in(
        series,
        tmp_path_factory.mktemp("ppo"),
        model,
        f"run.steps={STEPS}",
        "algorithm.advantage={estimator: gae, gae_lambda: 1.0}",
        "actor.layout.dp=2",
        "critic.layout.pp=2",
        "critic.optimizer.lr=0.003",
        f"critic.warmup_steps={WARMUP}",
        "critic.tokens_per_microbatch=512",
        # With separate devices and a negligible KL, the actor has a pass with which the critic's passes can overlap.
        "cluster.placement=disaggregated",
        "rollout.transport=shared_memory",
        "algorithm.kl.coefficient=1.0e-9",
    )


@pytest.mark.one_part
def test_reward_rises_and_the_critic_follows(learned):
    steps = metrics_of(learned)
    assert len(steps) == STEPS
    assert fmean(step["reward/mean"] for step in steps[:WARMUP]) <= 0.3
    assert fmean(step["reward/mean"] for step in steps[-3:]) >= 0.9
    assert all(step["value/return_mean"] == pytest.approx(step["reward/mean"], abs=0.1) for step in steps)
    assert steps[-1]["value/error_abs_mean"] <= 0.25


@pytest.mark.one_part
def test_critic_warmup_trains_only_the_critic(learned):
    trained = ["policy/grad_norm" in step for step in metrics_of(learned)]
    assert trained == [False] * WARMUP + [True] * (STEPS - WARMUP)
    assert all(step["value/grad_norm"] > 0 for step in metrics_of(learned))


@pytest.mark.one_part
def test_critic_has_its_own_processes(learned):
    logs = {file.stem for file in (learned / "logs").glob("**/*.log")}
    assert {"trainer-0", "trainer-1", "critic-0", "critic-1"} <= logs


@pytest.mark.one_part
@pytest.mark.parametrize(("actor_task", "critic_task"), [("reference_log_probs", "score_tokens"), ("update", "update")])
def test_actor_and_critic_overlap(learned, actor_task, critic_task):
    """The traces of actor and critic, which have separate devices, overlap in most steps that train both."""
    trace = read_trace(learned / "logs/attempt_1")
    actor = [span for span in trace if (span.process, span.task) == ("trainer-0", actor_task)]
    critic = [span for span in trace if (span.process, span.task) == ("critic-0", critic_task)][-len(actor) :]
    assert len(actor) == len(critic) == STEPS - WARMUP
    overlap = [max(a.begin, b.begin) < min(a.end, b.end) for a, b in zip(actor, critic, strict=True)]
    assert sum(overlap) > len(overlap) / 2, "tasks do not overlap in most steps (machine load may delay a few)"


def test_critic_implicit_reward_and_turn_rewards_combine(series, model, tmp_path):
    run = train_in(
        series,
        tmp_path,
        model,
        "run.steps=3",
        "algorithm.advantage.estimator=gae",
        f"rewards.functions=[{{function: '{REWARD}:digit_share_of_turns', per_turn: true}}]",
        "implicit_reward.coefficient=1.0",
        "implicit_reward.success_above=0.2",
        "implicit_reward.layout.dp=2",
        "implicit_reward.optimizer.lr=0.01",
        "critic.offload=[parameters]",
        "actor.layout.dp=2",
        "batch={epochs: 3, epochs_kl_limit: 1.0e-9}",
        "implicit_reward.offload=[parameters, gradients, optimizer]",
        "batch.prompts_per_update=4",
    )
    steps = metrics_of(run)
    assert [step["weights/version"] for step in steps] == [1, 2, 3]
    assert all(step["update/epochs"] == 1 for step in steps), "epochs_kl_limit did not stop the second epoch"
    assert all(step["reward/mean"] > 0 for step in steps)
    # The model starts equal to its reference, so its rewards are 0 and its loss is ln 2.
    assert steps[0]["implicit_reward/loss"] > 0 and steps[0]["implicit_reward/grad_norm"] > 0
    assert all(step["value/grad_norm"] > 0 and step["policy/grad_norm"] > 0 for step in steps)
    offloaded = ["critic_parameters", *(f"implicit_reward_{part}" for part in ("parameters", "gradients", "optimizer"))]
    assert all(steps[-1][f"memory/{part}_offloaded_gb"] > 0 for part in offloaded)
    assert {"implicit-reward-0", "implicit-reward-1"} <= {file.stem for file in (run / "logs").glob("**/*.log")}


def test_critic_can_be_a_head_on_the_actor(series, model, tmp_path):
    overrides = ["algorithm.advantage.estimator=gae", "critic.shared_backbone=true", "actor.layout.pp=2"]
    run = train_in(series, tmp_path, model, "run.steps=3", *overrides)
    steps = metrics_of(run)
    assert [step["weights/version"] for step in steps] == [1, 2, 3]
    assert steps[0]["value/mean"] == 0 != steps[-1]["value/mean"]
    assert not list((run / "logs").glob("**/critic-*"))
    exported = AutoModelForCausalLM.from_pretrained(run / "model")  # exported without the value head
    assert KEY not in json.loads((run / "model" / "config.json").read_text())
    assert exported.num_parameters() == AutoModelForCausalLM.from_pretrained(model).num_parameters()


def test_resumed_run_with_critic_is_bitwise_equal(series, model, tmp_path):
    """The resumed run also offloads idle state, even while saving, and its engine sleeps between rollouts.

    Each process has one thread, because the summation order of several is not deterministic.
    """
    overrides = [
        *("algorithm.advantage.estimator=gae", "algorithm.kl.coefficient=0.05", "batch.prompts_per_update=4"),
        *("actor.threads=1", "critic.threads=1", "rollout.threads=1", "checkpoint.every_steps=1", "run.export=false"),
        *("batch.epochs=2", *ROUNDS),
    ]
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    whole = metrics_of(train_in(series, tmp_path / "whole", model, "run.steps=2", *overrides))
    turns = [*overrides, *TURNS, "critic.offload=[parameters, gradients, optimizer]"]
    train_in(series, tmp_path / "parts", model, "run.steps=1", *turns)
    parts = metrics_of(train_in(series, tmp_path / "parts", model, "run.steps=2", "resume=auto", *turns))
    assert parts[-1]["memory/critic_optimizer_offloaded_gb"] > 0 and parts[-1]["rollout/rounds"] == 2
    learned = {name for name in whole[-1] if name.partition("/")[0] in ("reward", "policy", "value", "kl")}
    assert len(learned) > 15
    assert {name: parts[-1][name] for name in learned} == {name: whole[-1][name] for name in learned}
