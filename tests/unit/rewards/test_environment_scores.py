"""Scores of samples from environments: the environment's rewards in addition to reward functions."""

from __future__ import annotations

import math

import pytest

from megarl.config.schema import RewardFunction
from megarl.core.completion import VersionRun
from megarl.core.episode import Episode, RolloutInfo
from megarl.core.prompt import Prompt
from megarl.core.sample import Sample
from megarl.core.score import RewardPart
from megarl.rewards.result import Result
from megarl.rewards.scorer import Scorer

INFO = RolloutInfo("done", 3, 1, {}, 0, 0)


def sample(*, mask: str = "110110", first_turn: int = 0, **fields) -> Sample:
    episode = Episode(
        **dict(info=INFO, rewards=(0.5, None, 1.0), parts={"format": 1.5}, failure=None, messages=(), is_last=True)
        | fields,
        first_turn=first_turn,
    )
    n = len(mask)
    trained = [letter == "1" for letter in mask]
    prompt = Prompt("p", "", [1])
    return Sample("s", prompt, [2] * n, [0.0] * n, trained, (VersionRun(0, n),), "stop", "", episode=episode)


def scorer(**settings) -> Scorer:
    return Scorer([RewardFunction(function="f", weight=2.0)], environment_weight=10.0, **settings)


def test_turns_and_outcome_are_summed_and_weighted():
    score, by_token = scorer().score(sample(outcome=0.25), {"f": Result(1.0)})
    assert score.value == pytest.approx(10 * (0.5 + 1.0 + 0.25) + 2)
    assert score.parts == {"f": 1.0, "environment": 1.75, "environment_format": 1.5}
    assert by_token is None


@pytest.mark.parametrize(("first_turn", "expected"), [(0, {1: 5.0}), (1, {4: 10.0})])
def test_rewards_of_own_turns_are_token_rewards(first_turn, expected):
    """The sample contains two turns of the rollout, one of them without a reward."""
    score, by_token = scorer(rewards_tokens=True).score(sample(first_turn=first_turn), {"f": Result(1.0)})
    assert {i: reward for i, reward in enumerate(by_token) if not math.isnan(reward)} == expected
    assert score.token_reward_totals.total == sum(expected.values())
    assert score.value == pytest.approx(17)


@pytest.mark.parametrize(
    ("rewards_tokens", "environment", "per_turn"), [(False, 1.75, 0.75), (True, 0.25, None)], ids=["whole", "by token"]
)
def test_reward_parts_leave_out_rewards_of_single_tokens(rewards_tokens, environment, per_turn):
    """The rollout's turns have rewards of 1.5 in total, and its outcome is 0.25. Function g rewards turns."""
    functions = [RewardFunction(function="f", weight=2.0), RewardFunction(function="g", weight=4.0, per_turn=True)]
    made = Scorer(functions, rewards_tokens=rewards_tokens, environment_weight=10.0)
    score, _ = made.score(sample(outcome=0.25), {"f": Result(1.0), "g": Result([0.5, 0.25])})
    expected = {"f": RewardPart(1.0, 2.0), "environment": RewardPart(environment, 10.0)}
    assert score.reward_parts == expected | ({} if per_turn is None else {"g": RewardPart(per_turn, 4.0)})
    total = sum(part.value * part.weight for part in score.reward_parts.values())
    elsewhere = 10 * 1.0 if rewards_tokens else 0.0  # the third turn's, which is another sample's token reward
    assert total + score.token_reward_totals.total + elsewhere == pytest.approx(score.value)


@pytest.mark.parametrize("rewards_tokens", [False, True])
def test_turn_rewards_are_weighted_sums_of_own_turns(rewards_tokens):
    """The sample has the rollout's second and third turn. The environment gives no reward for the second."""
    functions = [RewardFunction(function="g", weight=4.0, per_turn=True)]
    made = Scorer(functions, rewards_tokens=rewards_tokens, environment_weight=10.0)
    own = sample(first_turn=1, turns=((1, 5), (2, 6)))
    assert made.score(own, {"g": Result([0.5, 0.25])})[0].turn_rewards == (2.0, 1.0 + 10.0)
    assert scorer().score(sample(turns=((0, 5), (1, 6))), {"f": Result(1.0)})[0].turn_rewards == (5.0, 0.0)
    assert scorer().score(sample(rewards=(), turns=((0, 5), (1, 6))), {"f": Result(1.0)})[0].turn_rewards == (0.0, 0.0)
    assert scorer().score(sample(), {"f": Result(1.0)})[0].turn_rewards == ()


def test_failed_environment_is_a_failure_and_not_zero():
    score, _ = scorer().score(sample(failure="step raised KeyError: 'x'"), {})
    assert (score.value, score.failure) == (None, "environment: step raised KeyError: 'x'")


def test_failed_function_in_an_environment_is_a_failure():
    score, _ = scorer().score(sample(), {"f": Result(None, failure="raised ValueError: no")})
    assert score.value is None and "f raised ValueError" in score.failure
