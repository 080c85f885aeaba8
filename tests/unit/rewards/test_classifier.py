import math

import pytest

from megarl.config.load import load
from megarl.config.model_schema import RewardModel
from megarl.core.completion import VersionRun
from megarl.core.prompt import Prompt
from megarl.core.sample import Sample
from megarl.rewards.classifier import ClassifierReward, ModelReward
from tests.paths import BASE

MASK = (True, False, True, True, False)
SCORES = [1.0, 2.0, 4.0, 8.0, 16.0]


class Letters:
    """A tokenizer with one token per character."""

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


def sample(response: str = "ab.c.") -> Sample:
    n = len(response)
    ids = tuple(map(ord, response))
    return Sample("s", Prompt("p", "", (1,)), ids, (-1.0,) * n, MASK[:n], (VersionRun(0, n),), "stop", response)


def settings(*overrides: str) -> RewardModel:
    return load(BASE, ["model.path=m", "data.source=arithmetic", "reward_model.path=r", *overrides]).reward_model


def reward(*overrides: str, kind: str = "token", rewards_tokens: bool = True, scores=SCORES) -> ModelReward:
    rule = ClassifierReward(kind, settings(*overrides), Letters(), None, rewards_tokens)
    return rule.reward(sample(), scores)


def test_every_token_is_rewarded_by_its_score():
    assert reward() == ModelReward(31.0, [1.0 + 2.0, math.nan, 4.0, 8.0 + 16.0, math.nan])


def test_steps_are_rewarded_at_their_last_tokens():
    assert reward("reward_model.step_end=.") == ModelReward(20.0, [math.nan, math.nan, 4.0, 16.0, math.nan])


def test_samples_are_compared_by_the_sum_of_scores():
    assert reward(rewards_tokens=False) == ModelReward(31.0, None)


@pytest.mark.parametrize(("how", "value"), [("mean", 6.2), ("sum", 31.0), ("min", 1.0), ("last", 16.0)])
def test_aggregation_yields_an_outcome_reward(how, value):
    assert reward(f"reward_model.aggregation={how}") == ModelReward(value, None)


def test_sequence_classifier_rewards_the_sample():
    assert reward(kind="sequence", scores=[3.0]) == ModelReward(3.0, None)


def test_score_that_is_not_finite_is_not_a_reward():
    assert math.isnan(reward(scores=[1.0, math.inf, 0.0, 0.0, 0.0]).value)
