"""GAE where the tokens are, from rewards of whole samples and of single tokens, against the definition by hand."""

from dataclasses import replace

import pytest
import torch

from megarl.algorithms.baselines import Member
from megarl.algorithms.registry import ESTIMATORS
from megarl.algorithms.specs import SampleEstimator, TokenEstimator
from megarl.config.algorithm_schema import Algorithm
from megarl.config.load import load
from megarl.core.types import NO_BASELINE, Baseline, Prompt, Sample, TokenTotals, TrainingSample, VersionRun
from megarl.data.collate import collate
from megarl.megatron.advantages import mean_advantages, with_advantages
from megarl.rewards.process import on_turns
from tests.packing import packing
from tests.paths import BASE

GAMMA, LAMBDA = 0.9, 0.8
MASKS = {"a": (True, False, True, True, False), "b": (True,), "c": (False, True, True), "d": (False, False)}
REWARDS = {"a": 2.0, "b": -1.0, "c": 0.0, "d": 5.0}


def algorithm(estimator: str, *overrides: str) -> Algorithm:
    given = [f"algorithm.{override}" for override in (f"advantage.estimator={estimator}", *overrides)]
    return load(BASE, ["model.path=m", "data.source=arithmetic", *given]).algorithm


def training_sample(name: str) -> TrainingSample:
    n = len(MASKS[name])
    run = (VersionRun(0, n),)
    sample = Sample(name, Prompt(name, "", (7, 8)), (9,) * n, (-1.0,) * n, MASKS[name], run, "stop", "")
    return TrainingSample(sample, REWARDS[name], NO_BASELINE, 1.0)


def randn(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(len(mask), generator=generator) for name, mask in MASKS.items()}


def by_hand(name: str, values: torch.Tensor, of_tokens: list[torch.Tensor]) -> list[float]:
    """Σ_l (γλ)^l·δ_{t+l} over the trained tokens, from the last to the first; 0 for the others."""
    trained = [t for t, flag in enumerate(MASKS[name]) if flag]
    advantages, later, following = [0.0] * len(MASKS[name]), 0.0, 0.0
    for t in reversed(trained):
        reward = sum(float(own[t]) for own in of_tokens) + (REWARDS[name] if t == trained[-1] else 0.0)
        later = reward + GAMMA * following - float(values[t]) + GAMMA * LAMBDA * later
        following = float(values[t])
        advantages[t] = later
    return advantages


@pytest.mark.parametrize(
    "names", [(), ("process_reward",), ("implicit_reward",), ("implicit_reward", "process_reward")]
)
def test_rewards_of_tokens_count_where_they_are(names):
    values, given = randn(0), {name: randn(i + 1) for i, name in enumerate(names)}
    samples = [training_sample(name) for name in MASKS]
    settings = algorithm("gae", f"advantage={{gamma: {GAMMA}, gae_lambda: {LAMBDA}, whiten: false}}")
    [batch] = with_advantages(settings, [collate(samples, packing(), values=values, **given)])
    of_tokens = {name: [own[name] for own in given.values()] for name in MASKS}
    expected = torch.tensor([a for name in MASKS for a in by_hand(name, values[name], of_tokens[name])])
    torch.testing.assert_close(batch.advantage, expected, rtol=1e-5, atol=1e-6)
    trained = torch.tensor([flag for mask in MASKS.values() for flag in mask])
    expected_returns = torch.where(trained, expected + torch.cat(list(values.values())), 0.0)
    torch.testing.assert_close(batch.returns, expected_returns, rtol=1e-5, atol=1e-6)


NAN = float("nan")
STEPS = {"a": [NAN, NAN, 2.0, 5.0, NAN], "b": [1.0], "c": [NAN, 3.0, NAN], "d": [NAN, NAN]}
KL_REWARDS = {"a": [-1.0, 0.0, -2.0, -4.0, 0.0], "b": [-8.0], "c": [0.0, -16.0, -32.0], "d": [0.0, 0.0]}
BASELINE = Baseline(0.5, 2.0, token_center=1.0, token_scale=4.0)


IN_REWARD = "kl={placement: reward, coefficient: 1.0}"


