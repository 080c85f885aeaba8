"""Selects the tokens that an objective treats separately. The selection covers all microbatches and ranks in an update
and is made before the first microbatch."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megarl.algorithms.relative import covariance
from megarl.algorithms.specs import PolicyObjective
from megarl.config.algorithm_schema import Algorithm
from megarl.core.sample import SampleRef
from megarl.core.token_batch import TokenBatch
from megarl.megatron.advantages import sum_over_replicas
from megarl.megatron.losses import advantage_of


def with_selection(
    algorithm: Algorithm, batches: Sequence[TokenBatch], members: Sequence[Sequence[SampleRef]], epoch: int = 0
) -> list[TokenBatch]:
    """Return this rank's microbatches with the `selected` mask set.

    Select the fraction `covariance_share` of the tokens in the update's loss, but at least one token, in descending
    order of their selection keys. Tokens that tie with the last one selected are included. Tokens whose keys differ by
    less than the rounding error may be selected under one layout but not under another. Collective over the
    data-parallel ranks. `members` holds the samples in each microbatch. `epoch` counts the step's epochs from 0; each
    epoch draws different tokens.
    """
    objective, spec = algorithm.objective, algorithm.objective.spec
    assert isinstance(spec, PolicyObjective) and spec.selection is not None, f"{spec.name} selects no tokens"
    olds = [_old(algorithm, batch) for batch in batches]
    count, mean_old, mean_advantage = _means(batches, olds)
    orders = []
    for batch, old, samples in zip(batches, olds, members, strict=True):
        covariances = covariance(old, advantage_of(batch), mean_old, mean_advantage)
        draw = torch.cat([torch.empty(0), *(_draw(item, epoch) for item in samples)]).to(covariances.device)
        order = spec.selection.order(covariances, draw, **objective.options(spec.selection.arguments))
        orders.append(torch.where(batch.in_loss, order, -torch.inf))
    share = Fraction(repr(objective.option("covariance_share")))  # exact, because in floats 0.29 · 100 < 29
    number = max(int(share * count), 1)
    least = _kth_largest(torch.cat(orders), number)
    return [
        replace(batch, selected=(order >= least) & (order > -torch.inf))
        for batch, order in zip(batches, orders, strict=True)
    ]


def _old(algorithm: Algorithm, batch: TokenBatch) -> torch.Tensor:
    if algorithm.correction.old == "rollout":
        return batch.rollout_logprobs
    assert batch.old is not None, "the batches lack old log-probs"
    return batch.old


def _means(batches: Sequence[TokenBatch], olds: Sequence[torch.Tensor]) -> tuple[int, float, float]:
    """Return the number of tokens in the update's loss, and their mean old log-prob and mean advantage."""
    sums = torch.zeros(3, dtype=torch.float64, device=batches[0].mask.device)
    for batch, old in zip(batches, olds, strict=True):
        values = torch.ones_like(old), old, advantage_of(batch)
        sums += torch.stack([x[batch.in_loss].double().sum() for x in values])
    sum_over_replicas(sums)
    count, old, advantage = sums.tolist()
    return int(count), old / max(count, 1), advantage / max(count, 1)


def _draw(item: SampleRef, epoch: int) -> torch.Tensor:
    """Return one random number per response token, float32 [R]. The numbers depend only on the sample's name and the
    epoch, so they are the same under every layout."""
    name = f"{item.sample.id} {epoch}" if epoch else item.sample.id
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.rand(len(item.sample.response_ids), generator=generator)


def _kth_largest(values: torch.Tensor, k: int) -> torch.Tensor:
    """Return the k-th largest value over the data-parallel ranks, or −∞ if there are fewer. Collective."""
    largest = torch.full((k,), -torch.inf, device=values.device)
    top = values.topk(min(k, len(values))).values
    largest[: len(top)] = top
    all_largest = largest.new_empty(parallel_state.get_data_parallel_world_size() * k)
    dist.all_gather_into_tensor(all_largest, largest, group=parallel_state.get_data_parallel_group())
    return all_largest.topk(k).values[-1]
