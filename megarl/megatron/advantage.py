"""Advantages of an update's microbatches, where the tokens are: before the first of them is trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megarl.algorithms import advantages
from megarl.batch import TokenBatch
from megarl.config.schema import Advantage


def with_advantages(config: Advantage, batches: Sequence[TokenBatch]) -> list[TokenBatch]:
    """The microbatches of this rank with their advantage; with gae also their returns, which the critic learns.

    Whitening has a collective over the data-parallel ranks: all of them call this.
    """
    estimated = [_estimate(config, batch) for batch in batches]
    return _whitened(config, estimated) if config.whiten else estimated


def _estimate(config: Advantage, batch: TokenBatch) -> TokenBatch:
    if config.estimator == "grpo":
        per_sample = advantages.grpo(batch.reward, batch.group_mean, batch.group_std, config.std_epsilon)
        return replace(batch, advantage=per_sample[batch.row_sample])
    reward = advantages.at_last_token(batch.reward, batch.mask, batch.row_sample)
    for of_tokens in (batch.token_reward, batch.process_reward):
        if of_tokens is not None:
            reward = reward + of_tokens
    assert batch.values is not None or not len(reward), "gae needs the critic's values"
    values = reward if batch.values is None else batch.values
    advantage, returns = advantages.gae(reward, values, batch.mask, batch.row_sample, config.gamma, config.gae_lambda)
    return replace(batch, advantage=advantage, returns=returns)


def _whitened(config: Advantage, batches: Sequence[TokenBatch]) -> list[TokenBatch]:
    trained = torch.cat([batch.advantage[batch.mask] for batch in batches]).double()
    moments = torch.stack((torch.tensor(len(trained)).to(trained), trained.sum(), trained.square().sum()))
    dist.all_reduce(moments, group=parallel_state.get_data_parallel_group())
    mean, std = advantages.mean_and_std(*moments.tolist(), config.std)
    return [
        replace(batch, advantage=advantages.whiten(batch.advantage, batch.mask, mean, std, config.std_epsilon))
        for batch in batches
    ]
