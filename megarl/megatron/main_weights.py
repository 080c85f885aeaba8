"""Float32 main weights for 16-bit parameters: initialization, and the fraction of parameters that an update changes.

bfloat16 rounds all values in a cell, which is about 2⁻⁸ of the weight's magnitude wide, to the same number. A main
weight that starts as a copy of its parameter is in the middle of its cell. At learning rates typical for RL it stays
inside the cell for many updates: the first update at 1e-5 changes only the 2 % of SmolLM2's parameters that are near 0.
float16 cells are an eighth as wide.

If the checkpoint stores a weight in float32, the main weight starts from that value. Otherwise the weight's position in
its cell is unknown, so the main weight starts at a uniformly random position. A step s then leaves a cell of width w
with probability s / w and moves the parameter by w, which is s on average, starting with the first update. The forward
pass is unchanged bit for bit, because every main weight still rounds to its parameter.

A power of two has different distances to its neighbors: a outward and b = a / 2 inward. Its cell extends from −b / 2 to
a / 2. The mean move is s for all outward steps up to S if the density is 1 / a in the outermost part of length S, and
for all inward steps up to S if it is 1 / b in the innermost part of length S. Together these parts have the probability
S / a + S / b ≤ 1, so the largest possible S is a / 3. Main weights of powers of two therefore start with probability
1 / 3 in the outermost a / 3 of the cell, and with probability 2 / 3 in the innermost a / 3. Larger steps are biased by
at most a / 4, because no position in the cell is unbiased for all of them.
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

INWARD_SHARE = 1 / 6
"""Threshold for the random share, which is uniform in (−½, ½). Shares up to it (probability 2/3) scale the distance to
the neighbor nearer to 0, and larger shares scale the distance to the other neighbor. The two distances are equal except
for powers of two."""

CHUNK = 2**20
"""Number of elements processed at a time, which limits temporary memory. More would not be faster."""


def rounded_parameters(
    optimizer: MegatronOptimizer, parameters: Mapping[str, torch.nn.Parameter]
) -> dict[str, torch.nn.Parameter]:
    """Return name -> parameter for parameters whose main weights have a different dtype and are at least partly on this
    rank."""
    rounded = {parameter for part in parts_of(optimizer) for _, parameter, _ in _main_weights(part)}
    return {name: parameter for name, parameter in parameters.items() if parameter in rounded}


@torch.no_grad()
def begin_main_weights(
    optimizer: MegatronOptimizer, parameters: Mapping[str, torch.nn.Parameter], holder: Holder, exact: Collection[str]
) -> None:
    """Initialize this rank's main weights. Call it before the first update.

    Args:
        parameters: the result of `rounded_parameters`. Their main_grad buffers are not in use yet and hold the values.
        holder: describes this rank's weights. Random positions depend on canonical tensor names and indices, so they
            are the same under every layout.
        exact: names of the parameters whose main_grad already holds the unrounded values.
    """
    inexact = {name: parameter for name, parameter in parameters.items() if name not in exact}
    for parameter in inexact.values():
        main_grad(parameter).copy_(parameter)
    for piece in holder.pieces:
        if piece.canonical is not None and piece.local in inexact:
            values = view(main_grad(inexact[piece.local]), piece.local_rectangle)
            _place(values, inexact[piece.local].dtype, piece.canonical, piece.canonical_rectangle)
    for part in parts_of(optimizer):
        for main, parameter, span in _main_weights(part):
            main.copy_(main_grad(parameter).flatten()[span])


def main_grad(parameter: torch.nn.Parameter) -> torch.Tensor:
    return parameter.main_grad  # pyright: ignore[reportAttributeAccessIssue]  # DDP adds the buffer


def _place(values: torch.Tensor, dtype: torch.dtype, tensor: str, rectangle: Rectangle) -> None:
    """Move each value, in place, to a position in its rounding cell for `dtype`. The position is derived from the
    value's index in the canonical tensor. The values are float32."""
    (start, _), *others = rectangle
    rows = max(1, CHUNK * len(values) // max(1, values.numel()))
    for number, part in enumerate(values.split(rows)):
        first = start + number * rows
        share = _shares(_levels(dtype), tensor, ((first, first + len(part)), *others), values.device)
        bits = part.to(dtype).view(torch.int16)
        outward = (bits + 1).view(dtype).float() - part  # distance to the next value away from 0
        inward = part - (bits - 1).view(dtype).float()
        outward = outward.where(outward.isfinite(), inward)  # above the largest finite value is infinity
        # Keep zeros: near 0 the dtype represents even tiny updates, and a 0 may be padding that has no gradient.
        is_placed = (part != 0) & part.isfinite()
        part.add_((share * outward.where(share > INWARD_SHARE, inward)).where(is_placed, 0))


def _levels(dtype: torch.dtype) -> int:
    """Return the number of positions in a cell, 2¹⁵ or 2¹². float32 has 16 more mantissa bits than bfloat16 and 13 more
    than float16. Positions are at odd multiples of 2⁻¹⁶ or 2⁻¹³ times the distance to a neighbor, so they never lie on
    the border between two cells. They are exact in float32, except some next to powers of two, which are rounded."""
    return round(torch.finfo(dtype).eps / torch.finfo(torch.float32).eps) // 2


def _shares(levels: int, tensor: str, rectangle: Rectangle, device: torch.device) -> torch.Tensor:
    """Return a random number in (−½, ½) for each element, hashed from the tensor's name and the element's index."""
    mixed = torch.full((), zlib.crc32(tensor.encode()), dtype=torch.int64, device=device)
    for start, stop in rectangle:
        mixed = mixed.unsqueeze(-1) * -0x61C8864680B583EB + torch.arange(start, stop, device=device)
    for factor in (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15):  # constants of SplitMix64
        mixed = (mixed ^ (mixed >> 30)).mul_(factor)
    return ((mixed >> 32) & (levels - 1)).float().add_(0.5).div_(levels).sub_(0.5)


class ChangedShare:
    """Counts the elements in 16-bit parameters that updates change."""

    def __init__(self, optimizer: MegatronOptimizer, device: torch.device):
        self._changed = torch.zeros((), dtype=torch.int64, device=device)
        """Number of changed elements."""
        self._total = 0
        """Number of all elements that have a main weight."""
        for part in parts_of(optimizer):
            # Megatron calls this at the end of an update, before it changes the parameters.
            part._copy_main_params_to_model_params = self._after_count(part, part._copy_main_params_to_model_params)

    def take(self) -> float | None:
        """Return the fraction of elements changed since the last call; None if no parameter is rounded. Collective."""
        counts = torch.stack((self._changed, torch.full_like(self._changed, self._total)))
        dist.all_reduce(counts)
        changed, total = counts.tolist()
        self._changed.zero_()
        self._total = 0
        return changed / total if total else None

    def _after_count(self, part: DistributedOptimizer, copy: Callable[[], None]) -> Callable[[], None]:
        @torch.no_grad()
        def count_and_copy() -> None:
            changed = []
            for main, parameter, span in _main_weights(part):
                before = parameter.view(-1)[span]
                changed.append((main.to(before.dtype) != before).sum())
                self._total += main.numel()
            if changed:
                self._changed += torch.stack(changed).sum()
            copy()

        return count_and_copy


def _main_weights(part: DistributedOptimizer) -> Iterator[tuple[torch.Tensor, torch.nn.Parameter, slice]]:
    """Yield (main weight, parameter, slice) for each flat main weight that the optimizer keeps separately from its
    parameter. The slice locates the main weight in the flattened parameter."""
    for mains, parameters in zip(part.shard_fp32_from_float16_groups, part.model_float16_groups, strict=True):
        for main, parameter in zip(mains, parameters, strict=True):
            if main is not None:  # a precision-aware optimizer stores them in its own state
                span = part._get_model_param_range_map(parameter)["param"]
                yield main, parameter, slice(span.start, span.end)
