"""Describe a model's LoRA adapters as pieces of the tensors in a PEFT folder.

A projection W [out, in] in the checkpoint has the factors A [rank, in] and B [out, rank]. A local weight may fuse
several projections, such as query, key and value. Its adapter then has the concatenated A factors of all projections,
and one row of B per row of the weight. B is split like the rows of the weight, and A like its columns.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.core.errors import UserError
from megarl.models.peft import PREFIX, names_format_of
from megarl.models.weight_files import open_file, require_dtype
from megarl.resharding.families.canonical import canonical_of
from megarl.resharding.families.mtp import MTP
from megarl.resharding.piece import Holder, Piece, Rectangle, Shard, whole

A, B = "lora_A", "lora_B"
DTYPE = "float32"
"""The dtype of adapter weights, regardless of the model's dtype."""

EXPERTS, SHARED = ".mlp.experts.", "shared_factors"
"""Substrings of local parameter names: of expert parameters, and of factors shared by all experts in a layer."""

LAYER = ".layers."
UNQUANTIZED = (".mlp.router.", ".shared_experts.gate_weight", ".modulation.", ".caption_modulation.", ".eh_proj.")
"""Substrings of the names of layer matrices that are never quantized, have no adapters, and are not updated by Muon."""

NOT_ADAPTED = (*UNQUANTIZED, MTP)
"""Substrings of the names of layer matrices without adapters."""

_EXPERT = re.compile(r"\.experts\.\d+\.")
_DOWN = (".down_proj.", ".w2.")
"""Substrings of the names of expert down-projections."""

_GROUPED = re.compile(r"(.*)\.weight(\d+)")
"""Matches the names of weights in Transformer Engine's grouped linear layers, which have one weight per expert."""


@dataclass(frozen=True, slots=True)
class AdaptedWeight:
    """A local weight with an adapter.

    Attributes:
        weight: name of the weight.
        projections: canonical tensors fused into the weight, in the order of their A factors.
        rows: the projection that each span of the weight's rows comes from: (index of the projection, start, stop).
        factors: "lora_A" and "lora_B" -> local parameter name.
        shared: the factor that all experts in a layer share; None if there is none.
    """

    weight: str
    projections: tuple[str, ...]
    rows: tuple[tuple[int, int, int], ...]
    factors: dict[str, str]
    shared: str | None = None


def is_factor(name: str) -> bool:
    """Return whether the local parameter belongs to an adapter."""
    return ".adapter." in name or f".{SHARED}." in name


def adapted_weights(holder: Holder, share_experts: bool) -> list[AdaptedWeight]:
    """Return the weights that get adapters. These are all linear layers in the model's layers (including an image
    model's refiners), except routers, gates of shared experts, modulations by the noise level, and MTP layers. With
    `share_experts`, the experts in a layer share the factor next to the hidden states: A for gate and up projections, B
    for down projections."""
    return [
        _adapted(name, pieces, share_experts)
        for name, pieces in holder.shard.by_parameter().items()
        if LAYER in name and not any(part in name for part in NOT_ADAPTED) and len(holder.shapes[name]) == 2
    ]


def _adapted(weight: str, pieces: list[Piece], share_experts: bool) -> AdaptedWeight:
    indices: dict[str | None, int] = {}
    for piece in pieces:
        indices.setdefault(piece.canonical, len(indices))
    rows = tuple((indices[piece.canonical], *piece.local_rectangle[0]) for piece in pieces)
    grouped = _GROUPED.fullmatch(weight)
    module = f"{grouped[1]}.adapter.{grouped[2]}" if grouped else f"{weight.removesuffix('.weight')}.adapter"
    factors = {factor: f"{module}.{factor}.weight" for factor in (A, B)}
    projections = tuple(name for name in indices if name is not None)
    shared = _shared_factor(projections[0]) if share_experts else None
    if shared is not None:
        layer = weight.rpartition(EXPERTS)[0] + EXPERTS
        factors[shared] = f"{layer}{SHARED}.{'linear_fc1' if shared == A else 'linear_fc2'}.weight"
    return AdaptedWeight(weight, projections, rows, factors, shared)


def adapter_holder(holder: Holder, rank: int, share_experts: bool) -> Holder:
    """Return a holder of the adapters for the given holder's weights, with the same name. `rank` is the LoRA rank."""
    pieces: dict[str, tuple[Piece, ...]] = {}
    weight_pieces = holder.shard.by_parameter()
    for adapted in adapted_weights(holder, share_experts):
        for factor, local in adapted.factors.items():
            if local not in pieces:
                make_pieces = _pieces_of_a if factor == A else _pieces_of_b
                pieces[local] = tuple(make_pieces(adapted, weight_pieces[adapted.weight], rank, local))
    shapes = {local: _shape(piece.local_rectangle for piece in tiles) for local, tiles in pieces.items()}
    all_pieces = tuple(piece for tiles in pieces.values() for piece in tiles)
    return Holder(holder.name, Shard(shapes, all_pieces, dict.fromkeys(shapes, DTYPE)), holder.node, holder.device)


