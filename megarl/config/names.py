"""Names of config keys, and suggestions for unknown keys."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel

from megarl.config.algorithm_schema import Variant
from megarl.config.schema import Config

VERL = {
    "actor.optim.lr": "actor.optimizer.lr",
    "actor.optim.weight_decay": "actor.optimizer.weight_decay",
    "actor_rollout_ref.model.path": "model.path",
    "adv_estimator": "algorithm.advantage.estimator",
    "clip_grad": "actor.optimizer.clip_grad_norm",
    "clip_ratio": "algorithm.objective.clip_low and algorithm.objective.clip_high",
    "clip_ratio_c": "algorithm.objective.dual_clip",
    "clip_ratio_high": "algorithm.objective.clip_high",
    "clip_ratio_low": "algorithm.objective.clip_low",
    "cliprange_value": "algorithm.value.clip",
    "context_parallel_size": "actor.layout.cp",
    "critic.optim.lr": "critic.optimizer.lr",
    "critic_warmup": "critic.warmup_steps",
    "custom_reward_function.name": "rewards.functions (function: path/to/file.py:name)",
    "custom_reward_function.path": "rewards.functions (function: path/to/file.py:name)",
    "custom_reward_function.reward_kwargs": "rewards.functions (options of an entry)",
    "data_source": "data.source_column",
    "do_search": "environment.class (search)",
    "default_local_dir": "run.folder",
    "enable_gradient_checkpointing": "actor.recompute",
    "enforce_eager": "rollout.vllm_overrides",
    "entropy_coeff": "algorithm.objective.entropy_coefficient",
    "experiment_name": "run.name",
    "expert_model_parallel_size": "actor.layout.ep",
    "expert_tensor_parallel_size": "actor.layout.etp",
    "extra_info": "rewards.functions (a function receives columns by parameter name, or all of them as `row`)",
    "filter_groups.enable": "batch.sampling_rounds",
    "filter_overlong_prompts": "data.overlong (drop)",
    "free_cache_engine": "rollout.sleep",
    "gdpo_reward_weights": "rewards.functions.weight",
    "gpu_memory_utilization": "rollout.kv_cache_gib (GiB per rank of an engine, in addition to its weights)",
    "grad_clip": "actor.optimizer.clip_grad_norm",
    "grad_offload": "actor.offload",
    "ground_truth": "data.answer_column",
    "high_level_gamma": "algorithm.advantage.turn_gamma",
    "hybrid_engine": "cluster.placement",
    "image_key": "data.image_column",
    "input_tokenizer": "reward_model.input_format (ids, text, chat or question)",
    "kl_coef": "algorithm.kl.coefficient",
    "kl_ctrl.horizon": "algorithm.kl.adaptive_horizon",
    "kl_ctrl.kl_coef": "algorithm.kl.coefficient",
    "kl_ctrl.target_kl": "algorithm.kl.adaptive_target",
    "kl_ctrl.type": "algorithm.kl.adaptive_target (null: fixed)",
    "kl_loss_coef": "algorithm.kl.coefficient",
    "kl_loss_type": (
        "algorithm.kl.estimator (kl: k1, mse: k2, abs: abs, low_var_kl: k3 with limit=10; +: straight_through)"
    ),
    "kl_penalty": "algorithm.kl.estimator",
    "lam": "algorithm.advantage.gae_lambda",
    "log_prob_max_token_len_per_gpu": "actor.tokens_per_microbatch",
    "log_prob_micro_batch_size": "actor.tokens_per_microbatch (tokens, not samples)",
    "log_prob_micro_batch_size_per_gpu": "actor.tokens_per_microbatch (tokens, not samples)",
    "logger": "run.trackers (tensorboard, wandb, mlflow, trackio; console and metrics.jsonl are always on)",
    "lora_adapter_path": "actor.lora.path",
    "lora_alpha": "actor.lora.alpha",
    "lora_rank": "actor.lora.rank",
    "loss_agg_mode": "algorithm.objective.aggregation",
    "loss_mode": "algorithm.objective.name",
    "lr_decay_style": "actor.optimizer.schedule.name",
    "lr_scheduler_type": "actor.optimizer.schedule.name",
    "lr_warmup_steps": "actor.optimizer.schedule.warmup",
    "lr_warmup_steps_ratio": "actor.optimizer.schedule.warmup (below 1: a fraction of the run)",
    "max_actor_ckpt_to_keep": "checkpoint.keep",
    "max_model_len": "rollout.context_length",
    "max_num_batched_tokens": "rollout.vllm_overrides",
    "max_num_gen_batches": "batch.sampling_rounds",
    "max_num_seqs": "rollout.vllm_overrides",
    "max_obs_length": "environment.observation_tokens",
    "max_prompt_length": "rollout.context_length (prompt and response together)",
    "max_response_length": "rollout.max_new_tokens",
    "max_start_length": "rollout.context_length (prompt and response together)",
    "min_lr_ratio": "actor.optimizer.schedule.min_lr (absolute)",
    "multi_turn.enable": "environment.class",
    "multi_turn.format": "environment.tool_format",
    "multi_turn.interaction_config_path": "environment.class and environment.options",
    "multi_turn.max_assistant_turns": "environment.max_turns",
    "multi_turn.max_tool_response_length": "environment.observation_tokens (tokens, not characters)",
    "multi_turn.tool_config_path": "environment.class (tools are methods of the class)",
    "n": "batch.samples_per_prompt",
    "n_agent": "batch.samples_per_prompt",
    "nnodes": "cluster.nodes",
    "norm_adv_by_std_in_grpo": "algorithm.advantage.std",
    "optimizer_offload": "actor.offload",
    "over_sample_rate": "batch.oversampling (above 1, with rollout.on_stale=drop)",
    "overlong_buffer.enable": "rewards.overlong_buffer (null disables it)",
    "overlong_buffer.len": "rewards.overlong_buffer",
    "overlong_buffer_cfg.enable": "rewards.overlong_buffer (null disables it)",
    "overlong_buffer_cfg.len": "rewards.overlong_buffer",
    "override_transformer_config": "actor.megatron_overrides.model",
    "param_offload": "actor.offload",
    "pipeline_model_parallel_size": "actor.layout.pp",
    "ppo_epochs": "batch.epochs",
    "ppo_max_token_len_per_gpu": "actor.tokens_per_microbatch",
    "ppo_micro_batch_size": "actor.tokens_per_microbatch (tokens, not samples)",
    "ppo_micro_batch_size_per_gpu": "actor.tokens_per_microbatch (tokens, not samples)",
    "ppo_mini_batch_size": "batch.prompts_per_update",
    "project_name": "trackers.project",
    "prompt_key": "data.prompt_column",
    "recompute_granularity": "actor.recompute",
    "resume_from_path": "resume (the path of a checkpoint)",
    "resume_mode": "resume (never, auto or the path of a checkpoint)",
    "retriever": "environment.options (url and topk of environment.class=search)",
    "reward_fn_key": "data.source_column",
    "reward_manager": "rewards.functions (a batch function: f(prompts, responses, answers))",
    "reward_model.model.path": "reward_model.path",
    "rollout.n": "batch.samples_per_prompt",
    "rollout.tensor_model_parallel_size": "rollout.tp",
    "rollout_is": "algorithm.correction.weight",
    "rollout_is_threshold": "algorithm.correction.weight_limit",
    "rollout_rs": "algorithm.correction.mask",
    "save_freq": "checkpoint.every_steps",
    "staleness_threshold": "rollout.max_staleness (in steps)",
    "step_advantage_w": "algorithm.advantage.turn_weight",
    "target_modules": "actor.lora.targets",
    "tensor_model_parallel_size": "actor.layout.tp",
    "test_freq": "evaluation.every_steps",
    "total_epochs": "run.steps (in steps; the data repeats as needed)",
    "total_training_steps": "run.steps",
    "train_batch_size": "batch.prompts_per_step",
    "train_files": "data.source and data.more_sources",
    "truncation": "data.overlong (refuse or drop; prompts are never truncated)",
    "ulysses_sequence_parallel_size": "actor.layout.cp",
    "use_kl_in_reward": "algorithm.kl.placement (reward)",
    "use_kl_loss": "algorithm.kl.coefficient (0: no KL)",
    "val_before_train": "evaluation.at_start",
    "val_files": "evaluation.sets",
    "val_kwargs.n": "evaluation.sets.samples_per_prompt",
    "val_kwargs.temperature": "evaluation.sets.temperature",
    "val_kwargs.top_k": "evaluation.sets.top_k",
    "val_kwargs.top_p": "evaluation.sets.top_p",
    "virtual_pipeline_model_parallel_size": "actor.layout.vpp",
    "warmup_style": "actor.optimizer.schedule.name",
}
"""verl key, prefixed with its section where ambiguous -> megarl key."""

WITHOUT_KEY = {
    "actor.strategy": "Megatron-core is the only training backend",
    "critic.strategy": "Megatron-core is the only training backend",
    "balance_batch": "the tokens of data-parallel ranks are always balanced",
    "calculate_log_probs": "the engines' log-probs are always compared (see the section logprob_check)",
    "do_sample": "temperature=0 means greedy decoding",
    "enable_chunked_prefill": "megarl sets it",
    "end_state_marker": "environment tokens are never trained on, and need no markers",
    "filter_groups.metric": "batch.sampling_rounds replaces prompts whose samples all have the same reward",
    "image_patch_size": "the model's preprocessor_config.json contains it",
    "n_gpus_per_node": "the number of GPUs follows from the layouts",
    "no_think_rl": "all sampled tokens are trained on",
    "ref.fsdp_config.param_offload": "the reference's weights are always in host memory",
    "ref.megatron.param_offload": "the reference's weights are always in host memory",
    "return_multi_modal_inputs": "patches are always computed from the encoded images",
    "return_raw_chat": "prompts always keep their messages",
    "rollout.load_format": "engines receive their weights from the trainer",
    "rollout.mode": "engines always batch requests asynchronously",
    "rollout.name": "vLLM is the only engine of language models",
    "start_state_marker": "environment tokens are never trained on, and need no markers",
    "state_masking": "environment tokens are never trained on",
    "use_dynamic_bsz": "microbatches are always filled up to actor.tokens_per_microbatch",
    "use_remove_padding": "samples are always packed, never padded",
}
"""Keys in verl and in projects based on it that have no equivalent -> the reason."""

TRL = {
    "beta": "algorithm.kl.coefficient (for DPO: algorithm.objective.beta)",
    "bf16": "model.dtype",
    "delta": "algorithm.objective.dual_clip",
    "environment_factory": "environment.class",
    "epsilon": "algorithm.objective.clip_low and algorithm.objective.clip_high",
    "epsilon_high": "algorithm.objective.clip_high",
    "eval_dataset": "evaluation.sets",
    "eval_steps": "evaluation.every_steps",
    "eval_strategy": "evaluation.every_steps (null: only at the start and end)",
    "generation_batch_size": "batch.prompts_per_step (prompts, not completions)",
    "gradient_accumulation_steps": "batch.prompts_per_update (prompts per optimizer step, across all devices)",
    "gradient_checkpointing": "actor.recompute",
    "importance_sampling_level": "algorithm.objective.name (token: clip, sequence: gspo)",
    "learning_rate": "actor.optimizer.lr",
    "lmbda": (
        "algorithm.distillation.on_policy_share (for 0: algorithm.objective.name=sft with "
        "algorithm.objective.nll_coefficient=0)"
    ),
    "lr_scheduler_type": "actor.optimizer.schedule.name",
    "logging_steps": "run.trackers (every step is logged)",
    "loss_type": (
        "algorithm.objective.aggregation (grpo: sequence_mean_of_token_means, dapo and bnpo: token_mean, dr_grpo: "
        "sequence_mean_over_max_tokens; for cispo and sapo, set algorithm.objective.name)"
    ),
    "mask_truncated_completions": "algorithm.objective.skip_truncated",
    "max_completion_length": "rollout.max_new_tokens",
    "max_grad_norm": "actor.optimizer.clip_grad_norm",
    "max_prompt_length": "rollout.context_length (prompt and response together)",
    "max_steps": "run.steps (a step samples once but may contain several optimizer steps)",
    "model_name_or_path": "model.path",
    "num_generations": "batch.samples_per_prompt",
    "num_iterations": "batch.epochs",
    "num_train_epochs": "run.steps (in steps; the data repeats as needed)",
    "output_dir": "run.folder and run.name",
    "peft_config": "actor.lora",
    "per_device_train_batch_size": "actor.tokens_per_microbatch (tokens, not samples)",
    "ref_model_mixup_alpha": "algorithm.kl.renew_share",
    "ref_model_sync_steps": "algorithm.kl.renew_steps",
    "report_to": "run.trackers",
    "resume_from_checkpoint": "resume",
    "reward_funcs": "rewards.functions",
    "reward_weights": "rewards.functions (the weight of each entry)",
    "save_steps": "checkpoint.every_steps",
    "save_strategy": "checkpoint.every_steps (null: never)",
    "save_total_limit": "checkpoint.keep",
    "scale_rewards": (
        "algorithm.advantage.std (group: sample, none: none, batch: sample with algorithm.advantage.std_over=step)"
    ),
    "shuffle_dataset": "data.shuffle",
    "steps_per_generation": "batch.prompts_per_step (in prompts, not microbatches)",
    "train_dataset": "data.source",
    "vllm_gpu_memory_utilization": "rollout.kv_cache_gib (GiB per rank of an engine, in addition to its weights)",
    "vllm_importance_sampling_cap": "algorithm.correction.weight_limit",
    "vllm_importance_sampling_correction": "algorithm.correction.weight",
    "vllm_max_model_length": "rollout.context_length",
    "vllm_mode": "cluster.placement (colocate: colocated, server: disaggregated)",
    "vllm_tensor_parallel_size": "rollout.tp",
    "warmup_ratio": "actor.optimizer.schedule.warmup (below 1: a fraction of the run)",
}
"""Argument of a TRL trainer -> megarl key."""

TRL_WITHOUT_KEY = {
    "log_completions": "every sample is logged in rollouts/ in the run folder",
    "repetition_penalty": "responses are sampled from the policy itself, without penalties",
    "use_vllm": "vLLM is the only engine of language models",
}
"""Argument of a TRL trainer that has no equivalent -> the reason."""

VALUES: Mapping[str, Mapping[str, str]] = {
    "algorithm.advantage.estimator": {
        "dapo": "grpo",
        "dr_grpo": "grpo",
        "grpo_passk": "pass_at_k",
        "gspo": "grpo",
        "ppo": "gae",
    },
    "algorithm.objective.name": {
        "dapo": "clip",
        "dr_grpo": "clip",
        "geo_mean": "gmpo",
        "grpo": "clip",
        "ppo": "clip",
        "vanilla": "clip",
    },
}
"""Key -> names that papers and verl use for its values, each with megarl's value."""

