"""AdamW's state in the shapes of the model's parameters, so that a checkpoint of it loads under any layout.

Megatron keeps it in flat buckets, each split evenly over the data-parallel ranks. Its own conversion copies everything
several times, and reads parameters after a bucket with padding at its end from the wrong place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megarl.megatron.model import kernels
from megarl.megatron.optimizer import parts_of

KEYS = ("param", "exp_avg", "exp_avg_sq")
"""Megatron's names of the main weights and of the moments, all float32."""

Parameter = torch.nn.Parameter
Shard = ShardedTensor | ShardedTensorFactory

Lent = Callable[[Iterable[torch.Tensor]], AbstractContextManager[None]]
"""A function that has tensors on the device for as long as its result is entered: Offload.lent."""


@torch.no_grad()
def sharded(
    optimizer: MegatronOptimizer, models: Mapping[Parameter, Shard], is_loading: bool, lent: Lent = nullcontext
) -> dict[int, dict[str, Shard]]:
    """Returns the sharded state, by the number of the parameter on this rank. All ranks call this together.

    models   the parameters' shards
    lent     has the state of a parameter on the device for as long as it is read, where it is offloaded

    For saving, the state is copied to the host memory of one rank of each data-parallel group, and the others have
    none. For loading, every rank has tensors for all of it.
    """
    return {
        number: {
            key: sharded_like(models[parameter], f"optimizer.state.{key}", tensor) for key, tensor in tensors.items()
        }
        for number, (parameter, tensors) in enumerate(_whole_tensors(optimizer, is_loading, lent))
    }


@torch.no_grad()
def restore(optimizer: MegatronOptimizer, states: Mapping[int, Mapping[str, torch.Tensor]], num_updates: int) -> None:
    """Takes this rank's part of the loaded states. num_updates: the number of updates that the state has seen."""
    numbers = count()
    for bucket in _buckets(optimizer):
        for parameter in bucket.places:
            number = next(numbers)
            if parameter in bucket.own:
                ours = bucket.own[parameter]["param"]
                tensors = {key: states[number][key].flatten()[ours.start : ours.end] for key in KEYS}
                if kernels.adam() == kernels.TORCH_ADAM:
                    tensors["step"] = torch.tensor(float(num_updates))  # Megatron asks for every entry of the state
                bucket.part._set_main_param_and_optimizer_states(parameter, tensors)
    for part in parts_of(optimizer):
        _set_count(part, num_updates)


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket of a part of the optimizer.

    num_elements   its elements, padding included
    places         the places of the parameters among them
    own            Megatron's description of the parts of parameters that this rank has
    """

    part: DistributedOptimizer
    num_elements: int
    places: dict[Parameter, slice]
    own: Mapping[Parameter, Mapping[str, Any]]

    def gather(self, key: str, lent: Lent) -> torch.Tensor | None:
        """Gathers all elements of one kind of state on the first rank of the data-parallel group: float32 on the host,
        None on the other ranks."""
        group = self.part.data_parallel_group_gloo
        shard = torch.empty(self.num_elements // group.size())
        for parameter, ranges in self.own.items():
            with lent(self._state(parameter)):
                state = self.part._get_main_param_and_optimizer_states(parameter)[key]
                shard[ranges["gbuf_local"].start : ranges["gbuf_local"].end].copy_(state)
        if group.size() == 1:
            return shard
        whole = torch.empty(self.num_elements) if group.rank() == 0 else None
        parts = None if whole is None else list(whole.chunk(group.size()))
        dist.gather(shard, parts, group=group, group_dst=0)
        return whole

    def _state(self, parameter: Parameter) -> list[torch.Tensor]:
        """Returns all that the optimizer has of this rank's part of a parameter."""
        group, number = self.part.model_param_group_index_map[parameter]
        main = self.part.optimizer.param_groups[group]["params"][number]
        state = self.part.optimizer.state[main].values()
        return [main, *(value for value in state if isinstance(value, torch.Tensor))]


def _buckets(optimizer: MegatronOptimizer) -> Iterator[Bucket]:
    """Yields all buckets, in the same order every time."""
    for part in parts_of(optimizer):
        if not part.optimizer.state:  # the first update would make it
            part.init_state_fn(part.optimizer, part.config)
            _set_count(part, 0)
        for buffer, ranges_by_dtype in zip(part.buffers, part.gbuf_ranges, strict=True):
            [ranges] = ranges_by_dtype.values()
            for bucket, bucket_ranges in zip(buffer.buckets, ranges, strict=True):
                places = {
                    parameter: slice(start - bucket.offset, end - bucket.offset)
                    for parameter, (start, end, bucket_id) in buffer.param_index_map.items()
                    if bucket_id == bucket.bucket_id
                }
                yield Bucket(part, bucket.grad_data.numel(), places, bucket_ranges["param_map"])


def _whole_tensors(
    optimizer: MegatronOptimizer, is_loading: bool, lent: Lent
) -> Iterator[tuple[Parameter, dict[str, torch.Tensor]]]:
    for bucket in _buckets(optimizer):
        whole = {key: torch.empty(bucket.num_elements) if is_loading else bucket.gather(key, lent) for key in KEYS}
        if all(tensor is not None for tensor in whole.values()):
            for parameter, place in bucket.places.items():
                yield parameter, {key: tensor[place].view(parameter.shape) for key, tensor in whole.items()}


def sharded_like(model: Shard, prefix: str, tensor: torch.Tensor) -> Shard:
    """Returns the tensor sharded as the model's parameter is, under the parameter's key with the prefix."""
    changes: dict[str, Any] = {"key": f"{prefix}.{model.key}", "data": tensor}
    if isinstance(model, ShardedTensor):  # a factory, which splits a tensor into several, has no dtype of its own
        changes["dtype"] = tensor.dtype
    return replace(model, **changes)


def _set_count(part: DistributedOptimizer, num_updates: int) -> None:
    """Sets the count of updates: torch's AdamW has it by parameter, the fused kernels of Transformer Engine and Apex by
    group."""
    if kernels.adam() == kernels.TORCH_ADAM:
        for state in part.optimizer.state.values():
            state["step"] = torch.tensor(float(num_updates))
    else:
        for group in part.optimizer.param_groups:
            group["step"] = num_updates
