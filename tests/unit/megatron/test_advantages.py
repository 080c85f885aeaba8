"""Advantages on packed batches, from sample and token rewards, compared with explicit computations."""

from dataclasses import replace

import pytest
import torch

from megarl.algorithms.baselines import Member
from megarl.algorithms.registry import ESTIMATORS
from megarl.algorithms.specs import SampleEstimator, TokenEstimator
from megarl.config.algorithm_schema import Algorithm
from megarl.config.load import load
from megarl.core.completion import VersionRun
from megarl.core.prompt import Prompt
from megarl.core.sample import Sample, SampleRef
from megarl.core.score import NO_BASELINE, Baseline, TokenTotals
from megarl.data.collate import collate
from megarl.megatron.advantages import add_distillation, estimate_advantages, mean_advantages, with_advantages
from megarl.megatron.configured_losses import configured_distillation
from megarl.rewards.process import on_turns
from tests.closeness import LOSS_FLOOR, TOLERANCE, relative_error
from tests.packing import packing
from tests.paths import BASE
from tests.samples import training_ref

GAMMA, LAMBDA = 0.9, 0.8
MASKS = {"a": (True, False, True, True, False), "b": (True,), "c": (False, True, True), "d": (False, False)}
REWARDS = {"a": 2.0, "b": -1.0, "c": 0.0, "d": 5.0}


def algorithm(estimator: str, *overrides: str) -> Algorithm:
    keys = [f"algorithm.{override}" for override in (f"advantage.estimator={estimator}", *overrides)]
    return load(BASE, ["model.path=m", "data.source=arithmetic", *keys]).algorithm


def training_sample(name: str) -> SampleRef:
    n = len(MASKS[name])
    run = (VersionRun(0, n),)
    sample = Sample(name, Prompt(name, "", (7, 8)), (9,) * n, (-1.0,) * n, MASKS[name], run, "stop", "")
    return training_ref(sample, REWARDS[name], NO_BASELINE, 1.0)


def randn(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(len(mask), generator=generator) for name, mask in MASKS.items()}


def by_hand(name: str, values: torch.Tensor, token_rewards: list[torch.Tensor]) -> list[float]:
    """Compute Σ_l (γλ)^l·δ_{t+l} over the trained tokens, from last to first; 0 for the others."""
    trained = [t for t, flag in enumerate(MASKS[name]) if flag]
    advantages, later, following = [0.0] * len(MASKS[name]), 0.0, 0.0
    for t in reversed(trained):
        reward = sum(float(rewards[t]) for rewards in token_rewards) + (REWARDS[name] if t == trained[-1] else 0.0)
        later = reward + GAMMA * following - float(values[t]) + GAMMA * LAMBDA * later
        following = float(values[t])
        advantages[t] = later
    return advantages


@pytest.mark.parametrize(
    "names", [(), ("process_reward",), ("implicit_reward",), ("implicit_reward", "process_reward")]
)
def test_gae_uses_token_rewards_at_their_tokens(names):
    values, rewards = randn(0), {name: randn(i + 1) for i, name in enumerate(names)}
    samples = [training_sample(name) for name in MASKS]
    settings = algorithm("gae", f"advantage={{gamma: {GAMMA}, gae_lambda: {LAMBDA}, whiten: false}}")
    [batch] = with_advantages(settings, [collate(samples, packing(), values=values, **rewards)])
    by_sample = {name: [field[name] for field in rewards.values()] for name in MASKS}
    by_token = [a for name in MASKS for a in by_hand(name, values[name], by_sample[name])]
    expected = torch.tensor(by_token, dtype=torch.float64)
    assert relative_error(batch.advantage, expected) <= TOLERANCE
    trained = torch.tensor([flag for mask in MASKS.values() for flag in mask])
    expected_returns = torch.where(trained, expected + torch.cat(list(values.values())), 0.0)
    assert relative_error(batch.returns, expected_returns) <= TOLERANCE


