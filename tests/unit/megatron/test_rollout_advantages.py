"""Advantages of rollouts with several samples, from scores to tokens, compared with hand-computed values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

import pytest
import torch

from megarl.algorithms.baselines import MovingAverage
from megarl.config.load import load
from megarl.core.completion import VersionRun
from megarl.core.episode import RolloutInfo
from megarl.core.prompt import Prompt
from megarl.core.sample import Sample, SampleRef
from megarl.core.score import Score, TokenTotals
from megarl.data.collate import collate
from megarl.megatron.advantages import with_advantages
from megarl.step.baselines import attach_baselines
from megarl.step.dispatch import dispatch
from megarl.step.scoring import select
from tests.packing import packing
from tests.paths import QUICKSTART

Rollout = Sequence[Sequence[float]]
"""One number for each trained token, by sample."""

IN_REWARD = "algorithm.kl={placement: reward, coefficient: 1.0}"
PLAIN = "algorithm.advantage={estimator: grpo, std: none, credit: CREDIT}"


def ref(rollout: int, number: int, num_tokens: int, count: int) -> SampleRef:
    name = f"1.0.{rollout}"
    prompt, run = Prompt("p", "", (7, 8)), (VersionRun(0, num_tokens),)
    response = (9,) * num_tokens, (-1.0,) * num_tokens, (True,) * num_tokens
    sample_id = f"{name}/{number}" if number else name
    sample = Sample(sample_id, prompt, *response, run, "stop", "", rollout_id=name)
    info = RolloutInfo("done", count, count, {}, 0, 0)
    return SampleRef(
        sample_id, "p", 2, num_tokens, num_tokens, "stop", 0, 0, rollout_id=name, rollout=info, sample=sample
    )


def advantages(keys: Sequence[str], outcomes: Sequence[float], **rewards: Sequence[Rollout]) -> list[list[list[float]]]:
    """Return the advantage of each token, by rollout and sample. `rewards` are token rewards by field of TokenBatch;
    all fields have the same numbers of tokens. Samples whose rewards are all NaN have none, as in RewardWorker."""
    config = load(QUICKSTART, ["environment.class=a.py:A", f"batch.samples_per_prompt={len(outcomes)}", *keys])
    shape = next(iter(rewards.values()))
    rollouts = [
        [ref(i, k, len(tokens), len(rollout)) for k, tokens in enumerate(rollout)] for i, rollout in enumerate(shape)
    ]
    by_name = {
        name: {
            item.id: list(tokens)
            for items, rollout in zip(rollouts, field, strict=True)
            for item, tokens in zip(items, rollout, strict=True)
            if not all(map(math.isnan, tokens))
        }
        for name, field in rewards.items()
    }
    group = [item for items in rollouts for item in items]
    process = by_name.get("process_reward", {})
    scores = [
        Score(outcome, {}, token_reward_totals=TokenTotals.of(process.get(item.id, [])))
        for outcome, items in zip(outcomes, rollouts, strict=True)
        for item in items
    ]
    totals = [
        {name: TokenTotals.of(tokens) for name, tokens in by_name.get(field, {}).items()}
        for field in ("implicit_reward", "kl_reward")
    ]
    [scored], _ = select(config, [group], scores)
    based = attach_baselines(config, [scored], totals[0], totals[1], MovingAverage())
    [batch] = dispatch(config, based, packing(), scores={"process_reward": process} if process else {})
    fields = {name: {key: torch.tensor(tokens) for key, tokens in field.items()} for name, field in by_name.items()}
    [estimated] = with_advantages(config.algorithm, [collate(batch.samples, packing(), **fields)])
    parts = estimated.advantage.split([item.num_response_tokens for item in batch.samples])
    by_sample = {item.id: part.tolist() for item, part in zip(batch.samples, parts, strict=True)}
    return [[by_sample[item.id] for item in items] for items in rollouts]


def flat(nested: Sequence[Sequence[Sequence[float]]]) -> list[float]:
    return [number for rollout in nested for sample in rollout for number in sample]


@pytest.mark.parametrize("credit", ["whole", "reward_to_go"])
def test_kl_of_all_samples_counts_for_each_sample(credit):
    """Both rollouts have reward 1 and KL −0.2; one has two samples. All advantages are 1 − 0.2 − 0.8 = 0."""
    kl = [[[-0.1], [-0.1]], [[-0.2]]]
    found = advantages([PLAIN.replace("CREDIT", credit), IN_REWARD], [1.0, 1.0], kl_reward=kl)
    assert flat(found) == pytest.approx([0.0, 0.0, 0.0], abs=1e-7)


def test_implicit_rewards_of_all_samples_count_for_each_sample():
    """The rewards are 1 + 0.3 + 0.5 and 1 + 0.2, with mean 1.5."""
    learned = [[[0.3], [0.5]], [[0.2]]]
    found = advantages([PLAIN.replace("CREDIT", "whole")], [1.0, 1.0], implicit_reward=learned)
    assert flat(found) == pytest.approx([0.3, 0.3, -0.3])


def test_kl_to_go_excludes_earlier_tokens_of_the_sample_only():
    """The mean reward is 1 − 0.7 / 2 = 0.65. The advantages of the second sample's tokens are 1 − 0.3 − 0.65 and,
    without its first token's KL, 1 − 0.2 − 0.65."""
    kl = [[[-0.1], [-0.1, -0.1]], [[-0.4]]]
    found = advantages([PLAIN.replace("CREDIT", "reward_to_go"), IN_REWARD], [1.0, 1.0], kl_reward=kl)
    assert flat(found) == pytest.approx([0.05, 0.05, 0.15, -0.05])


