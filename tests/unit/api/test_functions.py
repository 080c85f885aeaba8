"""The public functions, compared with closed forms and loops over tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import megarl


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


REWARDS = [[1.0, 0.0, 0.0, 3.0], [1.0, 1.0, 1.0], [0.5, -2.0]]


@pytest.mark.parametrize(("std", "ddof"), [("sample", 1), ("population", 0)])
def test_grpo_equals_the_closed_form(std, ddof):
    actual = megarl.compute_advantages("grpo", REWARDS, std=std, std_epsilon=1e-4)
    for row, rewards in zip(actual, REWARDS, strict=True):
        deviation = np.std(rewards, ddof=ddof)
        np.testing.assert_allclose(row, (np.array(rewards) - np.mean(rewards)) / (deviation + 1e-4), atol=1e-12)


def test_grpo_with_step_std_and_limit():
    """One standard deviation for all groups, and advantages bounded by the limit."""
    deviation = np.std(np.concatenate(REWARDS), ddof=1)
    actual = megarl.compute_advantages("grpo", REWARDS, std_epsilon=0.0, std_over="step", limit=1.0)
    for row, rewards in zip(actual, REWARDS, strict=True):
        np.testing.assert_allclose(row, np.clip((np.array(rewards) - np.mean(rewards)) / deviation, -1, 1), atol=1e-12)
    assert max(map(max, actual)) == 1.0


def test_rloo_compares_with_the_mean_of_others():
    for row, rewards in zip(megarl.compute_advantages("rloo", REWARDS), REWARDS, strict=True):
        others = [np.mean(rewards[:i] + rewards[i + 1 :]) for i in range(len(rewards))]
        np.testing.assert_allclose(row, np.array(rewards) - others, atol=1e-12)


def test_opo_weights_rewards_by_length():
    lengths = [[3, 1, 1, 5], [1, 2, 3], [4, 4]]
    actual = megarl.compute_advantages("opo", REWARDS, num_tokens=lengths)
    for row, rewards, counts in zip(actual, REWARDS, lengths, strict=True):
        np.testing.assert_allclose(row, np.array(rewards) - np.average(rewards, weights=counts), atol=1e-12)


def test_remax_compares_with_the_greedy_reward():
    assert megarl.compute_advantages("remax", [[1.0, 0.0], [2.0]], greedy=[0.25, 1.0]) == [[0.75, -0.25], [1.0]]


def test_gdpo_compares_named_rewards_one_by_one():
    """Both groups have advantages of ±1 for each reward. The second reward has weight 3."""
    rewards = [[{"a": 0.0, "b": 5.0}, {"a": 1.0, "b": 4.0}], [{"a": 2.0, "b": 0.0}, {"a": 0.0, "b": -9.0}]]
    plain = dict(std="population", std_epsilon=0.0)
    actual = megarl.compute_advantages("gdpo", rewards, weights={"b": 3.0}, step_std="none", **plain)
    np.testing.assert_allclose(actual, [[2, -2], [4, -4]], atol=1e-12)
    normalized = megarl.compute_advantages("gdpo", rewards, weights={"b": 3.0}, step_std="population", **plain)
    np.testing.assert_allclose(normalized, np.array(actual) / 10**0.5, atol=1e-12)


def test_named_rewards_are_summed_by_other_estimators():
    rewards = [[{"a": 0.0, "b": 0.5}, {"a": 1.0, "b": 0.0}]]
    assert megarl.compute_advantages("rloo", rewards, weights={"b": 4.0}) == [[1.0, -1.0]]


def test_estimator_that_compares_turns_is_rejected():
    with pytest.raises(megarl.UserError, match="estimator=gigpo: compares turns"):
        megarl.compute_advantages("gigpo", REWARDS)


def test_whitening_is_over_trained_tokens():
    lengths = [[3, 1, 1, 5], [1, 2, 3], [4, 4]]
    actual = megarl.compute_advantages("grpo", REWARDS, num_tokens=lengths, std="none", whiten=True, whiten_epsilon=0.0)
    centered = np.concatenate([np.array(row) - np.mean(row) for row in REWARDS])
    by_token = np.repeat(centered, np.concatenate(lengths))
    np.testing.assert_allclose(np.concatenate(actual), (centered - by_token.mean()) / by_token.std(ddof=1), atol=1e-12)


def test_gae_equals_the_recursion():
    random = generator(0)
    rewards, values = (torch.randn(3, 6, generator=random, dtype=torch.float64) for _ in range(2))
    mask = torch.rand(3, 6, generator=random) < 0.7
    mask[1] = False
    actual = megarl.compute_token_advantages("gae", rewards, mask, values, gamma=0.9, gae_lambda=0.8)
    expected = torch.zeros(3, 6, dtype=torch.float64)
    for row in range(3):
        advantage, following = 0.0, 0.0
        for t in mask[row].nonzero().flatten().tolist()[::-1]:
            delta = rewards[row, t] + 0.9 * following - values[row, t]
            advantage = delta + 0.9 * 0.8 * advantage
            following = values[row, t]
            expected[row, t] = advantage
    torch.testing.assert_close(actual.advantage, expected)
    torch.testing.assert_close(actual.returns, torch.where(mask, expected + values, 0.0))


def clipped(ratio: torch.Tensor, advantage: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return -torch.min(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean_of_token_means", "sequence_mean_over_max_tokens"])
def test_clip_equals_ppo(aggregation):
    random = generator(1)
    log_probs, old = (-torch.rand(4, 5, generator=random, dtype=torch.float64) for _ in range(2))
    log_probs.requires_grad_()
    advantages, mask = torch.randn(4, generator=random, dtype=torch.float64), torch.rand(4, 5, generator=random) < 0.8
    actual = megarl.policy_loss(
        "clip", log_probs, old, advantages, mask, aggregation=aggregation, max_tokens=7, clip_low=0.2, clip_high=0.3
    )
    losses = clipped((log_probs - old).exp(), advantages[:, None], 0.2, 0.3) * mask
    expected = {
        "token_mean": losses.sum() / mask.sum(),
        "sequence_mean_of_token_means": (losses.sum(1) / mask.sum(1)).mean(),
        "sequence_mean_over_max_tokens": losses.sum() / (4 * 7),
    }[aggregation]
    torch.testing.assert_close(actual, expected)
    gradients = [torch.autograd.grad(loss, log_probs)[0] for loss in (actual, expected)]
    torch.testing.assert_close(*gradients)


def test_gspo_uses_the_ratio_of_the_sequence():
    random = generator(2)
    log_probs, old = (-torch.rand(3, 4, generator=random, dtype=torch.float64) for _ in range(2))
    advantages, mask = torch.randn(3, generator=random, dtype=torch.float64), torch.ones(3, 4, dtype=torch.bool)
    actual = megarl.policy_loss("gspo", log_probs, old, advantages, mask, clip_low=0.1, clip_high=0.1)
    expected = clipped((log_probs - old).mean(1).exp(), advantages, 0.1, 0.1).mean()
    torch.testing.assert_close(actual, expected)


def test_advantages_may_differ_between_tokens():
    log_probs = torch.zeros(2, 3, dtype=torch.float64)
    advantages = torch.arange(6.0, dtype=torch.float64).reshape(2, 3)
    mask = torch.tensor([[True, True, False], [False, True, True]])
    assert megarl.policy_loss("clip", log_probs, log_probs, advantages, mask).item() == -(0 + 1 + 4 + 5) / 4


def test_kl_divergence_of_each_estimator():
    log_probs, reference = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.0]])
    difference = log_probs - reference
    expected = {"k1": difference, "k2": difference**2 / 2, "k3": (-difference).exp() - 1 + difference}
    for name, value in expected.items():
        torch.testing.assert_close(megarl.kl_divergence(log_probs, reference, estimator=name), value)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_packing_places_each_sample_once_within_the_budget(num_ranks):
    random = np.random.default_rng(0)
    lengths = [(int(a), int(b)) for a, b in random.integers(1, 30, (40, 2))]
    ranks = megarl.pack_samples(lengths, 64, num_ranks=num_ranks)
    assert len(ranks) == num_ranks and len({len(rank) for rank in ranks}) == 1
    assert sorted(i for rank in ranks for batch in rank for i in batch) == list(range(40))
    assert all(sum(sum(lengths[i]) for i in batch) <= 64 for rank in ranks for batch in rank)


def test_shared_prompts_count_once():
    lengths, prompts = [(10, 2)] * 4, ["a", "a", "b", "b"]
    assert megarl.pack_samples(lengths, 14, prompts=prompts) == [[(0, 1), (2, 3)]]
    assert len(megarl.pack_samples(lengths, 14)[0]) == 4


TENSORS = (torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(1), torch.ones(1, 2, dtype=torch.bool))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: megarl.compute_advantages("gropo", [[1.0]]), r"^estimator=gropo: unknown\. Fix: use one of .*grpo"),
        (
            lambda: megarl.compute_advantages("gae", [[1.0]]),
            r"^estimator=gae: computes one advantage per token\. Fix: use",
        ),
        (lambda: megarl.compute_advantages("grpo", [[1.0]], std="x"), r"^std='x': .*Fix: use the options"),
        (lambda: megarl.compute_advantages("grpo", [[1.0]], k=1), r"^k=1: grpo has no such option\. Fix: "),
        (
            lambda: megarl.compute_token_advantages("grpo", *TENSORS[:2]),
            r"^estimator=grpo: computes one advantage per sa",
        ),
        (lambda: megarl.compute_token_advantages("gae", *TENSORS[:2]), r"^estimator=gae: needs values\. Fix: pass"),
        (lambda: megarl.policy_loss("clip_cov", *TENSORS), r"^objective=clip_cov: selects tokens"),
        (lambda: megarl.policy_loss("clip", *TENSORS, aggregation="mean"), r"^aggregation=mean: unknown\. Fix: use"),
        (lambda: megarl.kl_divergence(*TENSORS[:2], estimator="k4"), r"^estimator=k4: unknown\. Fix: use one of k1"),
        (lambda: megarl.pack_samples([(3, 4)], 5), r"Fix: "),
    ],
)
def test_invalid_arguments_are_rejected_by_name(call, message):
    with pytest.raises(megarl.UserError, match=message):
        call()
