"""Turns and reward parts of rollouts, from scores to tokens: rollouts with several samples, compared with hand-computed
values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from megarl.algorithms.baselines import MovingAverage, Turn
from megarl.config.load import load
from megarl.core.completion import VersionRun
from megarl.core.episode import Episode, RolloutInfo
from megarl.core.prompt import Prompt
from megarl.core.sample import Sample, SampleRef
from megarl.core.score import RewardPart, Score
from megarl.data.collate import add_scalars, collate
from megarl.megatron import parallel
from megarl.megatron.advantages import with_advantages
from megarl.step.baselines import attach_baselines, step_normalization
from megarl.step.dispatch import dispatch
from megarl.step.rollout_rewards import rollouts_of, turns_of_rollout
from megarl.step.scoring import is_informative, select
from tests.packing import packing
from tests.paths import QUICKSTART

GIGPO = "algorithm.advantage={estimator: gigpo, std: none, turn_gamma: 0.5, turn_weight: 2.0}"


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    with parallel.simulated_rank(config().actor.layout, 0):
        yield


def ref(rollout: int, number: int, mask: str, turns: Sequence[tuple[int, int]] = (), count: int = 1) -> SampleRef:
    """Return a sample of a rollout. `mask` has a 1 for each trained token; `turns` are as in Episode."""
    name, trained = f"1.0.{rollout}", [flag == "1" for flag in mask]
    n, info = len(mask), RolloutInfo("done", len(turns), count, {}, 0, 0)
    episode = Episode(info, (), {}, None, (), first_turn=0, is_last=True, turns=tuple(turns))
    sample = Sample(
        f"{name}/{number}" if number else name,
        *(Prompt("p", "", (7, 8)), (9,) * n, (-1.0,) * n, trained, (VersionRun(0, n),), "stop", ""),
        rollout_id=name,
        episode=episode,
    )
    return SampleRef.of(sample, sample)


def config(*keys: str):
    return load(QUICKSTART, ["environment.class=a.py:A", "batch.samples_per_prompt=2", *keys])


def advantages(settings, group: Sequence[SampleRef], scores: Sequence[Score]) -> dict[str, list[float]]:
    """Return the advantage of each token, by sample."""
    [scored], _ = select(settings, [group], scores)
    over_step = step_normalization(settings, [scored], {}, {})
    based = attach_baselines(settings, [scored], {}, {}, MovingAverage(), over_step)
    [batch] = dispatch(settings, based, packing())
    [estimated] = with_advantages(settings.algorithm, [collate(batch.samples, packing())])
    parts = estimated.advantage.split([item.num_response_tokens for item in batch.samples])
    return {item.id: part.tolist() for item, part in zip(batch.samples, parts, strict=True)}


def test_turns_of_a_rollout_are_in_sampling_order():
    """Sub-agents take turns. The rollout's reward of 3 contains turn rewards of 1.5; the last turn gets the rest."""
    samples = [ref(0, 0, "1011", [(0, 5), (3, 6)], 2), ref(0, 1, "110010", [(1, 7), (2, 5)], 2)]
    scores = [Score(3.0, {}, turn_rewards=(1.0, 0.25)), Score(3.0, {}, turn_rewards=(0.0, 0.25))]
    [scored], _ = select(config(GIGPO), [samples], scores)
    [rollout] = rollouts_of(scored)
    assert turns_of_rollout(rollout) == {
        ("1.0.0", 0): Turn(5, 1.0),
        ("1.0.0/1", 0): Turn(7, 0.0),
        ("1.0.0/1", 1): Turn(5, 0.25),
        ("1.0.0", 1): Turn(6, 0.25 + 1.5),
    }


def test_tokens_get_the_advantages_of_their_turns():
    """The rollouts have rewards 4 and 2, so A = ±1. From the first turn, which is in state 5 in both, the returns are
    1 + ½·0 + ¼·3 and 2. In state 6, they are 1.5 and 3 in the first rollout. Both differences have weight 2."""
    samples = [ref(0, 0, "1100110", [(0, 5), (1, 6)], 2), ref(0, 1, "01", [(2, 6)], 2), ref(1, 0, "11", [(0, 5)])]
    scores = [
        Score(4.0, {}, turn_rewards=(1.0, 0.0)),
        Score(4.0, {}, turn_rewards=(1.0,)),
        Score(2.0, {}, turn_rewards=(0.5,)),
    ]
    assert advantages(config(GIGPO), samples, scores) == {
        "1.0.0": pytest.approx([1 - 0.25, 1 - 0.25, 0, 0, 1 - 1.5, 1 - 1.5, 0]),
        "1.0.0/1": pytest.approx([0, 1 + 1.5]),
        "1.0.1": pytest.approx([-1 + 0.25, -1 + 0.25]),
    }


