"""The keys that may change when a run resumes from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatch
from typing import Any

from megarl.config.document import leaves, one_line
from megarl.config.learning_rate import learning_rate
from megarl.config.paths import without_folders
from megarl.config.schema import Config
from megarl.config.violations import raise_all

FREE = (
    "resume",
    "run.name",
    "run.folder",
    "run.steps",
    "run.export",
    "run.replace",
    "run.token_samples",
    "data.date",  # covered by the data's hash if a chat template uses it
    "run.trackers",
    "run.profile.*",
    "trackers.*",
    "actor.lora.export",
    "model.revision",  # weights are compared by hash
    "*.layout.*",
    "*.tokens_per_microbatch",
    "*.recompute",
    "*.offload",
    "*.threads",
    "*.overlap_communication",
    "*.optimizer.nonfinite_limit",
    "rollout.replicas",
    "rollout.tp",
    "*.kv_cache_gib",
    "*.vllm_overrides*",
    "rollout.max_staleness",
    "rollout.on_stale",
    "rollout.longest_first",
    "batch.oversampling",
    "rollout.kv_cache_on_update",
    "rollout.batch_invariant",
    "rollout.sleep",
    "rollout.transport",
    "rollout.refit_*",
    "rollout.verify_refit",
    "logprob_check.limit",
    "logprob_check.canaries",
    "reward_model.engine",
    "environment.processes",
    "environment.max_consecutive_failures",
    "environment.memory_mib",
    "rewards.failure_limit",
    "rewards.max_consecutive_failures",
    "rewards.memory_mib",
    "rewards.outage_s",
    "rewards.processes",
    "rewards.timeout_s",
    "sandbox.provider",
    "sandbox.unsafe",
    "sandbox.image",
    "evaluation.*",
    "checkpoint.*",
    "cluster.*",
)
"""Patterns for keys that may change, because they affect where, when and how long a run computes, but not what it
optimizes. run.steps may change learning rates, so `check_continues` compares them."""


def check_continues(config: Config, saved: Mapping[str, Any], step: int, checkpoint: str) -> None:
    """Check that a run with this configuration may resume from the one saved at `step`. Raise a UserError if keys that
    may not change differ; the message has one line per key. checkpoint: the checkpoint's name, for error messages."""
    old, new = (dict(leaves(without_folders(values))) for values in (saved, config.model_dump()))
    problems = [
        f"{key}={_show(new, key)}: {checkpoint} was saved with {_show(old, key)}. Fix: restore this value, or start a "
        "new run with resume=never and a new run.name"
        for key in [*new, *(key for key in old if key not in new)]
        if _differ(old, new, key) and not any(fnmatch(key, pattern) for pattern in FREE)
    ]
    if config.run.steps < step:
        problems.append(
            f"run.steps={config.run.steps}: {checkpoint} was saved after step {step}. Fix: set run.steps to at least "
            f"{step}"
        )
    else:
        problems += _changed_rates(config, saved["run"]["steps"], step, checkpoint)
    raise_all(problems)


def _changed_rates(config: Config, steps: int, step: int, checkpoint: str) -> list[str]:
    """Return a line for each model whose completed updates used different learning rates than the ones that
    config.run.steps implies.

    Args:
        steps: the saved run's value of run.steps.
        step: the number of completed steps.
    """
    problems = []
    for trained in config.all_trained:
        optimizer, now = trained.optimizer, config.num_updates(trained)
        before, done = (_replace_steps(config, number).num_updates(trained) for number in (steps, step))
        if any(learning_rate(optimizer, i, before) != learning_rate(optimizer, i, now) for i in range(done)):
            problems.append(
                f"run.steps={config.run.steps}: {checkpoint} was saved with run.steps={steps}, and the learning rates "
                f"of its {done} updates depend on run.steps "
                f"({trained.section}.optimizer.schedule.name={optimizer.schedule.name}). Fix: set run.steps={steps}, "
                "or start a new run with resume=never and a new run.name"
            )
    return problems


def _replace_steps(config: Config, steps: int) -> Config:
    return config.model_copy(update={"run": config.run.model_copy(update={"steps": steps})})


def _differ(old: Mapping[str, Any], new: Mapping[str, Any], key: str) -> bool:
    """Return whether a key's text differs. Most values are equal, and comparing them is faster than dumping YAML."""
    is_same = key in old and key in new and repr(old[key]) == repr(new[key])
    return not is_same and _show(old, key) != _show(new, key)


def _show(leaves: Mapping[str, Any], key: str) -> str:
    """Return a key's value as text, never truncated, because long values such as paths may differ only at the end."""
    return one_line(leaves[key]) if key in leaves else "(not set)"
