"""The keys that a run may change when it goes on from a checkpoint; the others would make it another run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from typing import Any

from megarl.config.document import one_line
from megarl.config.learning_rate import learning_rate
from megarl.config.schema import Config
from megarl.core.errors import UserError

FREE = (
    "resume",
    "run.name",
    "run.folder",
    "run.steps",
    "run.export",
    "run.replace",
    "run.token_samples",
    "run.trackers",
    "run.profile.*",
    "trackers.*",
    "actor.lora.export",
    "model.revision",  # the weights are compared themselves
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
    "rewards.failure_limit",
    "rewards.max_consecutive_failures",
    "rewards.memory_mib",
    "rewards.processes",
    "rewards.timeout_s",
    "sandbox.provider",
    "sandbox.unsafe",
    "sandbox.image",
    "evaluation.*",
    "checkpoint.*",
    "cluster.*",
)
"""Keys that decide where and how long the run computes, not what: patterns of dotted names. How long may also decide

what: `check_continues` compares the learning rates for that."""


def check_continues(config: Config, saved: Mapping[str, Any], step: int, checkpoint: str) -> None:
    """Checks a configuration against the one that was saved at `step` in `checkpoint`, a name for the message.

    Raises UserError with a line for each key that makes it another run.
    """
    old, new = dict(_leaves(saved)), dict(_leaves(config.model_dump()))
    problems = [
        f"{key}={_show(new, key)}: {checkpoint} is of a run with {_show(old, key)}; set it back, or start another run "
        "with resume=never and a new run.name"
        for key in [*new, *(key for key in old if key not in new)]
        if not any(fnmatch(key, pattern) for pattern in FREE) and _show(old, key) != _show(new, key)
    ]
    if config.run.steps < step:
        problems.append(
            f"run.steps={config.run.steps}: {checkpoint} has {step} steps done; set run.steps to at least {step}"
        )
    else:
        problems += _rates_done(config, saved["run"]["steps"], step, checkpoint)
    if problems:
        raise UserError("\n".join(problems))


def _rates_done(config: Config, steps: int, step: int, checkpoint: str) -> list[str]:
    """Returns a line for each model whose updates have had other learning rates than in a run of config.run.steps
    steps.

    steps: run.steps of the run so far."""
    problems = []
    for trained in config.all_trained:
        optimizer, now = trained.optimizer, config.num_updates(trained)
        before, done = (_replace_steps(config, number).num_updates(trained) for number in (steps, step))
        if any(learning_rate(optimizer, i, before) != learning_rate(optimizer, i, now) for i in range(done)):
            problems.append(
                f"run.steps={config.run.steps}: {checkpoint} is of a run with {steps}, which the learning rates of "
                f"its {done} updates under {trained.section}.optimizer.schedule.name={optimizer.schedule.name} follow "
                "from; set it back, or start another run with resume=never and a new run.name"
            )
    return problems


def _replace_steps(config: Config, steps: int) -> Config:
    return config.model_copy(update={"run": config.run.model_copy(update={"steps": steps})})


def _leaves(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields dotted key and value of everything that is not a mapping, or an empty one."""
    for name, value in section.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _show(leaves: Mapping[str, Any], key: str) -> str:
    """Returns the whole value: long ones, such as paths, may differ at their ends."""
    return one_line(leaves[key]) if key in leaves else "no such key"