RENAMED = {
    "agreement": "logprob_check",
    "critic.trunk": "critic.shared_backbone (own: false, actor: true)",
    "data.rows": "data.format",
    "failures_in_a_row": "max_consecutive_failures",
    "megatron_extra": "megatron_overrides",
    "reward_model.reads": "reward_model.input_format",
    "rollout.keys_values": "rollout.kv_cache_on_update",
    "rollout.too_old": "rollout.on_stale",
    "start_timeout_s": "timeouts.start",
    "step_timeout_s": "timeouts (rollout, rewards, passes, update, refit, checkpoint)",
    "untrained_samples": "empty_samples (counted: include, left_out: exclude)",
    "vllm_extra": "vllm_overrides",
}
"""Former key -> current key."""

REMOVED = {"rollout.refit_delta": "a refit sends all weights"}
"""Removed keys -> the reason."""


def keys(section: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all keys in schema order, each section before its keys. The keys in a variant section
    include the options of all entries."""
    for name, field in section.model_fields.items():
        yield prefix + name
        if issubclass(section, Variant) and name == section.discriminator:
            options = [option for spec in section.entries.values() for option in spec.options]
            yield from dict.fromkeys(prefix + option for option in options)
        for inner in (field.annotation, *get_args(field.annotation)):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                yield from keys(inner, f"{prefix}{name}.")


def suggest_value(key: str, value: Any, allowed: Sequence[str]) -> str | None:
    """Return the allowed value that the user probably meant, or None."""
    text = str(value).lower()
    if (usual := VALUES.get(key, {}).get(text)) is not None:
        return usual
    return next(iter(difflib.get_close_matches(text, allowed, n=1)), None)


def options_of(variant: type[Variant], entry: str, option: str) -> str:
    """Return a sentence that lists an entry's options and the entries that have `option`."""
    has = ", ".join(variant.option_names(entry)) or "no options"
    owners = [name for name, spec in variant.entries.items() if option in spec.options]
    if not owners:
        return f"{variant.key}={entry} has {has}"
    change = f"{variant.key}={owners[0]}" if len(owners) == 1 else f"{variant.key} to one of these"
    return (
        f"{variant.key}={entry} has {has}; {option} is an option of {', '.join(owners)}. Fix: remove the key, or set "
        f"{change}"
    )


def suggest(key: str) -> str:
    """Return advice for an unknown key, phrased as the end of a sentence."""
    key = key.lstrip("+")  # Hydra's prefix for new keys, used in verl's scripts
    parts = key.split(".")
    for name in (*(".".join(parts[first:]) for first in range(len(parts))), parts[0]):
        if name in RENAMED:
            return f"{name} was renamed to {RENAMED[name]}. Fix: rename the key"
        if name in REMOVED:
            return f"{name} was removed: {REMOVED[name]}. Fix: remove the key"
        if name in VERL and VERL[name] == TRL.get(name):
            return f"{name} of verl and TRL corresponds to {VERL[name]}. Fix: use that key"
        if name in VERL:
            return f"verl's {name} corresponds to {VERL[name]}. Fix: use that key"
        if name in WITHOUT_KEY:
            return f"verl's {name} has no equivalent: {WITHOUT_KEY[name]}. Fix: remove the key"
        if name in TRL:
            return f"TRL's {name} corresponds to {TRL[name]}. Fix: use that key"
        if name in TRL_WITHOUT_KEY:
            return f"TRL's {name} has no equivalent: {TRL_WITHOUT_KEY[name]}. Fix: remove the key"
    known = [name for name in keys() if not key.startswith(name)]
    leaf = key.rpartition(".")[2]
    matches = [name for name in known if name.rpartition(".")[2] == leaf]
    # Several models have the same keys: prefer keys in the named section.
    matches = [name for name in matches if name.startswith(f"{key.partition('.')[0]}.")] or matches
    matches = matches or difflib.get_close_matches(key, known, n=1, cutoff=0.8)
    close = difflib.get_close_matches(leaf, {name.rpartition(".")[2] for name in known}, n=1, cutoff=0.75)
    matches = matches or [name for name in known if name.rpartition(".")[2] in close]
    return f"did you mean {' or '.join(matches)}? Fix: rename the key" if matches else _siblings(key)


def _siblings(key: str) -> str:
    """Return a sentence that lists the keys in the innermost existing section of `key`."""
    known = list(keys())
    section = key.rpartition(".")[0]
    while section and section not in known:
        section = section.rpartition(".")[0]
    prefix = f"{section}." if section else ""
    names = [name.removeprefix(prefix) for name in known if name.startswith(prefix)]
    children = ", ".join(name for name in names if "." not in name)
    return f"{section or 'the top level'} has the keys {children}. Fix: use one of them, or remove the key"
