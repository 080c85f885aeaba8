from __future__ import annotations

import ast
import re

import pytest

from megarl.algorithms.registry import ESTIMATORS, OBJECTIVES
from megarl.config.names import REMOVED, RENAMED, TRL, VERL, keys, suggest
from megarl.config.schema import Config
from tests.paths import ROOT
from tests.readme import text_of
from tools import key_tables


@pytest.mark.parametrize(
    ("key", "suggestion"),
    [
        ("run.step", "did you mean run.steps? Fix: rename the key"),
        ("rollout.temprature", "did you mean rollout.temperature? Fix: rename the key"),
        ("actor.optimiser.lr", "did you mean actor.optimizer.lr? Fix: rename the key"),
        (
            "lr",
            "did you mean actor.optimizer.lr or critic.optimizer.lr or implicit_reward.optimizer.lr? "
            "Fix: rename the key",
        ),
        ("actor.lr", "did you mean actor.optimizer.lr? Fix: rename the key"),
        (
            "tp",
            "did you mean actor.layout.tp or critic.layout.tp or reward_model.layout.tp or "
            "implicit_reward.layout.tp or teachers.models.layout.tp or teachers.layout.tp or "
            "rollout.tp? Fix: rename the key",
        ),
        ("rewards.functions.func", "did you mean rewards.functions.function? Fix: rename the key"),
        ("rollout.n", "verl's rollout.n corresponds to batch.samples_per_prompt. Fix: use that key"),
        ("actor_rollout_ref.rollout.n", "verl's rollout.n corresponds to batch.samples_per_prompt. Fix: use that key"),
        ("batch.n", "verl's n corresponds to batch.samples_per_prompt. Fix: use that key"),
        (
            "actor.ulysses_sequence_parallel_size",
            "verl's ulysses_sequence_parallel_size corresponds to actor.layout.cp. Fix: use that key",
        ),
        (
            "algorithm.entropy_coeff",
            "verl's entropy_coeff corresponds to algorithm.objective.entropy_coefficient. Fix: use that key",
        ),
        (
            "actor.optimizer.lr_warmup_steps_ratio",
            (
                "verl's lr_warmup_steps_ratio corresponds to actor.optimizer.schedule.warmup (below 1: a fraction of "
                "the run). Fix: use that key"
            ),
        ),
        ("data.train_batch_size", "verl's train_batch_size corresponds to batch.prompts_per_step. Fix: use that key"),
        (
            "actor_rollout_ref.rollout.tensor_model_parallel_size",
            "verl's rollout.tensor_model_parallel_size corresponds to rollout.tp. Fix: use that key",
        ),
        (
            "actor_rollout_ref.actor.megatron.tensor_model_parallel_size",
            "verl's tensor_model_parallel_size corresponds to actor.layout.tp. Fix: use that key",
        ),
        (
            "actor.quux",
            "actor has the keys layout, optimizer, tokens_per_microbatch, "
            "overlap_communication, recompute, fp8, frozen, offload, threads, megatron_overrides, lora, experts, mtp. "
            "Fix: use one of them, or remove the key",
        ),
        ("cluster.start_timeout_s", "start_timeout_s was renamed to timeouts.start. Fix: rename the key"),
        (
            "cluster.step_timeout_s",
            "step_timeout_s was renamed to timeouts (rollout, rewards, passes, update, refit, checkpoint). "
            "Fix: rename the key",
        ),
        ("actor.megatron_extra", "megatron_extra was renamed to megatron_overrides. Fix: rename the key"),
        ("rollout.too_old", "rollout.too_old was renamed to rollout.on_stale. Fix: rename the key"),
        (
            "rollout.refit_delta",
            "rollout.refit_delta was removed: a refit sends all weights. Fix: remove the key",
        ),
        ("agreement.limit", "agreement was renamed to logprob_check. Fix: rename the key"),
        (
            "environment.failures_in_a_row",
            "failures_in_a_row was renamed to max_consecutive_failures. Fix: rename the key",
        ),
        ("rollout.vllm_extra", "vllm_extra was renamed to vllm_overrides. Fix: rename the key"),
        (
            "run.quux.zyx",
            "run has the keys name, folder, seed, steps, export, replace, token_samples, trackers, profile, "
            "allow_changes, stop_on. Fix: use one of them, or remove the key",
        ),
        (
            "actor_rollout_ref.actor.use_dynamic_bsz",
            "verl's use_dynamic_bsz has no equivalent: microbatches are always filled up to "
            "actor.tokens_per_microbatch. Fix: remove the key",
        ),
        (
            "actor_rollout_ref.rollout.n_agent",
            "verl's n_agent corresponds to batch.samples_per_prompt. Fix: use that key",
        ),
        (
            "actor_rollout_ref.actor.fsdp_config.param_offload",
            "verl's param_offload corresponds to actor.offload. Fix: use that key",
        ),
        (
            "algorithm.no_think_rl",
            "verl's no_think_rl has no equivalent: all sampled tokens are trained on. Fix: remove the key",
        ),
        (
            "trainer.logger",
            "verl's logger corresponds to run.trackers (tensorboard, wandb, mlflow, trackio; console and "
            "metrics.jsonl are always on). Fix: use that key",
        ),
        (
            "ref.log_prob_micro_batch_size",
            "verl's log_prob_micro_batch_size corresponds to actor.tokens_per_microbatch (tokens, not samples). "
            "Fix: use that key",
        ),
        (
            "actor_rollout_ref.rollout.val_kwargs.n",
            "verl's val_kwargs.n corresponds to evaluation.sets.samples_per_prompt. Fix: use that key",
        ),
        (
            "algorithm.epsilon_high",
            "TRL's epsilon_high corresponds to algorithm.objective.clip_high. Fix: use that key",
        ),
        ("batch.num_iterations", "TRL's num_iterations corresponds to batch.epochs. Fix: use that key"),
        (
            "use_vllm",
            "TRL's use_vllm has no equivalent: vLLM is the only engine of language models. Fix: remove the key",
        ),
        (
            "rollout.repetition_penalty",
            "TRL's repetition_penalty has no equivalent: responses are sampled from the policy itself, without "
            "penalties. Fix: remove the key",
        ),
        (
            "log_completions",
            "TRL's log_completions has no equivalent: every sample is logged in rollouts/ in the run folder. Fix: "
            "remove the key",
        ),
        (
            "eval_strategy",
            "TRL's eval_strategy corresponds to evaluation.every_steps (null: only at the start and end). Fix: use "
            "that key",
        ),
        (
            "save_strategy",
            "TRL's save_strategy corresponds to checkpoint.every_steps (null: never). Fix: use that key",
        ),
        (
            "lr_scheduler_type",
            "lr_scheduler_type of verl and TRL corresponds to actor.optimizer.schedule.name. Fix: use that key",
        ),
        (
            "data.max_prompt_length",
            "max_prompt_length of verl and TRL corresponds to rollout.context_length (prompt and response together). "
            "Fix: use that key",
        ),
        (
            "scale_rewards",
            "TRL's scale_rewards corresponds to algorithm.advantage.std (group: sample, none: none, batch: "
            "sample with algorithm.advantage.std_over=step). Fix: use that key",
        ),
        (
            "actor_rollout_ref.actor.strategy",
            "verl's actor.strategy has no equivalent: Megatron-core is the only training backend. Fix: remove the key",
        ),
        (
            "actor_rollout_ref.rollout.load_format",
            "verl's rollout.load_format has no equivalent: engines receive their weights from the trainer. Fix: "
            "remove the key",
        ),
        (
            "data.return_raw_chat",
            "verl's return_raw_chat has no equivalent: prompts always keep their messages. Fix: remove the key",
        ),
        (
            "+reward_model.reward_kwargs.overlong_buffer_cfg.len",
            "verl's overlong_buffer_cfg.len corresponds to rewards.overlong_buffer. Fix: use that key",
        ),
        (
            "algorithm.filter_groups.metric",
            "verl's filter_groups.metric has no equivalent: batch.sampling_rounds replaces prompts whose samples all "
            "have the same reward. Fix: remove the key",
        ),
        (
            "actor_rollout_ref.ref.fsdp_config.param_offload",
            "verl's ref.fsdp_config.param_offload has no equivalent: the reference's weights are always in host "
            "memory. Fix: remove the key",
        ),
        ("actor.fsdp_config.param_offload", "verl's param_offload corresponds to actor.offload. Fix: use that key"),
        ("critic.tp", "did you mean critic.layout.tp? Fix: rename the key"),
        (
            "quux",
            "the top level has the keys resume, run, model, actor, critic, reward_model, implicit_reward, teachers, "
            "rollout, logprob_check, environment, algorithm, batch, data, rewards, sandbox, evaluation, checkpoint, "
            "cluster, trackers. Fix: use one of them, or remove the key",
        ),
    ],
)
def test_suggestion(key: str, suggestion: str) -> None:
    assert suggest(key) == suggestion


