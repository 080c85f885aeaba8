"""Comparison with public implementations of estimators for agents and for several rewards.

Recorded by tools/references/record.py. Each entry of the file names the repository, commit and function that computed
it, with its inputs.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from megarl.algorithms.advantages.bi_level_gae import bi_level_gae
from megarl.algorithms.baselines import Member, Turn
from megarl.algorithms.registry import ESTIMATORS
from megarl.algorithms.relative import mean_and_std, whiten
from megarl.core.score import RewardPart
from tests.closeness import relative_error
from tests.paths import ROOT

RECORDED = json.loads((ROOT / "tests" / "published_numbers" / "agents.json").read_text())
TOLERANCE = 2e-6
"""The functions compute in float32, and some add 1e-6 or 1e-8 to a denominator where megarl adds nothing."""


def assert_equal(actual: list[float], expected: list[float]) -> None:
    assert len(actual) == len(expected)
    assert relative_error(torch.tensor(actual), torch.tensor(expected)) <= TOLERANCE


def options(name: str, **values: object) -> dict[str, Any]:
    spec = ESTIMATORS[name]
    assert values.keys() <= spec.options.keys()
    return dict(spec.options) | values


def test_gdpo_matches_nemo_rl():
    recorded = RECORDED["gdpo"]
    rewards, weights = recorded["rewards"], recorded["weights"]
    groups: dict[int, list[Member]] = {}
    for i, prompt in enumerate(recorded["prompts"]):
        parts = {name: RewardPart(values[i], weights[name]) for name, values in rewards.items()}
        total = sum(part.weight * part.value for part in parts.values())
        groups.setdefault(prompt, []).append(Member(total, 1, parts=parts))
    spec, chosen = ESTIMATORS["gdpo"], options("gdpo")
    over_step = spec.normalization(list(groups.values()), chosen)
    actual = [
        (member.reward - baseline.center) / baseline.scale
        for group in groups.values()
        for member, baseline in zip(group, map(over_step.apply, spec.baselines(group, chosen)), strict=True)
    ]
    assert_equal(actual, recorded["advantages"])


@pytest.mark.parametrize(("mode", "std"), [("mean_norm", "none"), ("mean_std_norm", "sample")])
def test_gigpo_matches_its_authors(mode, std):
    recorded = RECORDED["gigpo"]
    spec = ESTIMATORS["gigpo"]
    chosen = options("gigpo", std=std, turn_gamma=recorded["gamma"], turn_weight=recorded["step_advantage_w"])
    for group in sorted(set(recorded["groups"])):
        rows = [i for i, of_rollout in enumerate(recorded["groups"]) if of_rollout == group]
        turns = [
            [
                Turn(ord(state), reward)
                for state, reward in zip(recorded["states"][i], recorded["rewards"][i], strict=True)
            ]
            for i in rows
        ]
        members = [Member(sum(recorded["rewards"][i]), 1) for i in rows]
        of_turns, baselines = spec.turn_advantages(turns, chosen), spec.baselines(members, chosen)
        for i, member, baseline, of_rollout in zip(rows, members, baselines, of_turns, strict=True):
            of_whole = (member.reward - baseline.center) / baseline.scale
            assert_equal([of_whole + a for a in of_rollout], recorded["advantages"][mode][i])


def test_bi_level_gae_matches_ragen():
    """RAGEN whitens with the sample deviation, and adds 1e-8 to the variance."""
    recorded = RECORDED["bi_level_gae"]
    mask = torch.tensor(recorded["mask"]).bool()
    rows = torch.arange(len(mask)).repeat_interleave(mask.shape[1])
    reward, value = (torch.tensor(recorded[name]).flatten() for name in ("rewards", "values"))
    advantage, returns = bi_level_gae(
        reward, mask.flatten(), rows, value, recorded["gamma"], recorded["lam"], recorded["high_level_gamma"]
    )
    trained = advantage[mask.flatten()].double()
    moments = mean_and_std(len(trained), trained.sum().item(), trained.square().sum().item(), "sample")
    whitened = whiten(advantage, mask.flatten(), *moments, std_epsilon=0.0)
    published = torch.tensor(recorded["advantages"]).flatten()
    assert relative_error(whitened[mask.flatten()], published[mask.flatten()]) <= TOLERANCE
    assert relative_error(returns, torch.tensor(recorded["returns"]).flatten()) <= TOLERANCE
