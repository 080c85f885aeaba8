"""Advantages of an update's microbatches, where the tokens are: before the first of them is trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megarl.algorithms.advantages import relative
from megarl.algorithms.advantages.gae import gae, length_adaptive_lambda
from megarl.algorithms.advantages.returns import at_last_token, sum_of_sample, to_go
from megarl.algorithms.advantages.whitening import mean_and_std, whiten
from megarl.config.schema import Advantage, Algorithm
from megarl.core.types import TokenBatch


def with_advantages(algorithm: Algorithm, batches: Sequence[TokenBatch]) -> list[TokenBatch]:
    """The microbatches of this rank with their advantage; with a critic also their returns, which it learns.

    Whitening has a collective over the data-parallel ranks: all of them call this.
    """
    config = algorithm.advantage
    estimate = _of_values if config.spec.baseline == "values" else _of_tokens if config.spec.by_token else _of_samples
    estimated = [estimate(algorithm, batch) for batch in batches]
    return _whitened(config, estimated) if config.option("whiten") else estimated


def _of_samples(algorithm: Algorithm, batch: TokenBatch) -> TokenBatch:
    """The sample's reward against its baseline; rewards of single tokens are part of it (credit=whole), or are compared
    by themselves and count for what led to them. The KL, too, is one or the other."""
    config = algorithm.advantage
    reward, rows = batch.reward, batch.row_sample
    extra = torch.zeros_like(batch.rollout_logprobs)
    for of_tokens in (batch.implicit_reward, batch.process_reward):
        if of_tokens is None:
            continue
        if config.credits_tokens:
            extra = extra + relative.of_tokens(of_tokens, rows, batch.token_baseline, batch.token_scale)
        else:
            reward = reward + _whole(batch, of_tokens.nan_to_num(nan=0.0))
    if batch.kl_reward is not None and config.credits_tokens:
        extra = extra + batch.kl_reward / batch.scale.float()[rows]
    elif batch.kl_reward is not None:
        reward = reward + _whole(batch, batch.kl_reward)
    advantage = relative.of_samples(reward, batch.baseline, batch.scale)[rows]
    advantage = advantage + to_go(extra, batch.mask, rows, config.option("gamma"))
    return replace(batch, advantage=torch.where(batch.mask, advantage, 0.0))


def _of_tokens(algorithm: Algorithm, batch: TokenBatch) -> TokenBatch:
    gamma = algorithm.advantage.option("gamma")
    return replace(batch, advantage=to_go(_by_token(batch), batch.mask, batch.row_sample, gamma))


def _of_values(algorithm: Algorithm, batch: TokenBatch) -> TokenBatch:
    config = algorithm.advantage
    reward, mask, rows = _by_token(batch), batch.mask, batch.row_sample
    assert batch.values is not None or not len(reward), "gae needs the critic's values"
    values = reward if batch.values is None else batch.values
    alpha, gae_lambda, critic_lambda = (config.option(name) for name in ("length_alpha", "gae_lambda", "critic_lambda"))
    is_policy_objective = gae_lambda if alpha is None else length_adaptive_lambda(mask, rows, alpha)
    if critic_lambda is None and alpha is not None:
        critic_lambda = gae_lambda
    advantage, returns = gae(reward, values, mask, rows, config.option("gamma"), is_policy_objective, critic_lambda)
    return replace(batch, advantage=advantage, returns=returns)


def _by_token(batch: TokenBatch) -> torch.Tensor:
    """float32 [N]: all rewards, the sample's on its last trained token."""
    reward = at_last_token(batch.reward.float(), batch.mask, batch.row_sample)
    for of_tokens in (batch.implicit_reward, batch.process_reward, batch.kl_reward):
        if of_tokens is not None:
            reward = reward + of_tokens.nan_to_num(nan=0.0)
    return reward


def _whole(batch: TokenBatch, of_tokens: torch.Tensor) -> torch.Tensor:
    return sum_of_sample(of_tokens, batch.mask, batch.row_sample, len(batch.reward))


def _whitened(config: Advantage, batches: Sequence[TokenBatch]) -> list[TokenBatch]:
    every = torch.cat([batch.advantage[batch.in_loss] for batch in batches]).double()
    moments = torch.stack((torch.tensor(len(every)).to(every), every.sum(), every.square().sum()))
    dist.all_reduce(moments, group=parallel_state.get_data_parallel_group())
    mean, std = mean_and_std(*moments.tolist(), config.option("std"))
    epsilon = config.option("std_epsilon")
    return [replace(batch, advantage=whiten(batch.advantage, batch.mask, mean, std, epsilon)) for batch in batches]
