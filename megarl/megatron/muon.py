"""Muon for the attention, MLP and expert matrices of a model. Megatron's AdamW updates all other parameters.

For a matrix W [m, n] with gradient G, momentum M and the momentum coefficient μ (Jordan et al.,
https://kellerjordan.github.io/posts/muon):

    M ← μ · M + G
    W ← (1 − lr · weight_decay) · W − lr · 0.2 · √max(m, n) · orthogonalize(G + μ · M)

A semi-orthogonal [m, n] matrix has an RMS of 1 / √max(m, n). The update therefore has an RMS of about 0.2, which is
typical of AdamW, so learning rates and weight decays tuned for AdamW can be reused (Moonlight,
https://arxiv.org/abs/2502.16982).

The matrices are those of the Hugging Face checkpoint, so updates do not depend on the layout. Matrices that Megatron
fuses are separated: query, key and value projections, gate and up projections, and experts. Tensor-parallel shards are
joined. Projections that are fused in the checkpoint, such as Phi-3's, are one matrix.

Momentum is float32 and sharded over the data-parallel ranks like Adam's moments. In each update, one of the ranks that
hold a matrix gathers its momentum, orthogonalizes it and returns the parts. On average, a rank thus sends and receives
8 bytes per matrix element in its shard. The ranks orthogonalize different matrices at the same time. A rank needs
memory for a few copies of one matrix.

Megatron-core's Muon is not used: its package, emerging-optimizers, requires Python 3.12, and its optimizer keeps whole
layers on a rank, which checkpoints, offloading and main weights that start inside rounding cells do not support.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer

from megarl.core import device
from megarl.megatron import parallel
from megarl.megatron.checkpoint.optimizer_state import MOMENTUM, OwnedRange, owned_ranges
from megarl.models.flops import NEWTON_SCHULZ_STEPS
from megarl.resharding.piece import Holder, Rectangle, flat_span, intersect, num_elements
from megarl.resharding.selection import layer_matrices
from megarl.resharding.transports.transport import view

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the odd quintic polynomial in each Newton-Schulz step. Together, the steps map all but tiny singular
values to about 0.7 to 1.2."""

EPSILON = 1e-7
"""Added to a matrix's norm, which may be 0."""

RMS = 0.2
"""Factor that gives updates an RMS of about 0.2 with a learning rate of 1."""