def estimated(settings: Algorithm, **given: dict[str, list[float]]) -> list[list[float]]:
    """Return the advantages of each sample, all in one pack after an empty one."""
    samples = [replace(training_sample(name), baseline=BASELINE) for name in MASKS]
    scores = {name: {sample: torch.tensor(own) for sample, own in of.items()} for name, of in given.items()}
    nothing = collate([], packing(), **scores)
    _, batch = with_advantages(settings, [nothing, collate(samples, packing(), **scores)])
    return [own.tolist() for own in batch.advantage.split([len(mask) for mask in MASKS.values()])]


SAMPLE_ESTIMATORS = [
    name for name, spec in ESTIMATORS.items() if isinstance(spec, SampleEstimator) and not spec.whitens
]
TOKEN_ESTIMATORS = [name for name, spec in ESTIMATORS.items() if isinstance(spec, TokenEstimator)]


@pytest.mark.parametrize("estimator", SAMPLE_ESTIMATORS)
def test_a_sample_has_one_advantage_at_its_trained_tokens(estimator):
    found = estimated(algorithm(estimator))
    assert found == [[0.75, 0, 0.75, 0.75, 0], [-0.75], [0, -0.25, -0.25], [0, 0]]


def test_a_sample_is_known_by_the_mean_over_its_trained_tokens():
    """d has no trained token, and an empty pack no sample."""
    values = {name: torch.arange(float(len(mask))) for name, mask in MASKS.items()}
    settings = algorithm("gae", "advantage={gamma: 1.0, gae_lambda: 1.0, whiten: false}")
    nothing, batch = (collate(own, packing(), values=values) for own in ([], [*map(training_sample, MASKS)]))
    nothing, batch = with_advantages(settings, [nothing, batch])
    # The reward less the value of each trained token: a's are 0, 2 and 3, b's is 0, c's are 1 and 2.
    assert mean_advantages(batch, list(MASKS)) == pytest.approx({"a": 2 - 5 / 3, "b": -1.0, "c": -1.5})
    assert mean_advantages(nothing, []) == {}


def test_rewards_that_differ_little_keep_their_digits():
    """GRPO of rewards near 1000 whose deviation is 1e-3: float32 has steps of 6e-5 there."""
    rewards = [1000.0, 1000.001, 1000.002]
    baseline = Baseline(1000.001, 1e-3)
    samples = [replace(training_sample(n), reward=r, baseline=baseline) for n, r in zip("abc", rewards, strict=True)]
    [batch] = with_advantages(algorithm("grpo"), [collate(samples, packing())])
    assert batch.advantage.dtype is torch.float32
    assert batch.advantage[[0, 5, 8]].tolist() == pytest.approx([-1.0, 0.0, 1.0], abs=1e-6)


def test_rewards_of_steps_are_part_of_the_samples():
    """Rewards 2 + 7, −1 + 1, 0 + 3."""
    assert estimated(algorithm("grpo"), process_reward=STEPS) == [
        *([4.25, 0, 4.25, 4.25, 0], [-0.25], [0, 1.25, 1.25], [0, 0])
    ]


def test_rewards_of_steps_count_for_what_led_to_them():
    """Compared by themselves: (2 − 1)/4 and (5 − 1)/4 for a's, 0 for b's, (3 − 1)/4 for c's."""
    assert estimated(algorithm("grpo", "advantage.credit=reward_to_go"), process_reward=STEPS) == [
        *([2.0, 0, 2.0, 1.75, 0], [-0.75], [0, 0.25, -0.25], [0, 0])
    ]


TURNS = {"a": [2.0, 5.0], "b": [1.0], "c": [3.0], "d": []}
"""a's turns end at its first and its fourth token."""


def turn_rewards() -> dict[str, list[float]]:
    return {name: on_turns(rewards, MASKS[name]) for name, rewards in TURNS.items()}


@pytest.mark.parametrize("estimator", SAMPLE_ESTIMATORS)
def test_rewards_of_turns_are_part_of_the_samples_or_count_for_what_led_to_them(estimator):
    """2 + 7, −1 + 1 and 0 + 3; or (2 − 1)/4 and (5 − 1)/4, 0, (3 − 1)/4, compared by themselves."""
    whole = estimated(algorithm(estimator), process_reward=turn_rewards())
    assert whole == [[4.25, 0, 4.25, 4.25, 0], [-0.25], [0, 1.25, 1.25], [0, 0]]
    reward_to_go = estimated(algorithm(estimator, "advantage.credit=reward_to_go"), process_reward=turn_rewards())
    assert reward_to_go == [[2.0, 0, 1.75, 1.75, 0], [-0.75], [0, 0.25, 0.25], [0, 0]]