NAN = float("nan")
STEPS = {"a": [NAN, NAN, 2.0, 5.0, NAN], "b": [1.0], "c": [NAN, 3.0, NAN], "d": [NAN, NAN]}
KL_REWARDS = {"a": [-1.0, 0.0, -2.0, -4.0, 0.0], "b": [-8.0], "c": [0.0, -16.0, -32.0], "d": [0.0, 0.0]}
BASELINE = Baseline(0.5, 2.0, token_center=1.0, token_scale=4.0)


IN_REWARD = "kl={placement: reward, coefficient: 1.0}"


def estimated(settings: Algorithm, **rewards: dict[str, list[float]]) -> list[list[float]]:
    """Return the advantages of each sample. All samples are in one pack, after an empty one."""
    samples = [replace(training_sample(name), baseline=BASELINE) for name in MASKS]
    scores = {
        field: {name: torch.tensor(values) for name, values in by_sample.items()}
        for field, by_sample in rewards.items()
    }
    empty = collate([], packing(), **scores)
    _, batch = with_advantages(settings, [empty, collate(samples, packing(), **scores)])
    return [advantages.tolist() for advantages in batch.advantage.split([len(mask) for mask in MASKS.values()])]


SAMPLE_ESTIMATORS = [
    name for name, spec in ESTIMATORS.items() if isinstance(spec, SampleEstimator) and not spec.whitens
]
TOKEN_ESTIMATORS = [name for name, spec in ESTIMATORS.items() if isinstance(spec, TokenEstimator)]


@pytest.mark.parametrize("estimator", SAMPLE_ESTIMATORS)
def test_sample_advantage_is_equal_at_all_trained_tokens(estimator):
    actual = estimated(algorithm(estimator))
    assert actual == [[0.75, 0, 0.75, 0.75, 0], [-0.75], [0, -0.25, -0.25], [0, 0]]


def test_mean_advantages_average_over_trained_tokens():
    """Sample d has no trained token, and an empty pack has no samples."""
    values = {name: torch.arange(float(len(mask))) for name, mask in MASKS.items()}
    settings = algorithm("gae", "advantage={gamma: 1.0, gae_lambda: 1.0, whiten: false}")
    empty, batch = (collate(samples, packing(), values=values) for samples in ([], [*map(training_sample, MASKS)]))
    empty, batch = with_advantages(settings, [empty, batch])
    # Reward minus value of each trained token. The values are 0, 2, 3 for a, 0 for b, and 1, 2 for c.
    assert mean_advantages(batch, list(MASKS)) == pytest.approx({"a": 2 - 5 / 3, "b": -1.0, "c": -1.5})
    assert mean_advantages(empty, []) == {}


def test_nearly_equal_rewards_keep_precision():
    """GRPO with rewards near 1000 and a deviation of 1e-3. float32 values near 1000 are 6e-5 apart."""
    rewards = [1000.0, 1000.001, 1000.002]
    baseline = Baseline(1000.001, 1e-3)
    samples = [
        replace(training_sample(n), scalar_reward=r, baseline=baseline) for n, r in zip("abc", rewards, strict=True)
    ]
    [batch] = with_advantages(algorithm("grpo"), [collate(samples, packing())])
    assert batch.advantage.dtype is torch.float32
    assert batch.advantage[[0, 5, 8]].tolist() == pytest.approx([-1.0, 0.0, 1.0], abs=LOSS_FLOOR)


def test_step_rewards_are_added_to_sample_rewards():
    """The sums are 2 + 7, −1 + 1 and 0 + 3."""
    assert estimated(algorithm("grpo"), process_reward=STEPS) == [
        *([4.25, 0, 4.25, 4.25, 0], [-0.25], [0, 1.25, 1.25], [0, 0])
    ]


def test_step_rewards_to_go_have_their_own_baseline():
    """Normalized step rewards: (2 − 1)/4 and (5 − 1)/4 for a, 0 for b, (3 − 1)/4 for c."""
    assert estimated(algorithm("grpo", "advantage.credit=reward_to_go"), process_reward=STEPS) == [
        *([2.0, 0, 2.0, 1.75, 0], [-0.75], [0, 0.25, -0.25], [0, 0])
    ]