def test_whitening_includes_the_advantages_of_turns():
    """Episodes are tied, so only turns differ: the returns in state 5 are ½·2 and 2."""
    samples = [ref(0, 0, "101", [(0, 5), (1, 6)]), ref(1, 0, "1", [(0, 5)])]
    scores = [Score(2.0, {}, turn_rewards=(0.0, 0.0)), Score(2.0, {}, turn_rewards=(0.0,))]
    keys = GIGPO.replace("}", ", whiten: true, whiten_epsilon: 0.0}")
    assert advantages(config(keys), samples, scores) == {
        "1.0.0": pytest.approx([-1.0, 0, 0.0]),
        "1.0.1": pytest.approx([1.0]),
    }


def test_rollouts_without_turns_are_compared_as_in_grpo():
    samples = [ref(0, 0, "11"), ref(1, 0, "1")]
    found = advantages(config(GIGPO), samples, [Score(1.0, {}), Score(0.0, {})])
    assert found == {"1.0.0": [0.5, 0.5], "1.0.1": [-0.5]}


def test_failed_rollout_leaves_no_turn_advantage():
    samples = [ref(0, 0, "101", [(0, 5), (1, 5)]), ref(1, 0, "1", [(0, 5)])]
    scores = [Score(2.0, {}, turn_rewards=(0.5, 0.0)), Score(None, {}, failure="f raised KeyError")]
    assert advantages(config(GIGPO, "rewards.failure_limit=0.5"), samples, scores) == {"1.0.0": [0, 0, 0]}


def test_new_turn_advantages_replace_those_of_a_batch():
    item = ref(0, 0, "101", [(0, 5), (1, 5)])
    batch = collate([item], packing())
    assert batch.turn_advantage is None
    renewed = add_scalars(batch, [replace(item, turn_advantages=(2.0, 3.0))])
    assert renewed.turn_advantage.tolist() == [2, 0, 3]
    assert renewed.take_rows(torch.tensor([2])).turn_advantage.tolist() == [3]
    assert add_scalars(renewed, [item]).turn_advantage is None


GDPO = "algorithm.advantage={estimator: gdpo, std: population, std_epsilon: 0.0, step_std: none}"


def score(first: float, second: float) -> Score:
    """Return the score of a rollout with two rewards, the second one with weight 2."""
    parts = {"first": RewardPart(first), "second": RewardPart(second, 2.0)}
    return Score(first + 2 * second, {"first": first, "second": second}, reward_parts=parts)


def test_rollouts_are_compared_by_each_reward():
    """The second rollout has two samples, which count once: rewards 1, 0 and 0, 5 are ±1 and ∓1, times 1 and 2."""
    samples = [ref(0, 0, "11"), ref(1, 0, "1", count=2), ref(1, 1, "1", count=2)]
    found = advantages(config(GDPO), samples, [score(1, 0), score(0, 5), score(0, 5)])
    assert found == {"1.0.0": pytest.approx([-1, -1]), "1.0.1": pytest.approx([1]), "1.0.1/1": pytest.approx([1])}


def test_length_reward_is_a_reward_of_its_own():
    """With 8 tokens of at most 8 and a buffer of 4, the first rollout has a length reward of −1, and the other 0."""
    keys = GDPO, "rollout.max_new_tokens=8", "rewards.overlong_buffer=4"
    samples = [ref(0, 0, "1" * 8), ref(1, 0, "1")]
    found = advantages(config(*keys), samples, [score(0.5, 0.5)] * 2)
    assert (found["1.0.0"][0], found["1.0.1"][0]) == pytest.approx((-1, 1))


@pytest.mark.parametrize(("estimator", "is_told_apart"), [("gdpo", True), ("grpo", False)])
def test_groups_with_equal_sums_are_informative_for_gdpo(estimator, is_told_apart):
    settings = config(f"algorithm.advantage.estimator={estimator}")
    [scored], metrics = select(settings, [[ref(0, 0, "1"), ref(1, 0, "1")]], [score(2, 0), score(0, 1)])
    assert is_informative(scored) == is_told_apart
    assert metrics["reward/zero_std_groups"].value == (not is_told_apart)
