"""A whole run of PPO with a critic on processes of its own, in another layout than the actor's."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import pytest
from transformers import AutoModelForCausalLM

from megarl.cluster.trace import read_trace
from megarl.models.value_head import KEY
from tests.e2e.test_train import REWARD, ROUNDS, TURNS, metrics_of, train_in

pytestmark = pytest.mark.slow
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
        # Devices of their own, and a pass of the actor that the critic's can overlap with; too small to be noticed.
        "cluster.placement=disaggregated",
        "rollout.transport=shared_memory",
        "algorithm.kl.coefficient=1.0e-9",
    )


def test_reward_rises_and_the_critic_follows(learned):
    steps = metrics_of(learned)
    assert len(steps) == STEPS
    assert fmean(step["reward/mean"] for step in steps[:WARMUP]) <= 0.3
    assert fmean(step["reward/mean"] for step in steps[-3:]) >= 0.9
    assert all(step["value/return_mean"] == pytest.approx(step["reward/mean"], abs=0.1) for step in steps)
    assert steps[-1]["value/error_abs_mean"] <= 0.25


def test_a_warming_critic_is_trained_alone(learned):
    trained = ["policy/grad_norm" in step for step in metrics_of(learned)]
    assert trained == [False] * WARMUP + [True] * (STEPS - WARMUP)
    assert all(step["value/grad_norm"] > 0 for step in metrics_of(learned))


def test_the_critic_has_processes_of_its_own(learned):
    logs = {file.stem for file in (learned / "logs").glob("**/*.log")}
    assert {"trainer-0", "trainer-1", "critic-0", "critic-1"} <= logs


@pytest.mark.parametrize(("of_actor", "of_critic"), [("reference_log_probs", "score_tokens"), ("update", "update")])
def test_passes_and_updates_of_actor_and_critic_overlap(learned, of_actor, of_critic):
    """They have devices of their own; their processes say when they began and ended, in each step with both."""
    trace = read_trace(learned / "logs/attempt_1")
    actor = [span for span in trace if (span.process, span.task) == ("trainer-0", of_actor)]
    critic = [span for span in trace if (span.process, span.task) == ("critic-0", of_critic)][-len(actor) :]
    assert len(actor) == len(critic) == STEPS - WARMUP
    overlap = [max(a.begin, b.begin) < min(a.end, b.end) for a, b in zip(actor, critic, strict=True)]
    assert sum(overlap) > len(overlap) / 2, "one may be held up by what else the machine does"


@pytest.mark.exhaustive
def test_a_critic_an_implicit_reward_model_and_rewards_of_turns_run_together(series, model, tmp_path):
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
    assert all(step["update/epochs"] == 1 for step in steps), "the second update has moved the policy too far"
    assert all(step["reward/mean"] > 0 for step in steps)
    # At its start it is its reference: its rewards are 0, and its loss that of a coin.
    assert steps[0]["implicit_reward/loss"] > 0 and steps[0]["implicit_reward/grad_norm"] > 0
    assert all(step["value/grad_norm"] > 0 and step["policy/grad_norm"] > 0 for step in steps)
    offloaded = ["critic_parameters", *(f"implicit_reward_{part}" for part in ("parameters", "gradients", "optimizer"))]
    assert all(steps[-1][f"memory/{part}_offloaded_gb"] > 0 for part in offloaded)
    assert {"implicit-reward-0", "implicit-reward-1"} <= {file.stem for file in (run / "logs").glob("**/*.log")}


@pytest.mark.exhaustive
def test_the_critic_may_be_a_head_on_the_actor(series, model, tmp_path):
    overrides = ["algorithm.advantage.estimator=gae", "critic.shared_backbone=true", "actor.layout.pp=2"]
    run = train_in(series, tmp_path, model, "run.steps=3", *overrides)
    steps = metrics_of(run)
    assert [step["weights/version"] for step in steps] == [1, 2, 3]
    assert steps[0]["value/mean"] == 0 != steps[-1]["value/mean"]
    assert not list((run / "logs").glob("**/critic-*"))
    exported = AutoModelForCausalLM.from_pretrained(run / "model")  # without the head, which no such model has
    assert KEY not in json.loads((run / "model" / "config.json").read_text())
    assert exported.num_parameters() == AutoModelForCausalLM.from_pretrained(model).num_parameters()


@pytest.mark.exhaustive
def test_a_run_with_a_critic_goes_on_bit_by_bit(series, model, tmp_path):
    """One thread a process, as several add up numbers in an order of their own. The run in parts has in host memory
    what does not compute, at the saves as well, and its engine sleeps after the rounds of a step."""
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
