"""Adapters of low rank (LoRA) beside the linear layers of a decoder, as pieces of the tensors of a PEFT folder.

A projection of the checkpoint, W [out, in], has the factors A [rank, in] and B [out, rank]. A local weight may be made
of several projections, such as query, key and value: its adapter has the factors A of all of them, one after the other,
and a row of B for each row of the weight. So B is cut as the weight's rows are, and A as its columns are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from megarl.resharding.families.canonical import Canonical
from megarl.resharding.piece import Holder, Piece, Rectangle, Shard, whole

A, B = "lora_A", "lora_B"
PREFIX = "base_model.model."
"""What PEFT's names begin with."""

DTYPE = "float32"
"""The dtype of adapters, whatever that of the model."""

EXPERTS, SHARED = ".mlp.experts.", "shared_factors"
"""Parts of local names: of an expert's parameters, and of the factors that experts share."""

_LAYER, _ROUTER = ".layers.", ".mlp.router."
_EXPERT = re.compile(r"\.experts\.\d+\.")
_DOWN = (".down_proj.", ".w2.")
"""Parts of the names of experts' projections back to the hidden states."""

_GROUPED = re.compile(r"(.*)\.weight(\d+)")
"""Weights of Transformer Engine's grouped linear layers, which have one of each expert."""


@dataclass(frozen=True, slots=True)
class AdaptedWeight:
    """A local weight with an adapter.

    weight        its name
    projections   the canonical tensors that it is made of, in the order in which A has theirs
    rows          spans of its rows: number of the projection, start and stop
    factors       names of A and of B
    shared        the one of both that all experts of a layer share, if they do
    """

    weight: str
    projections: tuple[str, ...]
    rows: tuple[tuple[int, int, int], ...]
    factors: dict[str, str]
    shared: str | None = None


def is_factor(name: str) -> bool:
    """Returns whether the parameter of this local name belongs to an adapter."""
    return ".adapter." in name or f".{SHARED}." in name


def adapted_weights(holder: Holder, share_experts: bool) -> list[AdaptedWeight]:
    """Returns a holder's weights with adapters: those of all linear layers of the decoder but routers.

    share_experts: whether the experts of a layer have that factor in common which meets the hidden states: A of gate
    and up projections, B of down projections.
    """
    pieces: dict[str, list[Piece]] = {}
    for piece in holder.pieces:
        if _LAYER in piece.local and _ROUTER not in piece.local and len(piece.local_rectangle) == 2:
            pieces.setdefault(piece.local, []).append(piece)
    return [_adapted(name, of_weight, share_experts) for name, of_weight in pieces.items()]


def _adapted(weight: str, pieces: list[Piece], share_experts: bool) -> AdaptedWeight:
    numbers: dict[str | None, int] = {}
    for piece in pieces:
        numbers.setdefault(piece.canonical, len(numbers))
    rows = tuple((numbers[piece.canonical], *piece.local_rectangle[0]) for piece in pieces)
    grouped = _GROUPED.fullmatch(weight)
    module = f"{grouped[1]}.adapter.{grouped[2]}" if grouped else f"{weight.removesuffix('.weight')}.adapter"
    factors = {factor: f"{module}.{factor}.weight" for factor in (A, B)}
    projections = tuple(name for name in numbers if name is not None)
    shared = _shared_factor(projections[0]) if share_experts else None
    if shared is not None:
        layer = weight.rpartition(EXPERTS)[0] + EXPERTS
        factors[shared] = f"{layer}{SHARED}.{'linear_fc1' if shared == A else 'linear_fc2'}.weight"
    return AdaptedWeight(weight, projections, rows, factors, shared)


def adapter_holder(holder: Holder, rank: int, share_experts: bool) -> Holder:
    """Returns the holder of a holder's adapters, under the same name. rank: of the adapters."""
    pieces: dict[str, tuple[Piece, ...]] = {}
    of_weights: dict[str, list[Piece]] = {}
    for piece in holder.pieces:
        of_weights.setdefault(piece.local, []).append(piece)
    for adapted in adapted_weights(holder, share_experts):
        of_weight = of_weights[adapted.weight]
        for factor, local in adapted.factors.items():
            if local not in pieces:
                of_factor = _pieces_of_a if factor == A else _pieces_of_b
                pieces[local] = tuple(of_factor(adapted, of_weight, rank, local))
    shapes = {local: _extent(piece.local_rectangle for piece in found) for local, found in pieces.items()}
    every = tuple(piece for found in pieces.values() for piece in found)
    return Holder(holder.name, Shard(shapes, every, dict.fromkeys(shapes, DTYPE)), holder.node, holder.device)


def _pieces_of_a(adapted: AdaptedWeight, of_weight: list[Piece], rank: int, local: str) -> Iterable[Piece]:
    columns = {piece.canonical: (piece.canonical_rectangle[1], piece.local_rectangle[1]) for piece in of_weight}
    for number, tensor in enumerate(adapted.projections):
        canonical, own = columns[tensor]
        rows = (number * rank, (number + 1) * rank)
        yield Piece(_tensor(tensor, A, adapted.shared), ((0, rank), canonical), local, (rows, own))


def _pieces_of_b(adapted: AdaptedWeight, of_weight: list[Piece], rank: int, local: str) -> Iterable[Piece]:
    for piece in of_weight:
        assert piece.canonical is not None, f"padding of {adapted.weight}"
        canonical, own = ((spans[0], (0, rank)) for spans in (piece.canonical_rectangle, piece.local_rectangle))
        yield Piece(_tensor(piece.canonical, B, adapted.shared), canonical, local, own)


def _tensor(projection: str, factor: str, shared: str | None) -> str:
    """Returns PEFT's name of a projection's factor; one that experts share has the name without their number."""
    name = _EXPERT.sub(".experts.", projection) if factor == shared else projection
    return f"{PREFIX}{name.removesuffix('.weight')}.{factor}.weight"


def _extent(rectangles: Iterable[Rectangle]) -> tuple[int, ...]:
    return tuple(max(stop for _, stop in spans) for spans in zip(*rectangles, strict=True))


def _shared_factor(projection: str) -> str | None:
    """Returns which factor of a projection the experts of a layer may share: that which meets the hidden states."""
    if not _EXPERT.search(projection):
        return None
    return B if any(part in projection for part in _DOWN) else A


def peft_holder(hf_config: Mapping[str, Any], rank: int, share_experts: bool) -> Holder:
    """Returns the holder of the whole tensors of a model's adapters, named "peft"."""
    canonical = Canonical(hf_config)
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(canonical.model.num_layers):
        linear = canonical.quantised(layer)  # all matrices but routers
        for name, (rows, columns) in ((name, canonical.layer_shapes(layer)[name]) for name in sorted(linear)):
            projection = canonical.layer_prefix(layer) + name
            shared = _shared_factor(projection) if share_experts else None
            shapes[_tensor(projection, A, shared)] = (rank, columns)
            shapes[_tensor(projection, B, shared)] = (rows, rank)
    pieces = tuple(Piece(name, whole(shape), name, whole(shape)) for name, shape in shapes.items())
    return Holder("peft", Shard(shapes, pieces, dict.fromkeys(shapes, DTYPE)))


def of_each_expert(tensor: str, num_experts: int) -> list[str]:
    """Returns the names of a tensor in a PEFT folder: one for each expert, where all share it."""
    before, found, after = tensor.partition(".experts.")
    if not found or after.partition(".")[0].isdecimal():
        return [tensor]
    return [f"{before}.experts.{number}.{after}" for number in range(num_experts)]
