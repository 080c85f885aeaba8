from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.config.rules.recipes import errors, recipe


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rewards.functions=[]"], "rewards.functions=[]: samples would have no reward. Fix: add a function such"),
        (
            ["rewards.functions=[{function: numeric_match, per_turn: true}]"],
            "rewards.functions: numeric_match with per_turn=true: the function returns one reward for the whole "
            "response. Fix: set per_turn=false, or use path/to/file.py:function, a function that returns one reward "
            "per",
        ),
        (
            ["rewards.overlong_buffer=17"],
            (
                "rewards.overlong_buffer=17: it exceeds rollout.max_new_tokens=16. Fix: set rewards.overlong_buffer "
                "to at most 16"
            ),
        ),
    ],
)
def test_broken_rule_is_reported_alone(overrides: list[str], message: str) -> None:
    (line,) = errors(*overrides)
    assert message in line


def test_judge_requires_several_samples_per_prompt() -> None:
    judge = ("rewards.functions=[]", "rewards.judge=judge.py:better")
    assert recipe(*judge).rewards.judge == f"{Path.cwd()}/judge.py:better"
    one = ("batch.samples_per_prompt=1", "algorithm.advantage.estimator=policy_gradient")
    message = "^rewards.judge=.*/judge.py:better: the judge compares the samples of a prompt, but"
    with pytest.raises(ValueError, match=message):
        recipe(*judge, *one)
    with pytest.raises(ValueError, match=r"^rewards.functions=\[\]: samples would have no reward.* or rewards.judge$"):
        recipe("rewards.functions=[]")
