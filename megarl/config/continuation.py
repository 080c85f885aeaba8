"""The keys that may change when a run resumes from a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

from megarl.config.document import leaves, one_line
from megarl.config.learning_rate import learning_rate
from megarl.config.paths import without_folders
from megarl.config.schema import Config
from megarl.config.violations import raise_all
from megarl.core.text import printable

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
    "run.allow_changes",
    "run.stop_on",
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
    "rollout.speculative.*",
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
    "data.image_folders",
    "sandbox.provider",
    "sandbox.unsafe",
    "sandbox.image",
    "evaluation.*",
    "checkpoint.*",
    "cluster.*",
)
"""Patterns of keys that may change on resume, because they affect where, when and how long a run computes, but not what
it optimizes. run.steps may change learning rates, so `check_continues` compares the rates."""


ALLOWABLE = (
    "run.steps",
    "*.optimizer.lr",
    "*.optimizer.schedule.*",
    "*.optimizer.weight_decay",
    "*.optimizer.clip_grad_norm",
    "rollout.temperature",
    "rollout.top_p",
    "rollout.top_k",
    "rollout.max_new_tokens",
    "rollout.stop",
    "rollout.context_length",
    "logprob_check.*",
    "environment.options*",
    "environment.weight",
    "environment.*turn*",
    "environment.*timeout_s",
    "algorithm.advantage.*",
    "algorithm.objective.*",
    "algorithm.correction.*",
    "algorithm.value.*",
    "algorithm.kl.coefficient",
    "algorithm.kl.estimator",
    "algorithm.kl.limit",
    "algorithm.kl.adaptive_*",
    "algorithm.distillation.*",
    "batch.*",
    "rewards.*",
    "reward_model.weight",
    "reward_model.judge.*",
    "implicit_reward.beta",
    "implicit_reward.success_above",
    "sandbox.*",
)
"""Patterns of keys that may change if run.allow_changes lists them. They affect results, but neither which models a run
has nor what a checkpoint contains. Adam's betas and eps are excluded, because a checkpoint restores them."""

NEVER = ("algorithm.advantage.estimator", "algorithm.objective.name")
"""Keys that match a pattern in ALLOWABLE but must not change, because they select the models of a run."""


@dataclass(frozen=True, slots=True)
class Change:
    """A key whose value changed in the middle of a run. `old` or `new` is None if the config lacks the key."""

    key: str
    old: Any
    new: Any

    def describe(self) -> str:
        """Return one line with control characters escaped, because the checkpoint may come from another user."""
        return printable(f"{self.key} changed from {one_line(self.old)} to {one_line(self.new)}")


def may_be_allowed(key: str) -> bool:
    """Return whether a key may change in the middle of a run if run.allow_changes lists it."""
    return key not in NEVER and any(fnmatch(key, pattern) for pattern in ALLOWABLE)


def is_free(key: str) -> bool:
    """Return whether a key may change without run.allow_changes."""
    return any(fnmatch(key, pattern) for pattern in FREE)


def allowed_changes(config: Config, saved: Mapping[str, Any]) -> list[Change]:
    """Return the keys that differ from the saved config and that run.allow_changes lists."""
    old, new = dict(leaves(saved)), dict(leaves(config.model_dump()))
    return [Change(key, old.get(key), new.get(key)) for key in _differing(old, new) if _is_allowed(config, key)]


def samples_alike(config: Config, saved: Mapping[str, Any]) -> bool:
    """Return whether a run with the saved config samples the same rollouts from the same weights: only keys that may
    always change differ."""
    old, new = (_compared(values) for values in (saved, config.model_dump()))
    return all(is_free(key) for key in _differing(old, new))


def check_continues(config: Config, saved: Mapping[str, Any], step: int, checkpoint: str) -> None:
    """Check that a run with this configuration may resume from the one saved at `step`. Raise a UserError if keys that
    may not change differ; the message has one line per key. checkpoint: the checkpoint's name, for error messages."""
    old, new = (_compared(values) for values in (saved, config.model_dump()))
    problems = [
        f"{key}={_show(new, key)}: {checkpoint} was saved with {_show(old, key)}. Fix: {_remedy(key)}"
        for key in _differing(old, new)
        if not is_free(key) and not _is_allowed(config, key)
    ]
    if config.run.steps < step:
        problems.append(
            f"run.steps={config.run.steps}: {checkpoint} was saved after step {step}. Fix: set run.steps to at least "
            f"{step}"
        )
    elif not _is_allowed(config, "run.steps"):
        problems += _changed_rates(config, saved["run"]["steps"], step, checkpoint)
    raise_all(problems)


def _compared(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the leaves of a config that must not change: all except folders and the engines and layouts of teachers.
    A single feedback source becomes a list, because older checkpoints store a string."""
    found = dict(leaves(without_folders(values)))
    teachers = [
        {
            key: [value] if key == "feedback" and isinstance(value, str) else value
            for key, value in teacher.items()
            if key not in ("engine", "layout") and value is not None
        }
        for teacher in found.get("teachers.models", [])
    ]
    return {**found, "teachers.models": teachers}


def _remedy(key: str) -> str:
    allow = f"allow the change with --allow-changes {key}, " if may_be_allowed(key) else ""
    return f"restore this value, {allow}or start a new run with resume=never and a new run.name"


def _is_allowed(config: Config, key: str) -> bool:
    """Return whether run.allow_changes lists the key or a section that contains it."""
    return may_be_allowed(key) and any(key == name or key.startswith(f"{name}.") for name in config.run.allow_changes)


def _differing(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keys whose values differ, starting with the keys of the new config."""
    for key in (*new, *(key for key in old if key not in new)):
        if _differ(old, new, key):
            yield key


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
                "allow the change with --allow-changes run.steps, or start a new run with resume=never and a new "
                "run.name"
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
