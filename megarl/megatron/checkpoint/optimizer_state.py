"""Saves optimizer state to checkpoints that load under any layout. Every rank writes and reads only its own range.

Megatron keeps the state in flat buckets, each split evenly over the data-parallel ranks, so a rank owns a range of
elements in a flattened parameter. In the checkpoint the state is a tensor of the parameter's shape. The range consists
of a few rectangles in that tensor. The rank writes only these rectangles. On loading, it reads only its own rectangles,
whichever layout wrote them. Parameter weights are written and read in the same ranges, which spreads the work over all
ranks; the remaining ranges are then all-gathered, as after an update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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
"""Megatron's names for the main weights and AdamW's two moments, all float32."""

MOMENTUM = "momentum_buffer"
"""Name of Muon's momentum, float32. It replaces the moments of the parameters that Muon updates."""

WEIGHT = "weight"
"""Name of the model weights, which may have lower precision than the main weights."""

PREFIX = "optimizer.state."


OnDevice = Callable[[Iterable[torch.Tensor]], AbstractContextManager[None]]
"""Function that returns a context in which the given tensors are on the device, such as Offload.on_device."""


@torch.no_grad()
def sharded(
    optimizer: MegatronOptimizer, models: Mapping[torch.Tensor, Shard], on_device: OnDevice
) -> dict[str, ShardedTensor]:
    """Return the tensors that this rank writes for the trained parameters, copied to host memory: the weights and
    optimizer state in its ranges. `models` holds the sharding description of each parameter, and `on_device` brings a
    parameter's offloaded state to the device while it is read."""
    written: dict[str, ShardedTensor] = {}
    for owned in owned_ranges(optimizer):
        shard = models[owned.parameter]
        # A replica_id is (pipeline stage, tensor-parallel rank, data-parallel rank).
        if is_main_replica(shard.replica_id[:2]):  # pyright: ignore[reportIndexIssue]  # never an int here
            with on_device(owned.state()):
                state = owned.values()
                values = {"": owned.weight()}
                values |= {f"{PREFIX}{key}.": state[key].float() for key in owned.keys}
                copied = {prefix: part.to("cpu", copy=True) for prefix, part in values.items()}
            for prefix, part in copied.items():
                for extent in owned.extents(shard, prefix):
                    written[extent.name] = _sharded_tensor(extent, owned.view(part, extent.rectangle))
    return written


def trained_parameters(optimizer: MegatronOptimizer) -> set[torch.Tensor]:
    """Return the parameters that the optimizer updates on any of its data-parallel ranks."""
    buffers = (buffer for part in parts_of(optimizer) for buffer in part.buffers)
    return {parameter for buffer in buffers for parameter in buffer.param_index_map}


@torch.no_grad()
def restore(
    optimizer: MegatronOptimizer,
    models: Mapping[torch.Tensor, Shard],
    num_updates: int,
    folder: Path,
    stored_keys: set[str],
) -> None:
    """Load the weights and optimizer state in this rank's ranges. Collective over all ranks. Raise a UserError if the
    checkpoint's parameters do not match the trained parameters.

    Args:
        num_updates: number of updates before the state was stored.
        stored_keys: keys of all trained weights and their state in the checkpoint.
    """
    initialize(optimizer)
    extents = [
        (owned, {name: owned.extents(models[owned.parameter], prefix) for name, prefix in owned.prefixes.items()})
        for owned in owned_ranges(optimizer)
    ]
    rank_keys = {extent.key for _, states in extents for parts in states.values() for extent in parts}
    _reject_other_keys(folder, rank_keys, stored_keys)
    trained = trained_parameters(optimizer)
    with TorchDistFolder(folder) as stored:
        for shard in (shard for parameter, shard in models.items() if parameter in trained):
            _reject_other_shape(folder, shard, stored)
        for owned, states in extents:
            tensors = {name: owned.read(stored, parts) for name, parts in states.items()}
            owned.set_values(tensors, num_updates)
    set_count(optimizer, num_updates)


def initialize(optimizer: MegatronOptimizer) -> None:
    """Create the momentum and the moments, which the first update would otherwise create."""
    for owned in owned_ranges(optimizer):
        if owned.uses_muon and MOMENTUM not in owned.optimizer_state:
            owned.optimizer_state[MOMENTUM] = torch.zeros_like(owned.main)
    for part in parts_of(optimizer):
        part.init_state_fn(part.optimizer, part.config)  # skips parameters that have state


