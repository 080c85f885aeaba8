"""Selects the tokens that an objective treats separately. The selection covers all microbatches and ranks in an update
and is made before the first microbatch."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megarl.algorithms.covariance import covariance
from megarl.config.algorithm_schema import Algorithm
from megarl.core.token_batch import TokenBatch
from megarl.core.types import SampleRef


def with_selection(
    algorithm: Algorithm, batches: Sequence[TokenBatch], members: Sequence[Sequence[SampleRef]]
) -> list[TokenBatch]:
    """Return this rank's microbatches with the `selected` mask set.

    Of the tokens in the update's loss, select the fraction `covariance_share` with the highest selection keys, and at
    least one token. Tokens that tie with the last one selected are included. Tokens whose keys differ by less than the
    rounding error may be selected under one layout but not under another. Collective over the data-parallel ranks.
    `members` holds the samples in each microbatch.
    """
    objective, selection = algorithm.objective, algorithm.objective.spec.selection
    olds = [batch.rollout_logprobs if algorithm.correction.old == "rollout" else batch.old for batch in batches]
    assert all(old is not None for old in olds), "the batches lack old log-probs"
    count, mean_old, mean_advantage = _means(batches, olds)
    orders = []
    for batch, old, samples in zip(batches, olds, members, strict=True):
        covariances = covariance(old, batch.advantage, mean_old, mean_advantage)
        draw = torch.cat([torch.empty(0), *(_draw(item) for item in samples)]).to(covariances.device)
        order = selection.order(covariances, draw, **objective.options(selection.arguments))
        orders.append(torch.where(batch.in_loss, order, -torch.inf))
    number = max(int(objective.option("covariance_share") * count), 1)
    least = _kth_largest(torch.cat(orders), number)
    return [
        replace(batch, selected=(order >= least) & (order > -torch.inf))
        for batch, order in zip(batches, orders, strict=True)
    ]


def _means(batches: Sequence[TokenBatch], olds: Sequence[torch.Tensor]) -> tuple[int, float, float]:
    """Return the number of tokens in the update's loss, and their mean old log-prob and mean advantage."""
    sums = torch.zeros(3, dtype=torch.float64, device=batches[0].mask.device)
    for batch, old in zip(batches, olds, strict=True):
        sums += torch.stack([x[batch.in_loss].double().sum() for x in (torch.ones_like(old), old, batch.advantage)])
    dist.all_reduce(sums, group=parallel_state.get_data_parallel_group())
    count, old, advantage = sums.tolist()
    return int(count), old / max(count, 1), advantage / max(count, 1)


def _draw(item: SampleRef) -> torch.Tensor:
    """Return one random number per response token, float32 [R]. The numbers depend only on the sample's name, so they
    are the same under every layout."""
    generator = torch.Generator().manual_seed(zlib.crc32(item.sample.id.encode()))
    return torch.rand(len(item.sample.response_ids), generator=generator)


def _kth_largest(values: torch.Tensor, k: int) -> torch.Tensor:
    """Return the k-th largest value over the data-parallel ranks, or −∞ if there are fewer than k values.
    Collective."""
    largest = torch.full((k,), -torch.inf, device=values.device)
    top = values.topk(min(k, len(values))).values
    largest[: len(top)] = top
    process_group = parallel_state.get_data_parallel_group()
    all_largest = largest.new_empty(dist.get_world_size(process_group) * k)
    dist.all_gather_into_tensor(all_largest, largest, group=process_group)
    return all_largest.topk(k).values[-1]
