"""Configurations in checkpoints, which an earlier megarl may have saved: what they lack is added."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

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
}
"""The keys that came with each format of checkpoints (megarl.core.checkpoint.FORMAT), with the values that runs had
without them, as far as there are such. A default that base.yaml gets later is not theirs."""


def complete(saved: Mapping[str, Any], version: int) -> dict[str, Any]:
    """Returns the configuration that was saved in this format, with the keys that have been added since."""
    config = deepcopy(dict(saved))
    for later in range(version + 1, max(ADDED) + 1):
        for key, value in ADDED[later].items():
            *sections, name = key.split(".")
            section = config
            for part in sections:
                section = section.setdefault(part, {})
            section.setdefault(name, value)
    return config
