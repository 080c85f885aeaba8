"""AdamW's state, of which every rank writes and reads its own range, in a checkpoint that loads under any layout.

Megatron keeps it in flat buckets, each split evenly over the data-parallel ranks, so that a rank has a range of the
elements of a parameter, flattened. In the checkpoint the state is a tensor of the parameter's shape. The range is a few
rectangles of it, which the rank writes by itself; and it reads, from whatever rectangles others wrote, those alone. Of
the parameters' weights it writes and reads the same range, so that all ranks write and read alike, and takes the other
ranges from the ranks that have read them, as after an update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megarl.core.errors import UserError
from megarl.megatron import parallel
from megarl.megatron.checkpoint.extents import Shard, extents_of
from megarl.megatron.model import kernels
from megarl.megatron.optimizer import parts_of
from megarl.resharding.checkpoint import Extent
from megarl.resharding.piece import Rectangle, flat_span, shape_of, whole
from megarl.resharding.transports.torch_dist import TorchDistFolder

KEYS = ("param", "exp_avg", "exp_avg_sq")
"""Megatron's names of the main weights and of the moments, all float32."""

WEIGHT = "weight"
"""Our name of the model's own weights, which may have fewer bits than the main weights."""

PREFIX = "optimizer.state."

Parameter = torch.nn.Parameter


OnDevice = Callable[[Iterable[torch.Tensor]], AbstractContextManager[None]]
"""A function that has tensors on the device for as long as its result is entered: Offload.on_device."""


@torch.no_grad()
def sharded(
    optimizer: MegatronOptimizer, models: Mapping[Parameter, Shard], on_device: OnDevice
) -> dict[str, ShardedTensor]:
    """Return what this rank writes of the trained parameters, copied to host memory: weights and state of its ranges.

    models     the parameters' shards
    on_device  has the state of a parameter on the device for as long as it is read, where it is offloaded
    """
    written: dict[str, ShardedTensor] = {}
    for own in _own_ranges(optimizer):
        shard = models[own.parameter]
        # Megatron's replicas are counted by pipeline stage, by tensor-parallel and by data-parallel rank.
        if is_main_replica(shard.replica_id[:2]):
            with on_device(own.state()):
                state = own.values()
                values = {"": own.parameter.flatten()[own.start : own.stop]}
                values |= {f"{PREFIX}{key}.": state[key].float() for key in KEYS}
                copied = {prefix: of_range.to("cpu", copy=True) for prefix, of_range in values.items()}
            for prefix, of_range in copied.items():
                for extent in own.extents(shard, prefix):
                    written[extent.name] = _sharded_tensor(extent, own.view(of_range, extent.rectangle))
    return written


def trained_parameters(optimizer: MegatronOptimizer) -> set[Parameter]:
    """Return the parameters that the optimizer updates, on this rank or on another of its data-parallel group."""
    buffers = (buffer for part in parts_of(optimizer) for buffer in part.buffers)
    return {parameter for buffer in buffers for parameter in buffer.param_index_map}


@torch.no_grad()
def restore(
    optimizer: MegatronOptimizer,
    models: Mapping[Parameter, Shard],
    num_updates: int,
    folder: Path,
    stored_keys: set[str],
) -> None:
    """Load weights and state of this rank's ranges, on all ranks together. Raises UserError for those of other
    parameters.

    num_updates  the number of updates that the state has seen
    stored_keys  the keys of all trained weights and of their state in the checkpoint
    """
    for part in parts_of(optimizer):
        if not part.optimizer.state:  # the first update would make it
            part.init_state_fn(part.optimizer, part.config)
    prefixes = {WEIGHT: ""} | {key: f"{PREFIX}{key}." for key in KEYS}
    extents = [
        (own, {name: own.extents(models[own.parameter], prefix) for name, prefix in prefixes.items()})
        for own in _own_ranges(optimizer)
    ]
    own_keys = {extent.key for _, states in extents for found in states.values() for extent in found}
    _refuse_others(folder, own_keys, stored_keys)
    trained = trained_parameters(optimizer)
    with TorchDistFolder(folder) as stored:
        for shard in (shard for parameter, shard in models.items() if parameter in trained):
            _refuse_other_shape(folder, shard, stored)
        for own, states in extents:
            tensors = {name: own.read(stored, found) for name, found in states.items()}
            own.parameter.view(-1)[own.start : own.stop].copy_(tensors.pop(WEIGHT))
            if kernels.adam() == kernels.TORCH_ADAM:
                tensors["step"] = torch.tensor(float(num_updates))  # Megatron asks for every entry of the state
            own.part._set_main_param_and_optimizer_states(own.parameter, tensors)
    for part in parts_of(optimizer):
        _set_count(part, num_updates)


