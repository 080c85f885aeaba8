"""The selection of an update's tokens that an objective treats apart, over all of its microbatches and ranks, before
the first of them is trained on."""

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
from megarl.core.types import TrainingSample


def with_selection(
    algorithm: Algorithm, batches: Sequence[TokenBatch], members: Sequence[Sequence[TrainingSample]]
) -> list[TokenBatch]:
    """Return the microbatches of this rank with `selected`: of all tokens of the update that have a loss the
    covariance_share that its objective orders highest, at least one, and those equal to the last of them.

    There are collectives over the data-parallel ranks: all of them call this. Two tokens whose order differs by less
    than the rounding between two layouts may be chosen in one and not in the other.

    members: the samples of each microbatch
    """
    objective, selection = algorithm.objective, algorithm.objective.spec.selection
    olds = [batch.rollout_logprobs if algorithm.correction.old == "rollout" else batch.old for batch in batches]
    assert all(old is not None for old in olds), "the batches have no old log-probs"
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
    """Return number, mean old log-prob and mean advantage of the update's tokens that have a loss."""
    sums = torch.zeros(3, dtype=torch.float64, device=batches[0].mask.device)
    for batch, old in zip(batches, olds, strict=True):
        sums += torch.stack([x[batch.in_loss].double().sum() for x in (torch.ones_like(old), old, batch.advantage)])
    dist.all_reduce(sums, group=parallel_state.get_data_parallel_group())
    count, old, advantage = sums.tolist()
    return int(count), old / max(count, 1), advantage / max(count, 1)


def _draw(item: TrainingSample) -> torch.Tensor:
    """Return random numbers, float32 [R], that follow from the sample's name alone and are the same in every
    layout."""
    generator = torch.Generator().manual_seed(zlib.crc32(item.sample.id.encode()))
    return torch.rand(len(item.sample.response_ids), generator=generator)


def _kth_largest(values: torch.Tensor, k: int) -> torch.Tensor:
    """Return the k-th largest of the data-parallel ranks' values together; −∞ if there are fewer."""
    largest = torch.full((k,), -torch.inf, device=values.device)
    top = values.topk(min(k, len(values))).values
    largest[: len(top)] = top
    group = parallel_state.get_data_parallel_group()
    all_largest = largest.new_empty(dist.get_world_size(group) * k)
    dist.all_gather_into_tensor(all_largest, largest, group=group)
    return all_largest.topk(k).values[-1]