TURNS = {"a": [2.0, 5.0], "b": [1.0], "c": [3.0], "d": []}
"""Sample id -> reward of each turn. The turns of `a` end at its first and fourth token."""


def turn_rewards() -> dict[str, list[float]]:
    return {name: on_turns(rewards, MASKS[name]) for name, rewards in TURNS.items()}


@pytest.mark.parametrize("estimator", SAMPLE_ESTIMATORS)
def test_turn_rewards_support_both_credit_modes(estimator):
    """whole: 2 + 7, −1 + 1 and 0 + 3. reward_to_go: (2 − 1)/4 and (5 − 1)/4; 0; (3 − 1)/4."""
    whole = estimated(algorithm(estimator), process_reward=turn_rewards())
    assert whole == [[4.25, 0, 4.25, 4.25, 0], [-0.25], [0, 1.25, 1.25], [0, 0]]
    reward_to_go = estimated(algorithm(estimator, "advantage.credit=reward_to_go"), process_reward=turn_rewards())
    assert reward_to_go == [[2.0, 0, 1.75, 1.75, 0], [-0.75], [0, 0.25, 0.25], [0, 0]]


def test_turn_rewards_are_discounted_to_go():
    settings = algorithm("reinforce_plus_plus", "advantage.whiten=false", "advantage.gamma=0.5")
    actual = estimated(settings, process_reward=turn_rewards())
    assert actual == [[2 + 0.25 * 7, 0, 0.5 * 7, 7, 0], [0], [0, 0.5 * 3, 3], [0, 0]]


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_kl_reward_supports_both_credit_modes(level):
    """The KL is divided by the scale, 2, for both levels."""
    to_go, whole = (
        estimated(algorithm("grpo", IN_REWARD, f"kl.level={level}", f"advantage.credit={credit}"), kl_reward=KL_REWARDS)
        for credit in ("reward_to_go", "whole")
    )
    assert to_go == [[-2.75, 0, -2.25, -1.25, 0], [-4.75], [0, -24.25, -16.25], [0, 0]]
    assert whole == [[-2.75, 0, -2.75, -2.75, 0], [-4.75], [0, -24.25, -24.25], [0, 0]]


def test_single_sample_ignores_its_token_rewards():
    settings = algorithm("rloo", "advantage.credit=reward_to_go", IN_REWARD)
    group = [Member(REWARDS["a"] - 7.0, 3, TokenTotals.of([2.0, 5.0]))]
    [alone] = settings.advantage.spec.baselines(group, settings.advantage.options())
    scores = {
        name: {"a": torch.tensor(rewards["a"])}
        for name, rewards in (("process_reward", STEPS), ("kl_reward", KL_REWARDS))
    }
    [batch] = with_advantages(settings, [collate([replace(training_sample("a"), baseline=alone)], packing(), **scores)])
    assert not batch.advantage.any()


def test_reinforce_plus_plus_sums_all_rewards_to_go():
    settings = algorithm("reinforce_plus_plus", "advantage.whiten=false", "advantage.gamma=0.5")
    actual = estimated(settings, process_reward=STEPS, kl_reward=KL_REWARDS, implicit_reward=KL_REWARDS)
    last = 2.0 + 5 - 8
    assert actual[0] == [-2 + 0.5 * (2 - 4 + 0.5 * last), 0, 2 - 4 + 0.5 * last, last, 0]
    assert actual[1:] == [[-1 + 1 - 16], [0, 3 - 32 + 0.5 * -64, -64], [0, 0]]


