"""Advantages of an update's microbatches, computed on the ranks of their tokens before the first is trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megarl.algorithms.relative import sample_advantages, token_advantages
from megarl.algorithms.returns import at_last_token, reward_to_go, sum_of_sample
from megarl.algorithms.specs import TokenEstimator
from megarl.algorithms.whitening import mean_and_std, whiten
from megarl.config.algorithm_schema import Advantage, Algorithm
from megarl.core.token_batch import TokenBatch


def with_advantages(
    algorithm: Algorithm, batches: Sequence[TokenBatch], step_moments: torch.Tensor | None = None
) -> list[TokenBatch]:
    """Return the microbatches of this rank with their advantages; with a critic also their returns, which it learns.

    Whitening over an update has a collective over the data-parallel ranks: all of them call this.

    step_moments   with whiten_over=step: those of all updates of the step, of all ranks
    """
    config, estimated = algorithm.advantage, estimate_advantages(algorithm, batches)
    if not config.option("whiten"):
        return estimated
    if config.option("whiten_over") == "update":
        return _whiten(config, estimated, sum_over_replicas(moments(estimated)))
    assert step_moments is not None, "the moments of the step are not known"
    return _whiten(config, estimated, step_moments)


def estimate_advantages(algorithm: Algorithm, batches: Sequence[TokenBatch]) -> list[TokenBatch]:
    """Return the microbatches with advantages, which are not whitened, and returns."""
    config = algorithm.advantage
    estimate = _estimate_tokens if isinstance(config.spec, TokenEstimator) else _estimate_samples
    return [estimate(config, batch) for batch in batches]


def moments(batches: Sequence[TokenBatch]) -> torch.Tensor:
    """Return number, sum and sum of squares of the advantages of this rank's tokens that have a loss, float64 [3]."""
    every = torch.cat([batch.advantage[batch.in_loss] for batch in batches]).double()
    return torch.stack((torch.tensor(len(every)).to(every), every.sum(), every.square().sum()))


def sum_over_replicas(values: torch.Tensor) -> torch.Tensor:
    """Add up a tensor over the data-parallel ranks, in place: all of them call this."""
    dist.all_reduce(values, group=parallel_state.get_data_parallel_group())
    return values


def mean_advantages(batch: TokenBatch, names: Sequence[str]) -> dict[str, float]:
    """Return the mean advantage over the trained tokens of each sample that has one, by name. names: of the samples,
    in the order of the batch."""
    counts = _sample_sums(batch, torch.ones_like(batch.advantage))
    means = _sample_sums(batch, batch.advantage) / counts
    return {name: mean for name, mean, count in zip(names, means.tolist(), counts.tolist(), strict=True) if count > 0}


def _estimate_samples(config: Advantage, batch: TokenBatch) -> TokenBatch:
    """Compare the sample's reward with its baseline. Rewards of single tokens are part of it (credit=whole), or are
    compared by themselves and count for the tokens up to theirs (credit=reward_to_go). So is the KL."""
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
    advantage = sample_advantages(reward, batch.baseline, batch.scale)[rows]
    advantage = advantage + reward_to_go(token_rewards, batch.mask, rows, config.option("gamma"))
    return replace(batch, advantage=torch.where(batch.mask, advantage, 0.0))


def _estimate_tokens(config: Advantage, batch: TokenBatch) -> TokenBatch:
    """Estimates advantages from all rewards of tokens, the sample's on its last one, and with a critic from its
    values."""
    reward, spec = _token_rewards(batch), config.spec
    value = {}
    if spec.comparison == "values":
        assert batch.values is not None or not len(reward), f"{spec.name} needs the critic's values"
        value = {"value": reward if batch.values is None else batch.values}
    found = spec.estimate(reward, batch.mask, batch.row_sample, **value, **config.options(spec.arguments))
    return replace(batch, advantage=found.advantage, returns=found.returns)


def _token_rewards(batch: TokenBatch) -> torch.Tensor:
    """Return all rewards of tokens, float32 [N], the sample's on its last trained token."""
    reward = at_last_token(batch.reward.float(), batch.mask, batch.row_sample)
    for rewards in (batch.implicit_reward, batch.process_reward, batch.kl_reward):
        if rewards is not None:
            reward = reward + rewards.nan_to_num(nan=0.0)
    return reward


def _sample_sums(batch: TokenBatch, token_rewards: torch.Tensor) -> torch.Tensor:
    return sum_of_sample(token_rewards, batch.mask, batch.row_sample, len(batch.reward))


def _whiten(config: Advantage, batches: Sequence[TokenBatch], of_all: torch.Tensor) -> list[TokenBatch]:
    mean, std = mean_and_std(*of_all.tolist(), config.option("whiten_std"))
    epsilon = config.option("whiten_epsilon")
    return [replace(batch, advantage=whiten(batch.advantage, batch.mask, mean, std, epsilon)) for batch in batches]