def orthogonalize(matrix: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Approximate U Vᵀ for a float32 matrix U S Vᵀ, [m, n], by Newton-Schulz iterations. `dtype`: dtype of the matrix
    products."""
    a, b, c = COEFFICIENTS
    wide = matrix.t() if matrix.shape[0] > matrix.shape[1] else matrix
    x = (wide / (wide.norm() + EPSILON)).to(dtype)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.t()
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.t() if wide is not matrix else x).float()


class Part(NamedTuple):
    """A rectangle of a checkpoint matrix that a rank holds."""

    tensor: str
    rectangle: Rectangle


@dataclass(frozen=True, slots=True)
class LocalPart:
    """A rectangle of a matrix in this rank's range of a parameter. `index`: the range's index among the ranges of
    Muon's matrices. `rectangle`: the rectangle in parameter coordinates."""

    index: int
    rectangle: Rectangle

    @property
    def size(self) -> int:
        return num_elements(self.rectangle)


@dataclass(frozen=True, slots=True)
class Round:
    """Matrices that the ranks orthogonalize at the same time, at most one per rank.

    Attributes:
        sent: the parts that this rank sends, by receiving rank.
        shape: the shape of this rank's matrix; None if it has none.
        received: the rectangles of the matrix that this rank orthogonalizes, by sending rank.
    """

    sent: list[list[LocalPart]]
    shape: tuple[int, ...] | None
    received: list[list[Rectangle]]


def add_muon(
    optimizer: MegatronOptimizer,
    parameters: Mapping[str, torch.nn.Parameter],
    holder: Holder,
    momentum: float,
    dtype: torch.dtype,
) -> None:
    """Wrap the step of one rank's optimizer so that it first updates the matrices with Muon. Collective over all ranks.

    Args:
        optimizer: the rank's distributed optimizer from Megatron.
        parameters: name -> trained parameter; Muon updates the layer matrices among them.
        holder: describes this rank's weights.
        momentum: μ.
        dtype: the model's dtype. Matrices are orthogonalized in float32 if it is float32, and in bfloat16 otherwise.
    """
    dtype = torch.float32 if dtype is torch.float32 else torch.bfloat16
    names = {parameters[name]: name for name in layer_matrices(holder) if name in parameters}
    for parameter in names:
        parallel.mark(parameter, uses_muon=True)
    ranges = [owned for owned in owned_ranges(optimizer) if owned.parameter in names]
    rounds = _plan_rounds(_parts(ranges, names, holder))
    step = optimizer.step_with_ready_grads

    def update_and_step() -> bool:
        _update(ranges, rounds, momentum, dtype)
        with warnings.catch_warnings():
            # Main weights of float32 parameters are views, and torch warns when AdamW reads their missing gradients.
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
            return step()

    # Megatron calls step_with_ready_grads after gradients are reduced, checked and clipped.
    optimizer.step_with_ready_grads = update_and_step


@torch.no_grad()
def _update(ranges: Sequence[OwnedRange], rounds: Sequence[Round], momentum: float, dtype: torch.dtype) -> None:
    """Update the matrices, and drop their gradients, so that AdamW skips them. Collective over all ranks."""
    directions = [_direction(owned, momentum) for owned in ranges]
    for current in rounds:
        _run(current, ranges, directions, dtype)
    for owned in ranges:
        owned.main.grad = None


def _direction(owned: OwnedRange, momentum: float) -> torch.Tensor:
    """Apply weight decay, update the momentum, and return G + μ · M in the gradient's storage."""
    main, state = owned.main, owned.optimizer_state
    if MOMENTUM not in state:
        state[MOMENTUM] = torch.zeros_like(main)
    assert main.grad is not None, "a trained parameter has no gradient"
    main.mul_(1 - owned.param_group["lr"] * owned.param_group["weight_decay"])
    state[MOMENTUM].mul_(momentum).add_(main.grad)
    return main.grad.add_(state[MOMENTUM], alpha=momentum)


def _run(current: Round, ranges: Sequence[OwnedRange], directions: Sequence[torch.Tensor], dtype: torch.dtype) -> None:
    parts = [part for parts in current.sent for part in parts]
    sent = _joined(ranges[part.index].view(directions[part.index], part.rectangle) for part in parts)
    sent_sizes = [sum(part.size for part in parts) for parts in current.sent]
    received_sizes = [sum(map(num_elements, rectangles)) for rectangles in current.received]
    received = sent.new_empty(sum(received_sizes))
    dist.all_to_all_single(received, sent, received_sizes, sent_sizes)
    if current.shape is not None:
        matrix = received.new_empty(current.shape)
        places = [view(matrix, rectangle) for rectangles in current.received for rectangle in rectangles]
        for place, values in zip(places, received.split([place.numel() for place in places]), strict=True):
            place.copy_(values.view(place.shape))
        matrix.copy_(orthogonalize(matrix, dtype)).mul_(RMS * max(current.shape) ** 0.5)
        received = _joined(places)
    dist.all_to_all_single(sent, received, sent_sizes, received_sizes)
    for part, update in zip(parts, sent.split([part.size for part in parts]), strict=True):
        owned = ranges[part.index]
        weights = owned.view(owned.main, part.rectangle)
        weights.sub_(update.view(weights.shape), alpha=owned.param_group["lr"])


def _parts(
    owned: Sequence[OwnedRange], names: Mapping[torch.nn.Parameter, str], holder: Holder
) -> list[tuple[Part, LocalPart]]:
    """Return the matrix parts in this rank's ranges, without padding."""
    pieces, parts = holder.shard.by_parameter(), []
    for index, item in enumerate(owned):
        for rectangle in flat_span(tuple(item.parameter.shape), item.start, item.stop):
            for piece in pieces[names[item.parameter]]:
                common = intersect(rectangle, piece.local_rectangle)
                if common is not None and piece.canonical is not None:
                    parts.append((Part(piece.canonical, piece.to_canonical(common)), LocalPart(index, common)))
    return parts


def _plan_rounds(parts: Sequence[tuple[Part, LocalPart]]) -> list[Round]:
    """Assign each matrix to one of the ranks that hold it, and return the rounds. Collective over all ranks."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    parts_by_rank: list[list[Part]] = [[] for _ in range(world_size)]
    dist.all_gather_object(parts_by_rank, [part for part, _ in parts], group=parallel.host_group())
    shapes = _shapes(part for rank_parts in parts_by_rank for part in rank_parts)
    queues = assign(parts_by_rank, shapes)
    turns = {tensor: (owner, turn) for owner, queue in enumerate(queues) for turn, tensor in enumerate(queue)}
    rounds = [
        Round(
            [[] for _ in range(world_size)],
            shapes[queues[rank][turn]] if turn < len(queues[rank]) else None,
            [[] for _ in range(world_size)],
        )
        for turn in range(max(map(len, queues)))
    ]
    for part, local in parts:
        owner, turn = turns[part.tensor]
        rounds[turn].sent[owner].append(local)
    for sender, rank_parts in enumerate(parts_by_rank):
        for tensor, rectangle in rank_parts:
            owner, turn = turns[tensor]
            if owner == rank:
                rounds[turn].received[sender].append(rectangle)
    return rounds


def _shapes(parts: Iterable[Part]) -> dict[str, tuple[int, ...]]:
    """Return each matrix's shape. It is derived from the matrix's parts, which cover it completely."""
    shapes: dict[str, tuple[int, ...]] = {}
    for tensor, rectangle in parts:
        stops = tuple(stop for _, stop in rectangle)
        shapes[tensor] = tuple(map(max, shapes.get(tensor, stops), stops))
    return shapes


def assign(parts_by_rank: Sequence[Sequence[Part]], shapes: Mapping[str, tuple[int, ...]]) -> list[list[str]]:
    """Return the matrices that each rank orthogonalizes: matrices are assigned greedily, most expensive first, to the
    least loaded rank that holds a part."""
    candidates: dict[str, dict[int, None]] = {tensor: {} for tensor in shapes}
    for rank, rank_parts in enumerate(parts_by_rank):
        for part in rank_parts:
            candidates[part.tensor][rank] = None
    costs = {tensor: prod(shape) * min(shape) for tensor, shape in shapes.items()}
    queues: list[list[str]] = [[] for _ in parts_by_rank]
    work = [0] * len(queues)
    for tensor in sorted(shapes, key=lambda tensor: (-costs[tensor], tensor)):
        owner = min(candidates[tensor], key=lambda rank: (work[rank], rank))
        queues[owner].append(tensor)
        work[owner] += costs[tensor]
    return queues


def _joined(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    flat = [tensor.reshape(-1) for tensor in tensors]
    return torch.cat(flat) if flat else torch.empty(0, device=device.device())