def test_gae_with_critic_lambda_and_length_alpha():
    """The policy's λ is 1 − 1/(α·3) for a. The critic's is 1, so its returns are the rewards-to-go."""
    values = {name: [0.5] * len(mask) for name, mask in MASKS.items()}
    settings = algorithm("gae", "advantage={length_alpha: 0.5, critic_lambda: 1.0, whiten: false}")
    samples = [training_sample(name) for name in MASKS]
    scores = {name: torch.tensor(numbers) for name, numbers in values.items()}
    [batch] = with_advantages(settings, [collate(samples, packing(), values=scores)])
    a = batch.advantage[:5].tolist()
    assert a == pytest.approx([1.5 / 9, 0, 0.5, 1.5, 0])
    assert batch.returns[:5].tolist() == pytest.approx([2, 0, 2, 2, 0])


@pytest.mark.parametrize("estimator", [*SAMPLE_ESTIMATORS, *TOKEN_ESTIMATORS])
def test_advantages_ignore_neighbors_in_the_pack(estimator):
    """A sample has the same advantages alone and between others, in any order."""
    settings = algorithm(estimator, "advantage.whiten=false", "advantage.gamma=0.9")
    samples_in_order = [
        replace(training_sample(name), baseline=Baseline(i / 2, 1.0 + i)) for i, name in enumerate(MASKS)
    ]
    scores = {field: randn(i) for i, field in enumerate(("values", "implicit_reward", "process_reward", "kl_reward"))}

    def pack_advantages(samples: list[SampleRef]) -> dict[str, torch.Tensor]:
        [batch] = with_advantages(settings, [collate(samples, packing(), **scores)])
        lengths = [len(item.sample.response_ids) for item in samples]
        parts = batch.advantage.split(lengths)
        return {item.sample.id: part for item, part in zip(samples, parts, strict=True)}

    alone = {name: part for item in samples_in_order for name, part in pack_advantages([item]).items()}
    for order in (
        samples_in_order,
        samples_in_order[::-1],
        [samples_in_order[2], samples_in_order[0], samples_in_order[3], samples_in_order[1]],
    ):
        torch.testing.assert_close(pack_advantages(order), alone)


TEACHERS = "[{name: one, path: x}, {name: two, path: y, weight: 0.5}]"


@pytest.mark.parametrize("old_is_rollout", [False, True], ids=["old policy", "rollout policy"])
@pytest.mark.parametrize("estimator", ["grpo", "gae", "reinforce_plus_plus"])
def test_distillation_is_added_after_whitening(estimator, old_is_rollout):
    """The batch has masked tokens, whose log-probs are not finite, and an empty pack."""
    keys = ["model.path=m", "data.source=arithmetic", f"teachers.models={TEACHERS}", "algorithm.distillation.limit=1.5"]
    config = load(BASE, [*keys, f"algorithm.advantage.estimator={estimator}", "algorithm.distillation.coefficient=0.3"])
    masks = {name: torch.tensor(mask) for name, mask in MASKS.items()}
    drawn = {name: randn(i) for i, name in enumerate(("old", "values", "teacher/one", "teacher/two"))}
    for name in ("teacher/one", "teacher/two"):
        drawn[name] = {i: 3 * values.where(masks[i], torch.nan) for i, values in drawn[name].items()}
    del drawn["teacher/two"]["c"]  # of a source that this teacher does not score
    samples = [training_sample(name) for name in MASKS]
    batches = [collate(members, packing(), **drawn) for members in (samples, [])]
    plain, _ = estimate_advantages(config.algorithm, batches)
    divergence = configured_distillation(config.algorithm.distillation, config.teachers.models)
    batch, empty = add_distillation(estimate_advantages(config.algorithm, batches), divergence, old_is_rollout)
    assert len(empty.advantage) == 0
    expected = []
    for name, mask in masks.items():
        old = torch.full(mask.shape, -1.0) if old_is_rollout else drawn["old"][name]
        one = (old - drawn["teacher/one"][name]).clamp(-1.5, 1.5)
        two = 0.0 if name == "c" else (old - drawn["teacher/two"][name]).clamp(-1.5, 1.5)
        expected.append(torch.where(mask, -0.3 * (one + 0.5 * two), 0.0))
    assert torch.cat(expected).abs().max() > 0.5
    torch.testing.assert_close(batch.advantage, plain.advantage + torch.cat(expected))
