"""Describe the weights in a transformers or diffusers folder. Its tensors are the canonical tensors themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.models.huggingface import weights_dtype
from megarl.resharding.families.canonical import canonical_of
from megarl.resharding.piece import Holder, Piece, Shard, span, whole

OUTPUT = "output_layer.weight"


def huggingface_holder(hf_config: Mapping[str, Any], dtype: str | None = None) -> Holder:
    """Return the holder of all checkpoint tensors, named "huggingface".

    A tied output layer has no tensor of its own. `dtype` overrides the dtype in config.json.
    """
    canonical = canonical_of(hf_config)
    dtype = dtype or weights_dtype(hf_config)
    shapes, dtypes = dict(canonical.outer_shapes), dict.fromkeys(canonical.outer_shapes, dtype)
    for layer in range(canonical.num_layers):
        prefix, precise = canonical.layer_prefix(layer), canonical.float32(layer)
        for tensor, shape in canonical.layer_shapes(layer).items():
            shapes[prefix + tensor] = shape
            dtypes[prefix + tensor] = "float32" if tensor in precise else dtype
    pieces = tuple(Piece(tensor, whole(shape), tensor, whole(shape)) for tensor, shape in shapes.items())
    return Holder("huggingface", Shard(shapes, pieces, dtypes))


def output_rows_holder(hf_config: Mapping[str, Any], first: int, num_rows: int, dtype: str) -> Holder:
    """Return the holder of rows [first, first + num_rows) of a language model's output weight, named "output rows".
    Rows beyond the vocabulary are padding."""
    canonical = canonical_of(hf_config)
    vocab, hidden = canonical.outer_shapes[canonical.head]
    held = max(0, min(num_rows, vocab - first))
    shape = (num_rows, hidden)
    pieces = []
    if held:
        rows = span((vocab, hidden), 0, first, first + held)
        pieces.append(Piece(canonical.head, rows, OUTPUT, span(shape, 0, 0, held)))
    if held < num_rows:
        padding = span(shape, 0, held, num_rows)
        pieces.append(Piece(None, padding, OUTPUT, padding))
    return Holder("output rows", Shard({OUTPUT: shape}, tuple(pieces), {OUTPUT: dtype}))
