"""Configurations in checkpoints, which an earlier megarl may have saved: what they lack is added, and what is no longer
a key removed."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from megarl.config.algorithm_schema import Advantage, Objective
from megarl.config.schema import Config
from megarl.core.user_file import is_in_file

ADDED: dict[int, dict[str, Any]] = {
    2: {
        "actor.optimizer.nonfinite_limit": 3,
        "critic.optimizer.nonfinite_limit": 3,
        "implicit_reward.optimizer.nonfinite_limit": 3,
        # Before, each two responses were compared in one order, which is no longer one to choose.
        "rewards.judge_order": "both",
        "model.revision": None,
        "rewards.processes": None,
        "rewards.timeout_s": 60.0,
        "run.replace": True,
    },
    3: {
        "checkpoint.on_signal": False,
        "checkpoint.grace_s": 0.0,
        "cluster.timeouts": {
            "start": 600.0,
            **dict.fromkeys(("rollout", "rewards", "passes", "update", "refit", "checkpoint"), 3600.0),
        },
    },
    4: {"cluster.nodes": 1, "cluster.interface": None},
    5: {"cluster.roles": dict.fromkeys(("actor", "critic", "implicit_reward", "reward_model", "rollout"))},
    6: {"rollout.quantization": None},
    7: {
        "actor.lora": {
            **dict(rank=None, alpha=32.0, targets="all_linear", share_experts=False, path=None, export="merged"),
        },
        "actor.experts": {"replay_routes": False, "router": "free"},
        "model.head_dtype": "float32",
        "agreement": {"threshold": None, "limit": None, "action": "warn", "mask": "token", "canaries": "off"},
        "data.system_prompt": None,
        "data.steps_column": "steps",
        "data.labels_column": "labels",
        "data.step_end": "\n",
        "rollout.stop": [],
        "rollout.max_staleness": 0,
        "algorithm.trust_region": {"kl_limit": None, "iterations": 10, "damping": 0.1, "trials": 10},
        "batch.epochs": 1,
        "batch.epochs_kl_limit": None,
        "rollout.on_stale": "wait",
        "rollout.longest_first": False,
        "batch.oversampling": None,
        "rollout.kv_cache_on_update": "keep",
        "rollout.batch_invariant": False,
        "reward_model.judge": {"template": None, "scale": [1.0, 10.0], "max_new_tokens": 1024},
        "algorithm.kl.limit": None,
        "algorithm.correction.weight_floor": None,
        "environment": {
            "class": None,
            "options": {},
            "weight": 1.0,
            "max_turns": 8,
            "turn_tokens": None,
            "tool_format": None,
            "processes": None,
            "timeout_s": 60.0,
            "tool_timeout_s": 30.0,
            "agent_timeout_s": 1800.0,
            "max_consecutive_failures": 16,
        },
        "sandbox": {
            **dict(provider="auto", unsafe="refuse", image=None, wall_s=15.0, cpu_s=10, memory_mib=1024),
            **dict(processes=32, file_mib=64, output_bytes=65536),
        },
        "data.options": {},
        "data.stages": [],
        "data.source_column": None,
        "data.more_sources": [],
        "data.source_weights": {},
        "data.sort_column": None,
        "data.weight_column": None,
        "data.solved_weight": None,
        "data.solved_above": 0.5,
        "rewards.memory_mib": None,
        "rewards.max_consecutive_failures": None,
        "evaluation": {
            "every_steps": None,
            "at_start": True,
            "at_end": True,
            "best": {"metric": None, "mode": "max"},
            "sets": [],
        },
        "run.token_samples": 0,
        "run.trackers": [],
        "run.profile": {"steps": [], "ranks": [0]},
        "trackers": {
            "timeout_s": 30.0,
            "project": "megarl",
            "wandb": {"entity": None, "mode": "online"},
            "mlflow": {"tracking_uri": None},
            "trackio": {"space": None},
        },
    },
}
"""The keys that came with each format of checkpoints (megarl.core.checkpoint.FORMAT), with the values that runs had
without them, as far as there are such. A default that base.yaml gets later is not theirs."""

ADDED_TO_FUNCTIONS: dict[int, dict[str, Any]] = {7: {"name": None, "options": {}, "sources": None}}
"""The keys of entries of rewards.functions that came with each format."""

REMOVED = {3: ("cluster.start_timeout_s", "cluster.step_timeout_s")}
"""The keys that went with a format; others have taken their place."""


def complete(saved: Mapping[str, Any], version: int) -> dict[str, Any]:
    """Returns the configuration that was saved in this format, with the keys that have been added since, and
    without those that were removed."""
    config = deepcopy(dict(saved))
    for later in range(version + 1, max(ADDED) + 1):
        for key, value in ADDED[later].items():
            *sections, name = key.split(".")
            section = config
            for part in sections:
                section = section.setdefault(part, {})
            section.setdefault(name, deepcopy(value))
        for function in config.get("rewards", {}).get("functions", []):
            for key, value in ADDED_TO_FUNCTIONS.get(later, {}).items():
                function.setdefault(key, deepcopy(value))
        for key in REMOVED.get(later, ()):
            *sections, name = key.split(".")
            section = config
            for part in sections:
                section = section.get(part, {})
            section.pop(name, None)
    return config


def validated(saved: Mapping[str, Any], version: int) -> Config:
    """Return the configuration of a checkpoint that is only read, not resumed.

    Files that it names are not executed, because anyone may have written the checkpoint: the base recipe's entries
    stand in for a user's estimator and objective.
    """
    config = complete(saved, version)
    for variant, default in ((Advantage, "grpo"), (Objective, "clip")):
        section = config["algorithm"][variant.key.split(".")[1]]
        if is_in_file(section[variant.discriminator]):
            own = {name: value for name, value in section.items() if name in variant.model_fields}
            config["algorithm"][variant.key.split(".")[1]] = own | {variant.discriminator: default}
    return Config.model_validate(config)