TURNS = [[[0.5], [0.5]], [[1.0]]]


def test_turn_rewards_are_not_part_of_the_scalar_reward():
    """The mean turn reward is 2/3, and the rollouts have no other reward."""
    found = advantages([PLAIN.replace("CREDIT", "reward_to_go")], [1.0, 1.0], process_reward=TURNS)
    assert flat(found) == pytest.approx([-1 / 6, -1 / 6, 1 / 3])


@pytest.mark.parametrize("estimator", ["reinforce_plus_plus", "rloo", "opo", "gpg", "policy_gradient", "reinforce"])
def test_outcome_is_shared_and_turn_rewards_are_not(estimator):
    """The rollouts have an outcome of 2 in addition to the turn rewards."""
    key = f"algorithm.advantage={{estimator: {estimator}, whiten: false"
    spec = key + ("}" if estimator == "reinforce_plus_plus" else ", credit: reward_to_go}")
    found = flat(advantages([spec], [3.0, 3.0], process_reward=TURNS))
    expected = {
        "reinforce_plus_plus": [2.5, 2.5, 3.0],
        "rloo": [-0.5, -0.5, 0.5],  # the mean turn rewards of the rollouts are 0.5 and 1
        "opo": [-1 / 6, -1 / 6, 1 / 3],
        "gpg": [-1 / 6, -1 / 6, 1 / 3],
        "policy_gradient": [2.5, 2.5, 3.0],
        "reinforce": [2.5, 2.5, 3.0],
    }
    assert found == pytest.approx(expected[estimator])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ("estimator: reinforce_plus_plus, whiten: false", [2.5, 2.5, 3.0, 3.0]),
        ("estimator: reinforce, credit: reward_to_go", [2.5, 2.5, 3.0, 3.0]),
        ("estimator: grpo, std: none, credit: reward_to_go", [0.25, 0.25, 0.0, 0.0]),
    ],
)
def test_sample_of_turns_without_rewards(settings, expected):
    """The first rollout has two samples. No turn of the first one has a reward. The outcomes without turn rewards are
    2.5 and 2, and the turn rewards 0.5 and 1."""
    turns = [[[math.nan, math.nan], [0.5]], [[1.0]]]
    found = advantages([f"algorithm.advantage={{{settings}}}"], [3.0, 3.0], process_reward=turns)
    assert flat(found) == pytest.approx(expected)


def test_gae_credits_each_turn_reward_once():
    keys = ["algorithm.advantage={estimator: gae, gae_lambda: 1.0, whiten: false}"]
    turns = [[[0.0, 0.5], [0.25]], [[1.0]]]
    values = [[[0.0, 0.0], [0.0]], [[0.0]]]
    assert flat(advantages(keys, [0.75, 1.0], process_reward=turns, values=values)) == [0.5, 0.5, 0.25, 1.0]


def test_length_penalties_are_summed_over_a_rollout():
    """The first rollout has penalties of 0.5 and 1. Each of its samples has the rollout's reward, 1 − 1.5."""
    keys = ["rollout.max_new_tokens=4", "rewards.overlong_buffer=2", PLAIN.replace("CREDIT", "whole")]
    kl = [[[0.0] * 3, [0.0] * 4, [0.0]], [[0.0]]]
    found = advantages([*keys, IN_REWARD], [1.0, 1.0], kl_reward=kl)
    assert flat(found) == pytest.approx([-0.75] * 8 + [0.75])


def by_definition(
    credit: str, outcomes: Sequence[float], tokens: Mapping[str, Sequence[Rollout]]
) -> list[list[list[float]]]:
    """Compute GRPO's advantages without the standard deviation from the definitions in rollout_rewards.py."""
    kl, learned, turns = (tokens[name] for name in ("kl_reward", "implicit_reward", "process_reward"))
    is_whole = credit == "whole"
    rewards = [
        outcome + sum(map(sum, kl[i])) + (sum(map(sum, learned[i])) if is_whole else -sum(map(sum, turns[i])))
        for i, outcome in enumerate(outcomes)
    ]
    compared = [x for field in (learned, turns) for rollout in field for sample in rollout for x in sample]
    baseline, token_baseline = fmean(rewards), fmean(compared)
    result = []
    for i, reward in enumerate(rewards):
        result.append([])
        for s, sample in enumerate(kl[i]):
            result[-1].append([])
            for t in range(len(sample)):
                value = reward - baseline
                if not is_whole:
                    later = zip(learned[i][s][t:], turns[i][s][t:], strict=True)
                    value += sum(d + x - 2 * token_baseline for d, x in later) - sum(sample[:t])
                result[-1][-1].append(value)
    return result


@pytest.mark.parametrize("credit", ["whole", "reward_to_go"])
def test_advantages_match_the_definition(credit):
    generator = torch.Generator().manual_seed(0)
    shape = [[2, 1, 3], [1], [2, 2], [4]]

    def draw() -> list[list[list[float]]]:
        return [[torch.randn(n, generator=generator).tolist() for n in rollout] for rollout in shape]

    tokens = {name: draw() for name in ("kl_reward", "implicit_reward", "process_reward")}
    outcomes = [1.0, 0.0, -0.5, 2.0]
    given = {name: field for name, field in tokens.items() if credit != "whole" or name != "process_reward"}
    found = advantages([PLAIN.replace("CREDIT", credit), IN_REWARD], outcomes, **given)
    assert flat(found) == pytest.approx(flat(by_definition(credit, outcomes, tokens)), abs=1e-5)