@pytest.mark.parametrize("name", [*VERL, *TRL])
def test_foreign_names_map_to_existing_keys(name: str) -> None:
    first, *others = (VERL | TRL)[name].split(" (")[0].split(" and ")
    assert {first, *others} <= set(keys())
    assert name not in keys(), "a key of megarl needs no translation"


@pytest.mark.parametrize("name", key_tables.PAGES)
def test_key_tables_are_generated(name: str) -> None:
    """`python tools/key_tables.py` generates them."""
    page = text_of(name)
    _, keys, without_key = arguments = key_tables.PAGES[name]
    assert key_tables.render(page, key_tables.key_table(*arguments)) == page
    assert all(f"`{key}`" in page for key in (*keys, *without_key))


def test_messages_name_existing_keys() -> None:
    """A remedy `key=value` in a message must use the key's current name."""
    known = {
        *keys(),
        *(f"algorithm.objective.{option}" for spec in OBJECTIVES.values() for option in spec.all_parameters),
        *(f"algorithm.advantage.{option}" for spec in ESTIMATORS.values() for option in spec.all_parameters),
    }
    sections = {name.partition(".")[0] for name in (*Config.model_fields, *RENAMED, *REMOVED)}
    key_and_value = re.compile(r"(?<![\w./-])([a-z_]+(?:\.[a-z_]+)+)(?==)")
    unknown = [
        f"{file.relative_to(ROOT)}:{node.lineno}: {key}"
        for file in sorted((ROOT / "megarl").rglob("*.py"))
        if file.name != "names.py"
        if key_and_value.search(source := file.read_text(encoding="utf-8"))
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for key in key_and_value.findall(node.value)
        if key.partition(".")[0] in sections and key not in known and "_overrides." not in key
    ]
    assert unknown == []