@dataclass(frozen=True, slots=True)
class OwnedRange:
    """The range of a flattened parameter whose state this rank holds in one optimizer part."""

    part: DistributedOptimizer
    parameter: torch.nn.Parameter
    start: int
    stop: int

    @property
    def uses_muon(self) -> bool:
        return getattr(self.parameter, "uses_muon", False)

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of the range's main weights and optimizer state."""
        return ("param", MOMENTUM) if self.uses_muon else KEYS

    @property
    def prefixes(self) -> dict[str, str]:
        """Name of each stored tensor of the range -> prefix of its checkpoint keys."""
        return {WEIGHT: ""} | {key: f"{PREFIX}{key}." for key in self.keys}

    @property
    def param_group(self) -> dict[str, Any]:
        """The optimizer's parameter group that contains the main weights."""
        index, _ = self.part.model_param_group_index_map[self.parameter]
        return self.part.optimizer.param_groups[index]

    @property
    def main(self) -> torch.Tensor:
        """The main weights, flat."""
        _, number = self.part.model_param_group_index_map[self.parameter]
        return self.param_group["params"][number]

    @property
    def optimizer_state(self) -> dict[str, Any]:
        """Megatron's state dictionary for the range's main weights; created empty if missing."""
        return self.part.optimizer.state[self.main]

    def state(self) -> list[torch.Tensor]:
        """Return all optimizer tensors for the range."""
        state = self.part.optimizer.state.get(self.main, {}).values()
        return [self.main, *(value for value in state if isinstance(value, torch.Tensor))]

    def values(self) -> Mapping[str, torch.Tensor]:
        """Return the range's main weights and optimizer state by name. Before the first update the moments do not
        exist, so zeros are returned; they are on the host because an engine may occupy the device."""
        if self.part.optimizer.state:
            return self.part._get_main_param_and_optimizer_states(self.parameter)
        main_key, *others = self.keys
        return {main_key: self.main} | {key: torch.zeros(self.main.shape) for key in others}

    def weight(self) -> torch.Tensor:
        """Return the range's model weights, without copying."""
        return self.parameter.view(-1)[self.start : self.stop]

    def set_values(self, tensors: Mapping[str, torch.Tensor], num_updates: int) -> None:
        """Set the range's weights and state, given by name."""
        self.weight().copy_(tensors[WEIGHT])
        state = {key: tensors[key] for key in self.keys}
        if kernels.adam() == kernels.TORCH_ADAM:
            state["step"] = torch.tensor(float(num_updates))  # Megatron expects every state entry
        self.part._set_main_param_and_optimizer_states(self.parameter, state)

    def extents(self, shard: Shard, prefix: str) -> list[Extent]:
        """Return the extents that make up the range. `prefix` is prepended to the parameter's key."""
        spans = flat_span(tuple(self.parameter.shape), self.start, self.stop)
        parts = [extent.of(span) for extent in extents_of(shard, shard.key) for span in spans]
        return [replace(extent, key=prefix + extent.key) for extent in parts if extent is not None]

    def view(self, values: torch.Tensor, rectangle: Rectangle) -> torch.Tensor:
        """Return the part of the range's values that lies in a rectangle of the parameter."""
        strides = self.parameter.stride()
        first = sum(start * stride for (start, _), stride in zip(rectangle, strides, strict=True))
        return values.as_strided(shape_of(rectangle), strides, values.storage_offset() + first - self.start)

    def read(self, stored: TorchDistFolder, extents: list[Extent]) -> torch.Tensor:
        """Read the range's values from a checkpoint. Padding that the checkpoint lacks is 0."""
        values = torch.zeros(self.stop - self.start)
        for extent in extents:
            part = extent.within(whole(stored.tensors[extent.key].shape))
            if part is not None:
                view = self.view(values, part.rectangle)
                view.copy_(stored.read(part.key, part.place).view(view.shape))
        return values


def owned_ranges(optimizer: MegatronOptimizer) -> Iterator[OwnedRange]:
    """Yield this rank's ranges of all trained parameters, always in the same order."""
    for part in parts_of(optimizer):
        for ranges_by_dtype in part.gbuf_ranges:
            [buckets] = ranges_by_dtype.values()
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    yield OwnedRange(part, parameter, ranges["param"].start, ranges["param"].end)


def _sharded_tensor(extent: Extent, values: torch.Tensor) -> ShardedTensor:
    shape = shape_of(extent.place)
    return ShardedTensor(
        key=extent.key,
        data=values.reshape(shape),
        dtype=values.dtype,
        local_shape=shape,
        global_shape=extent.global_shape,
        global_offset=extent.offset,
        axis_fragmentations=None,  # ranks write parts of different shapes
    )


def _reject_other_keys(folder: Path, rank_keys: set[str], stored: set[str]) -> None:
    """Raise a UserError on all ranks unless the union of their keys equals the stored keys."""
    keys_by_rank: list[set[str]] = [set()] * dist.get_world_size()
    dist.all_gather_object(keys_by_rank, rank_keys, group=parallel.host_group())
    if differing := set().union(*keys_by_rank) ^ stored:
        raise UserError(
            f"{folder}: checkpoint of a different model: only one of the two models has {min(differing)}. Fix: resume "
            "from a checkpoint of this model"
        )


def _reject_other_shape(folder: Path, shard: Shard, stored: TorchDistFolder) -> None:
    """Raise a UserError if a parameter is stored with a different shape. All ranks that hold the parameter check it,
    not only those that own a range; otherwise the remaining ranks would wait in the all-gather."""
    for extent in extents_of(shard, shard.key):
        shape, expected = stored.tensors[extent.key].shape, extent.global_shape
        if shape != expected and not extent.resizable:
            raise UserError(
                f"{folder}: checkpoint of a different model: {extent.key} has shape {shape} instead of {expected}. "
                "Fix: resume from a checkpoint of this model"
            )


def set_count(optimizer: MegatronOptimizer, num_updates: int) -> None:
    """Set the update count. torch's AdamW keeps it per parameter; the fused kernels from Transformer Engine and Apex
    keep it per parameter group."""
    for part in parts_of(optimizer):
        if kernels.adam() == kernels.TORCH_ADAM:
            for main, state in part.optimizer.state.items():
                if MOMENTUM not in state:  # Muon has no step
                    # The fused kernel requires the step on the device.
                    state["step"] = torch.tensor(float(num_updates), device=main.device)
        else:
            for param_group in part.optimizer.param_groups:
                param_group["step"] = num_updates