@dataclass(frozen=True, slots=True)
class OwnRange:
    """The range of a parameter's elements, flattened, whose state this rank has in a part of the optimizer."""

    part: DistributedOptimizer
    parameter: Parameter
    start: int
    stop: int

    def state(self) -> list[torch.Tensor]:
        """Return all that the optimizer has of the range."""
        group, number = self.part.model_param_group_index_map[self.parameter]
        main = self.part.optimizer.param_groups[group]["params"][number]
        state = self.part.optimizer.state.get(main, {}).values()
        return [main, *(value for value in state if isinstance(value, torch.Tensor))]

    def values(self) -> Mapping[str, torch.Tensor]:
        """Return the range's state by KEYS. Before the first update there are no moments: zeros on the host, as an
        engine may be awake on the device."""
        if self.part.optimizer.state:
            return self.part._get_main_param_and_optimizer_states(self.parameter)
        main, *_ = self.state()
        return dict(zip(KEYS, (main, torch.zeros(main.shape), torch.zeros(main.shape)), strict=True))

    def extents(self, shard: Shard, prefix: str) -> list[Extent]:
        """Return the extents that make up the range. prefix: what is before the parameter's key."""
        spans = flat_span(tuple(self.parameter.shape), self.start, self.stop)
        found = [extent.of(span) for extent in extents_of(shard, shard.key) for span in spans]
        return [replace(extent, key=prefix + extent.key) for extent in found if extent is not None]

    def view(self, values: torch.Tensor, rectangle: Rectangle) -> torch.Tensor:
        """Return the part of the range's values that is a rectangle of the parameter."""
        strides = self.parameter.stride()
        first = sum(start * stride for (start, _), stride in zip(rectangle, strides, strict=True))
        return values.as_strided(shape_of(rectangle), strides, first - self.start)

    def read(self, stored: TorchDistFolder, extents: list[Extent]) -> torch.Tensor:
        """Return the range's values from a checkpoint; 0 for a padding that it has not."""
        values = torch.zeros(self.stop - self.start)
        for extent in extents:
            part = extent.within(whole(stored.tensors[extent.key].shape))
            if part is not None:
                view = self.view(values, part.rectangle)
                view.copy_(stored.read(part.key, part.place).view(view.shape))
        return values


def _own_ranges(optimizer: MegatronOptimizer) -> Iterator[OwnRange]:
    for part in parts_of(optimizer):
        for ranges_by_dtype in part.gbuf_ranges:
            [buckets] = ranges_by_dtype.values()
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    yield OwnRange(part, parameter, ranges["param"].start, ranges["param"].end)


def _sharded_tensor(extent: Extent, values: torch.Tensor) -> ShardedTensor:
    shape = shape_of(extent.place)
    return ShardedTensor(
        key=extent.key,
        data=values.reshape(shape),
        dtype=values.dtype,
        local_shape=shape,
        global_shape=extent.global_shape,
        global_offset=extent.offset,
        axis_fragmentations=None,  # the others' parts have other shapes
    )


def _refuse_others(folder: Path, own: set[str], stored: set[str]) -> None:
    """Raise UserError on all ranks where the ranks' states together are not those that are stored."""
    of_ranks: list[set[str]] = [set()] * dist.get_world_size()
    dist.all_gather_object(of_ranks, own, group=parallel.host_group())
    if differing := set().union(*of_ranks) ^ stored:
        raise UserError(f"{folder}: it is the checkpoint of another model: {min(differing)} is in one only")


def _refuse_other_shape(folder: Path, shard: Shard, stored: TorchDistFolder) -> None:
    """Raise UserError where a parameter is stored in another shape. All ranks that have the parameter look at it, not
    only those with a range of it: the others would wait for their part."""
    for extent in extents_of(shard, shard.key):
        found, expected = stored.tensors[extent.key].shape, extent.global_shape
        if found != expected and not extent.resizable:
            raise UserError(
                f"{folder}: it is the checkpoint of another model: {extent.key} has shape {found}, not {expected}"
            )


def _set_count(part: DistributedOptimizer, num_updates: int) -> None:
    """Set the count of updates: torch's AdamW has it by parameter, the fused kernels of Transformer Engine and Apex by
    group."""
    if kernels.adam() == kernels.TORCH_ADAM:
        for state in part.optimizer.state.values():
            state["step"] = torch.tensor(float(num_updates))
    else:
        for group in part.optimizer.param_groups:
            group["step"] = num_updates
