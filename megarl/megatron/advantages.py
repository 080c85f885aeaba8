"""Advantages for an update's microbatches, computed before the first microbatch on the ranks that hold the tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megarl.algorithms.relative import mean_and_std, sample_advantages, token_advantages, whiten
from megarl.algorithms.returns import at_last_token, reward_to_go, sum_of_sample
from megarl.algorithms.specs import TokenEstimator
from megarl.config.algorithm_schema import Advantage, Algorithm
from megarl.core.row_batch import RowBatch
from megarl.megatron.losses import advantage_of

AnyBatch = TypeVar("AnyBatch", bound=RowBatch)


def with_advantages(
    algorithm: Algorithm, batches: Sequence[AnyBatch], step_moments: torch.Tensor | None = None
) -> list[AnyBatch]:
    """Return this rank's microbatches with advantages and, if there is a critic, the returns that it is trained on.

    Collective over the data-parallel ranks if advantages are whitened over the update. step_moments holds the `moments`
    of all updates in the step, summed over all ranks. It is required with whiten_over=step.
    """
    config, estimated = algorithm.advantage, estimate_advantages(algorithm, batches)
    if not config.option("whiten"):
        return estimated
    if config.option("whiten_over") == "update":
        return _whiten(config, estimated, sum_over_replicas(moments(estimated)))
    assert step_moments is not None, "whiten_over=step requires step_moments"
    return _whiten(config, estimated, step_moments)


def estimate_advantages(algorithm: Algorithm, batches: Sequence[AnyBatch]) -> list[AnyBatch]:
    """Return the microbatches with unwhitened advantages, and with returns if the estimator computes them."""
    config, spec = algorithm.advantage, algorithm.advantage.spec
    if isinstance(spec, TokenEstimator):
        return [_estimate_tokens(config, spec, batch) for batch in batches]
    return [_estimate_samples(config, batch) for batch in batches]


def add_distillation(
    batches: Sequence[AnyBatch],
    divergence: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    old_is_rollout: bool,
) -> list[AnyBatch]:
    """Reduce each trained token's advantage by the divergence between the old policy and the teachers. Call it after
    whitening, so that the divergence's scale does not depend on the rewards.

    Args:
        divergence: `kl.distillation` with its options bound.
        old_is_rollout: whether the engine's log-probs are used as the old policy's.
    """
    distilled = []
    for batch in batches:
        old = batch.rollout_logprobs if old_is_rollout else batch.old
        assert old is not None and batch.teachers is not None, "the batch lacks log-probs"
        advantage = advantage_of(batch) - divergence(old, batch.teachers, batch.mask)
        distilled.append(replace(batch, advantage=advantage))
    return distilled


def moments(batches: Sequence[RowBatch]) -> torch.Tensor:
    """Return the count, sum and sum of squares of the advantages, float64 [3], over this rank's tokens in the loss."""
    advantages = torch.cat([advantage_of(batch)[batch.in_loss] for batch in batches]).double()
    return torch.stack((torch.tensor(len(advantages)).to(advantages), advantages.sum(), advantages.square().sum()))


def sum_over_replicas(values: torch.Tensor) -> torch.Tensor:
    """Sum a tensor over the data-parallel ranks, in place. Collective."""
    dist.all_reduce(values, group=parallel_state.get_data_parallel_group())
    return values


def mean_advantages(batch: RowBatch, names: Sequence[str]) -> dict[str, float]:
    """Return sample name -> mean advantage over the sample's trained tokens. Samples without trained tokens are
    omitted. `names` are the sample names in batch order."""
    advantage = advantage_of(batch)
    counts = _sample_sums(batch, torch.ones_like(advantage))
    means = _sample_sums(batch, advantage) / counts
    return {name: mean for name, mean, count in zip(names, means.tolist(), counts.tolist(), strict=True) if count > 0}


def _estimate_samples(config: Advantage, batch: AnyBatch) -> AnyBatch:
    """Estimate advantages by comparing each sample's reward with its baseline.

    With credit=whole, token rewards and the KL are added to the sample's reward. With credit=reward_to_go, token
    rewards have their own baseline and are summed, with discount gamma, from each token to the end of the sample. Turn
    advantages are added.
    """
    reward, rows = batch.reward, batch.row_sample
    token_rewards = torch.zeros_like(batch.rollout_logprobs)
    for rewards in (batch.implicit_reward, batch.process_reward):
        if rewards is None:
            continue
        if config.credits_to_go:
            compared = token_advantages(rewards, rows, batch.token_baseline, batch.token_scale)
            token_rewards = token_rewards + compared
        else:
            reward = reward + _sample_sums(batch, rewards.nan_to_num(nan=0.0))
    if batch.kl_reward is not None and config.credits_to_go:
        token_rewards = token_rewards + batch.kl_reward / batch.scale.float()[rows]
    elif batch.kl_reward is not None:
        reward = reward + _sample_sums(batch, batch.kl_reward)
    advantage = sample_advantages(reward, batch.baseline, batch.scale, config.option("limit"))[rows]
    advantage = advantage + reward_to_go(token_rewards, batch.mask, rows, config.option("gamma"))
    if batch.turn_advantage is not None:
        advantage = advantage + batch.turn_advantage
    return replace(batch, advantage=torch.where(batch.mask, advantage, 0.0))


def _estimate_tokens(config: Advantage, spec: TokenEstimator, batch: AnyBatch) -> AnyBatch:
    """Estimate advantages from token rewards, including the sample's reward on its last trained token, and from the
    critic's values if the estimator uses them."""
    reward = at_last_token(batch.reward.float(), batch.mask, batch.row_sample)
    for rewards in (batch.implicit_reward, batch.process_reward, batch.kl_reward):
        if rewards is not None:
            reward = reward + rewards.nan_to_num(nan=0.0)
    value = {}
    if spec.comparison == "values":
        assert batch.values is not None or not len(reward), f"{spec.name} requires the critic's values"
        value = {"value": reward if batch.values is None else batch.values}
    estimated = spec.estimate(reward, batch.mask, batch.row_sample, **value, **config.options(spec.arguments))
    return replace(batch, advantage=estimated.advantage, returns=estimated.returns)


def _sample_sums(batch: RowBatch, token_rewards: torch.Tensor) -> torch.Tensor:
    return sum_of_sample(token_rewards, batch.mask, batch.row_sample, len(batch.reward))


def _whiten(config: Advantage, batches: Sequence[AnyBatch], total_moments: torch.Tensor) -> list[AnyBatch]:
    count, total, squares = total_moments.tolist()
    mean, std = mean_and_std(count, total, squares, config.option("whiten_std"))
    epsilon = config.option("whiten_epsilon")
    return [replace(batch, advantage=whiten(advantage_of(batch), batch.mask, mean, std, epsilon)) for batch in batches]