def _pieces_of_a(adapted: AdaptedWeight, weight_pieces: list[Piece], rank: int, local: str) -> Iterable[Piece]:
    columns = {piece.canonical: (piece.canonical_rectangle[1], piece.local_rectangle[1]) for piece in weight_pieces}
    for index, tensor in enumerate(adapted.projections):
        canonical_columns, local_columns = columns[tensor]
        local_rows = (index * rank, (index + 1) * rank)
        canonical = (0, rank), canonical_columns
        yield Piece(_peft_name(tensor, A, adapted.shared), canonical, local, (local_rows, local_columns))


def _pieces_of_b(adapted: AdaptedWeight, weight_pieces: list[Piece], rank: int, local: str) -> Iterable[Piece]:
    for piece in weight_pieces:
        assert piece.canonical is not None, f"adapted weight {adapted.weight} has padding"
        canonical, place = ((spans[0], (0, rank)) for spans in (piece.canonical_rectangle, piece.local_rectangle))
        yield Piece(_peft_name(piece.canonical, B, adapted.shared), canonical, local, place)


def _peft_name(projection: str, factor: str, shared: str | None) -> str:
    """Return the name of a projection's factor in a PEFT file; the name of a shared factor omits the expert index."""
    name = _EXPERT.sub(".experts.", projection) if factor == shared else projection
    return f"{PREFIX}{name.removesuffix('.weight')}.{factor}.weight"


def _shape(rectangles: Iterable[Rectangle]) -> tuple[int, ...]:
    return tuple(max(stop for _, stop in spans) for spans in zip(*rectangles, strict=True))


def _shared_factor(projection: str) -> str | None:
    """Return the factor that experts may share, the one next to the hidden states; None outside experts."""
    if not _EXPERT.search(projection):
        return None
    return B if any(part in projection for part in _DOWN) else A


def peft_holder(hf_config: Mapping[str, Any], rank: int, share_experts: bool) -> Holder:
    """Return the holder of all adapter tensors for a model, named "peft". The MTP layer has none."""
    canonical = canonical_of(hf_config)
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in sorted({*range(canonical.num_layers)}.difference(canonical.following_layers().values())):
        linear = canonical.quantized(layer)  # excludes routers, gates of shared experts, and modulations
        for name, (rows, columns) in ((name, canonical.layer_shapes(layer)[name]) for name in sorted(linear)):
            projection = canonical.layer_prefix(layer) + name
            shared = _shared_factor(projection) if share_experts else None
            shapes[_peft_name(projection, A, shared)] = (rank, columns)
            shapes[_peft_name(projection, B, shared)] = (rows, rank)
    pieces = tuple(Piece(name, whole(shape), name, whole(shape)) for name, shape in shapes.items())
    return Holder("peft", Shard(shapes, pieces, dict.fromkeys(shapes, DTYPE)))


def check_adapter_weights(folder: Path, whole: Holder, num_experts: int) -> None:
    """Check the header of an adapter folder's weights file. `whole` is the holder of all adapter tensors for the model.
    Raise a UserError if the file is damaged, or if its adapters do not match the model."""
    form = names_format_of(folder)
    with open_file(folder / form.weights, "numpy") as file:
        stored = {name: file.get_slice(name) for name in map(str, file.keys())}
        headers = {name: (tensor.get_dtype(), tuple(tensor.get_shape())) for name, tensor in stored.items()}
    expected = {
        form.stored_name(each): shape
        for name, shape in whole.shapes.items()
        for each in expert_tensor_names(name, num_experts)
    }
    if unknown := sorted(headers.keys() - expected.keys()):
        raise UserError(
            f"actor.lora.path={folder}: {unknown[0]} does not belong to a linear layer in the model's decoder. "
            "Fix: set actor.lora.path to adapters for this model"
        )
    others = {name.replace(A, B) if A in name else name.replace(B, A) for name in headers}
    missing = sorted(others - headers.keys())
    if missing or not headers:
        raise UserError(
            f"actor.lora.path={folder}: {form.weights} has no {missing[0] if missing else 'tensors'}. Fix: copy the "
            "file again, or set actor.lora.path to complete adapters"
        )
    for name, (dtype, shape) in headers.items():
        require_dtype(folder, name, dtype)
        if shape != expected[name]:
            raise UserError(
                f"actor.lora.path={folder}: {name} has shape {shape}, but the model requires {expected[name]}. Fix: "
                "set actor.lora.path to adapters for this model"
            )


def expert_tensor_names(tensor: str, num_experts: int) -> list[str]:
    """Return the names under which a PEFT folder stores the tensor: one per expert for a shared factor, else one."""
    prefix, separator, suffix = tensor.partition(".experts.")
    if not separator or suffix.partition(".")[0].isdecimal():
        return [tensor]
    return [f"{prefix}.experts.{number}.{suffix}" for number in range(num_experts)]
