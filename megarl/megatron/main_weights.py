"""The float32 main weights of parameters of two bytes: where training begins, and how much of an update arrives.

bfloat16 rounds all values of a cell to one, about 2⁻⁸ of a weight wide. A main weight that begins as a copy of its
parameter is in the middle of its cell, and at the learning rates of reinforcement learning stays inside for many
updates: of a first update at 1e-5, 2 % of SmolLM2's parameters change, those that are near 0. Cells of float16 are an
eighth as wide.

Weights that the checkpoint has in float32 are taken from there. Of the others nobody knows where in its cell a weight
was, so that each begins at a random place of it, all equally likely. A step s then leaves a cell of width w with
probability s / w, and moves the parameter by w: by s on average, from the first update on. The forward pass is bit by
bit the same, as every main weight still rounds to its parameter.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterator, Mapping

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megarl.megatron.optimizer import parts_of
from megarl.resharding.piece import Holder, Rectangle
from megarl.resharding.transports.transport import view

CHUNK = 2**20
"""The elements that are placed at once: more would only take memory."""


def rounded_parameters(
    optimizer: MegatronOptimizer, parameters: Mapping[str, torch.nn.Parameter]
) -> dict[str, torch.nn.Parameter]:
    """Return those of the parameters of which this rank has main weights of another dtype, wholly or in part."""
    rounded = {parameter for part in parts_of(optimizer) for _, parameter, _ in _main_weights(part)}
    return {name: parameter for name, parameter in parameters.items() if parameter in rounded}


@torch.no_grad()
def begin_main_weights(
    optimizer: MegatronOptimizer,
    parameters: Mapping[str, torch.nn.Parameter],
    holder: Holder,
    exact: Collection[str],
) -> None:
    """Set the main weights of this rank, before the first update.

    parameters   those of `rounded_parameters`. Their main_grad, which nothing needs before, has the values.
    holder       this rank's, by which places follow from tensors: they are the same under every layout
    exact        those of which it has the values already that they are rounded from
    """
    inexact = {name: parameter for name, parameter in parameters.items() if name not in exact}
    for parameter in inexact.values():
        parameter.main_grad.copy_(parameter)
    for piece in holder.pieces:
        if piece.canonical is not None and piece.local in inexact:
            values = view(inexact[piece.local].main_grad, piece.local_rectangle)
            _place(values, inexact[piece.local].dtype, piece.canonical, piece.canonical_rectangle)
    for part in parts_of(optimizer):
        for main, parameter, own in _main_weights(part):
            main.copy_(parameter.main_grad.flatten()[own])


def _place(values: torch.Tensor, dtype: torch.dtype, tensor: str, rectangle: Rectangle) -> None:
    """Move values of the dtype, in place and in float32, each to a place of its cell that follows from where it is in
    the canonical tensor."""
    (start, _), *others = rectangle
    rows = max(1, CHUNK * len(values) // max(1, values.numel()))
    for number, part in enumerate(values.split(rows)):
        first = start + number * rows
        share = _shares(_levels(dtype), tensor, ((first, first + len(part)), *others), values.device)
        bits = part.to(dtype).view(torch.int16)
        outward = (bits + 1).view(dtype).float() - part  # to the neighbour on the side away from 0
        inward = part - (bits - 1).view(dtype).float()
        # Near 0 there is a value for every step, and a 0 may be one that has no gradient, such as padding.
        part.add_((share * outward.where(share > 0, inward)).where(part != 0, 0))


def _levels(dtype: torch.dtype) -> int:
    """Return the number of places in a cell, 2¹⁵ or 2¹². float32 has 16 bits more than bfloat16, and 13 more than
    float16: at an odd number of 2⁻¹⁶ or 2⁻¹³ of the distance to a neighbour, a place is exact, and never between two
    cells."""
    return round(torch.finfo(dtype).eps / torch.finfo(torch.float32).eps) // 2


def _shares(levels: int, tensor: str, rectangle: Rectangle, device: torch.device) -> torch.Tensor:
    """Return a random number in (−½, ½) for each element, by a hash of its place and of the tensor's name."""
    mixed = torch.full((), zlib.crc32(tensor.encode()), dtype=torch.int64, device=device)
    for start, stop in rectangle:
        mixed = mixed.unsqueeze(-1) * -0x61C8864680B583EB + torch.arange(start, stop, device=device)
    for factor in (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15):  # SplitMix64's
        mixed = (mixed ^ (mixed >> 30)).mul_(factor)
    return ((mixed >> 32) & (levels - 1)).float().add_(0.5).div_(levels).sub_(0.5)


class ChangedShare:
    """Counts the elements that updates change in the parameters, which round what their main weights add up."""

    def __init__(self, optimizer: MegatronOptimizer, device: torch.device):
        self._counts = torch.zeros(2, dtype=torch.int64, device=device)
        """The elements that have changed, and those that could have."""
        for part in parts_of(optimizer):
            # Megatron's name of the end of an update, at which the parameters are still as they were.
            part._copy_main_params_to_model_params = self._after_count(part, part._copy_main_params_to_model_params)

    def take(self) -> float | None:
        """Return the share since the last call, over all ranks, who call this together; None where no parameter is
        rounded."""
        dist.all_reduce(self._counts)
        changed, total = self._counts.tolist()
        self._counts.zero_()
        return changed / total if total else None

    def _after_count(self, part: DistributedOptimizer, copy: Callable[[], None]) -> Callable[[], None]:
        @torch.no_grad()
        def count_and_copy() -> None:
            for main, parameter, own in _main_weights(part):
                before = parameter.view(-1)[own]
                self._counts[0] += (main.to(before.dtype) != before).count_nonzero()
                self._counts[1] += main.numel()
            copy()

        return count_and_copy


def _main_weights(part: DistributedOptimizer) -> Iterator[tuple[torch.Tensor, torch.nn.Parameter, slice]]:
    """Yield the main weights that an optimizer has beside its parameters, flat; the parameter; and the elements of it,
    flattened, that they are of."""
    for mains, parameters in zip(part.shard_fp32_from_float16_groups, part.model_float16_groups, strict=True):
        for main, parameter in zip(mains, parameters, strict=True):
            if main is not None:  # a precision-aware optimizer keeps them inside its kernel
                span = part._get_model_param_range_map(parameter)["param"]
                yield main, parameter, slice(span.start, span.end)