def test_rewards_of_turns_are_to_come():
    settings = algorithm("reinforce_plus_plus", "advantage.whiten=false", "advantage.gamma=0.5")
    found = estimated(settings, process_reward=turn_rewards())
    assert found == [[2 + 0.25 * 7, 0, 0.5 * 7, 7, 0], [0], [0, 0.5 * 3, 3], [0, 0]]


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_kl_counts_for_the_tokens_up_to_it_or_for_the_sample(level):
    """The KL is in units of the scale, 2; whatever it is estimated from."""
    of_tokens, of_samples = (
        estimated(algorithm("grpo", IN_REWARD, f"kl.level={level}", f"advantage.credit={credit}"), kl_reward=KL_REWARDS)
        for credit in ("reward_to_go", "whole")
    )
    assert of_tokens == [[-2.75, 0, -2.25, -1.25, 0], [-4.75], [0, -24.25, -16.25], [0, 0]]
    assert of_samples == [[-2.75, 0, -2.75, -2.75, 0], [-4.75], [0, -24.25, -24.25], [0, 0]]


def test_a_sample_alone_has_no_advantage_whatever_rewards_its_tokens():
    settings = algorithm("rloo", "advantage.credit=reward_to_go", IN_REWARD)
    group = [Member(REWARDS["a"] - 7.0, 3, TokenTotals.of([2.0, 5.0]))]
    [alone] = settings.advantage.spec.baselines(group, settings.advantage.options())
    scores = {
        name: {"a": torch.tensor(own["a"])} for name, own in (("process_reward", STEPS), ("kl_reward", KL_REWARDS))
    }
    [batch] = with_advantages(settings, [collate([replace(training_sample("a"), baseline=alone)], packing(), **scores)])
    assert not batch.advantage.any()


def test_all_rewards_are_to_come_without_a_baseline():
    settings = algorithm("reinforce_plus_plus", "advantage.whiten=false", "advantage.gamma=0.5")
    found = estimated(settings, process_reward=STEPS, kl_reward=KL_REWARDS, implicit_reward=KL_REWARDS)
    last = 2.0 + 5 - 8
    assert found[0] == [-2 + 0.5 * (2 - 4 + 0.5 * last), 0, 2 - 4 + 0.5 * last, last, 0]
    assert found[1:] == [[-1 + 1 - 16], [0, 3 - 32 + 0.5 * -64, -64], [0, 0]]


def test_two_lambdas_and_a_length():
    """The policy's λ is 1 − 1/(α·3) for a; the critic's is 1, so that its returns are what is to come."""
    values = {name: [0.5] * len(mask) for name, mask in MASKS.items()}
    settings = algorithm("gae", "advantage={length_alpha: 0.5, critic_lambda: 1.0, whiten: false}")
    samples = [training_sample(name) for name in MASKS]
    scores = {name: torch.tensor(own) for name, own in values.items()}
    [batch] = with_advantages(settings, [collate(samples, packing(), values=scores)])
    a = batch.advantage[:5].tolist()
    assert a == pytest.approx([1.5 / 9, 0, 0.5, 1.5, 0])
    assert batch.returns[:5].tolist() == pytest.approx([2, 0, 2, 2, 0])


@pytest.mark.parametrize("estimator", [*SAMPLE_ESTIMATORS, *TOKEN_ESTIMATORS])
def test_neighbours_in_the_pack_are_not_seen(estimator):
    """Each sample alone has the advantages that it has between others, in any order."""
    settings = algorithm(estimator, "advantage.whiten=false", "advantage.gamma=0.9")
    made = [replace(training_sample(name), baseline=Baseline(i / 2, 1.0 + i)) for i, name in enumerate(MASKS)]
    scores = {field: randn(i) for i, field in enumerate(("values", "implicit_reward", "process_reward", "kl_reward"))}

    def pack_advantages(samples: list[TrainingSample]) -> dict[str, torch.Tensor]:
        [batch] = with_advantages(settings, [collate(samples, packing(), **scores)])
        lengths = [len(item.sample.response_ids) for item in samples]
        parts = batch.advantage.split(lengths)
        return {item.sample.id: own for item, own in zip(samples, parts, strict=True)}

    alone = {name: own for item in made for name, own in pack_advantages([item]).items()}
    for order in (made, made[::-1], [made[2], made[0], made[3], made[1]]):
        torch.testing.assert_close(pack_advantages(order), alone)
