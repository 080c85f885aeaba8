"""Advantages for agents and for several rewards, computed by functions of public repositories that are not packages.

Only the named functions of a file run, so that the packages that the file imports need not be installed.
"""

from __future__ import annotations

import ast
import subprocess
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from verl.utils import torch_functional

ABOUT = "Advantages for agents and for several rewards, computed by the public functions named in each entry"
NEMO_RL, DR_MAS, RAGEN = "NVIDIA-NeMo/RL", "langfengQ/DrMAS", "RAGEN-AI/RAGEN"
COMMITS = {
    NEMO_RL: "7ea279abfbeb698b092856d0dab61e7cf39bc909",
    DR_MAS: "3b556f2c0373fe23d6b637cbd3673c076713aebe",
    RAGEN: "5eb79b82cecc31db5662ba3c96b752405692410b",
}
Entry = dict[str, Any]


def numbers(clones: Path) -> dict[str, Any]:
    """Return an entry for each estimator, with its source, inputs and results.

    Args:
        clones: folder with clones of the repositories as RL, DrMAS and RAGEN, bare or with a work tree.
    """
    return {"about": ABOUT, "gdpo": gdpo(clones), "gigpo": gigpo(clones), "bi_level_gae": bi_level_gae(clones)}


def functions(clones: Path, repository: str, path: str, names: set[str], **globals: Any) -> dict[str, Any]:
    """Run the definitions of functions and classes in a repository's file, and return them by name. `globals`: names
    that they use."""
    clone = clones / repository.split("/")[1]
    command = ["git", "-C", str(clone), "show", f"{COMMITS[repository]}:{path}"]
    module = ast.parse(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    module.body = [node for node in module.body if getattr(node, "name", None) in names]
    assert len(module.body) == len(names), f"{path} does not define all of {names}"
    # The code inherits this file's import from __future__, without which annotations would need more names.
    exec(compile(module, path, "exec"), globals)
    return {name: globals[name] for name in names}


def source(repository: str, function: str, note: str = "") -> Entry:
    return {"repository": repository + note, "commit": COMMITS[repository], "function": function}


def float32(values: torch.Tensor) -> Any:
    """Return the values as nested lists, with the 9 digits that determine a float32 number."""
    if values.dim():
        return [float32(value) for value in values]
    return float(f"{values.item():.9g}")


def gdpo(clones: Path) -> Entry:
    prompts = [0, 0, 0, 0, 1, 1, 1, 2, 2]
    rewards = {
        "correctness": [1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.5, -1.5],
        "format": [1.0, 1.0, 0.0, 0.0, 0.25, 1.0, -0.5, 1.0, 1.0],
        "length": [-0.2, 0.0, -0.7, -0.1, 0.0, 0.0, -0.3, -1.0, -0.4],
    }
    weights = {"correctness": 1.0, "format": 0.5, "length": 2.0}
    names = {"get_gdpo_reward_component_keys", "calculate_baseline_and_std_per_prompt"}
    used = functions(clones, NEMO_RL, "nemo_rl/algorithms/utils.py", names, torch=torch)
    name = "GDPOAdvantageEstimator"
    found = functions(clones, NEMO_RL, "nemo_rl/algorithms/advantage_estimator.py", {name}, torch=torch, **used)
    config = SimpleNamespace(
        use_leave_one_out_baseline=False,
        normalize_rewards=True,
        reward_weights=[weights[name] for name in sorted(weights)],
    )
    advantages = found[name](config, None).compute_advantage(
        prompt_ids=torch.tensor(prompts)[:, None],
        rewards=None,
        mask=torch.ones(len(prompts), 1),
        repeated_batch={f"reward/{name}": torch.tensor(values) for name, values in rewards.items()},
    )
    return source(NEMO_RL, f"nemo_rl.algorithms.advantage_estimator.{name}, use_leave_one_out_baseline=False") | {
        "prompts": prompts,
        "rewards": rewards,
        "weights": weights,
        "advantages": float32(advantages[:, 0]),
    }


def gigpo(clones: Path) -> Entry:
    """The batch has a row for each turn of a rollout. Each turn is one token."""
    groups = [0, 0, 0, 1, 1]
    states = [["s", "a", "b"], ["s", "b", "a", "a"], ["s", "b"], ["s", "c"], ["s", "s", "s", "d"]]
    rewards = [[0.0, 0.1, 1.0], [0.0, 0.0, -0.2, 0.0], [0.3, 1.0], [0.0, 0.0], [0.1, 0.0, 0.0, 2.0]]
    gamma, step_advantage_w = 0.95, 0.7
    turns = ["compute_step_discounted_returns", "compute_gigpo_outcome_advantage"]
    names = {*turns, "episode_norm_reward", "build_step_group", "step_norm_reward", "to_hashable"}
    used = dict(np=np, torch=torch, defaultdict=defaultdict, uuid=SimpleNamespace(uuid4=uuid4))
    found = functions(clones, DR_MAS, "gigpo/core_gigpo.py", names, **used)
    lengths = [len(own) for own in states]
    rollouts = np.repeat(np.arange(len(groups)), lengths)
    batch = SimpleNamespace(
        batch={"input_ids": torch.zeros(len(rollouts), 1)},
        non_tensor_batch={
            "rewards": np.concatenate(rewards),
            "traj_uid": rollouts,
            "active_masks": np.ones(len(rollouts)),
            "env_step": np.concatenate([np.arange(length) for length in lengths]),
        },
    )
    returns = found[turns[0]](batch, gamma)
    totals = torch.tensor([sum(own) for own in rewards])

    def advantages(mode: str) -> torch.Tensor:
        return found[turns[1]](
            token_level_rewards=totals[rollouts][:, None],
            step_rewards=returns,
            response_mask=torch.ones(len(rollouts), 1),
            anchor_obs=np.array([state for own in states for state in own]),
            index=np.array(groups)[rollouts],
            traj_index=rollouts,
            step_advantage_w=step_advantage_w,
            mode=mode,
        )[0][:, 0]

    def by_rollout(values: torch.Tensor) -> list[list[float]]:
        return [float32(own) for own in values.split(lengths)]

    return source(DR_MAS, f"gigpo.core_gigpo: {', '.join(turns)}", ", by the authors of verl-agent") | {
        "groups": groups,
        "states": states,
        "rewards": rewards,
        "gamma": gamma,
        "step_advantage_w": step_advantage_w,
        "step_returns": by_rollout(returns),
        "advantages": {mode: by_rollout(advantages(mode)) for mode in ("mean_norm", "mean_std_norm")},
    }


def bi_level_gae(clones: Path) -> Entry:
    """The last trained token of each turn has a reward."""
    mask = torch.tensor(
        [[1, 1, 1, 0, 0, 1, 1, 0, 1, 1], [1, 0, 1, 1, 1, 1, 0, 0, 1, 0], [1, 1, 1, 1, 1, 1, 1, 0, 0, 0]]
    )
    values = torch.randn(mask.shape, generator=torch.Generator().manual_seed(0)).mul(100).round().div(100)
    rewards = torch.zeros(mask.shape)
    for place, reward in {
        (0, 2): -0.67, (0, 6): -0.23, (0, 9): 1.71, (1, 0): -0.45, (1, 5): -0.32, (1, 8): -0.09, (2, 6): -0.25,
    }.items():  # fmt: skip
        rewards[place] = reward
    factors = {"gamma": 0.9, "lam": 0.8, "high_level_gamma": 0.95}
    name = "compute_bi_level_gae_advantage_return"
    used = dict(torch=torch, verl_F=torch_functional)
    found = functions(clones, RAGEN, "ragen/trainer/core_algos.py", {name}, **used)
    advantages, returns = found[name](rewards, values, mask, **factors)
    return (
        source(RAGEN, f"ragen.trainer.core_algos.{name}", ", with masked_whiten of verl 0.9.1")
        | {"mask": mask.tolist(), "values": float32(values), "rewards": float32(rewards)}
        | factors
        | {"advantages": float32(advantages), "returns": float32(returns)}
    )
