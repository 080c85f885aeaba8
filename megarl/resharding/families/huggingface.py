"""What a Hugging Face folder holds: canonical space itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.resharding.families.canonical import Canonical
from megarl.resharding.piece import Holder, Piece, whole


def huggingface_holder(hf_config: Mapping[str, Any], name: str = "huggingface") -> Holder:
    """Every tensor of the checkpoint. A tied head is not among them: it is the embedding."""
    canonical = Canonical(hf_config)
    layers = {
        canonical.layer_prefix(layer) + tensor: shape
        for layer in range(canonical.model.num_layers)
        for tensor, shape in canonical.layer_shapes(layer).items()
    }
    shapes = canonical.outer_shapes | layers
    pieces = tuple(Piece(tensor, whole(shape), tensor, whole(shape)) for tensor, shape in shapes.items())
    return Holder(name, shapes, pieces)
