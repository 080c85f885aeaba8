"""Layers for multi-token prediction in DeepSeek-V3 and GLM-4.5. In Hugging Face folders, these layers also have copies
of the embedding and the output layer. Trainers and engines share the originals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from megarl.resharding.families.part import Part, renamed
from megarl.resharding.families.tiling import Split, Tiling, Whole

MTP = ".mtp.layers."
"""Substring of the names of Megatron's parameters."""

EMBEDDING_COPY, HEAD_COPY = "embed_tokens.weight", "shared_head.head.weight"
"""Copies of the embedding and of the output layer in checkpoints."""

MEGATRON_LAYER, VLLM_LAYER = "mtp_model_layer.", "mtp_block."
"""Prefixes of the decoder layer inside an MTP layer."""

_PROJECTION = "eh_proj.weight"
PROJECTION = Part(
    tensors={_PROJECTION: ("hidden", ("hidden", "hidden"))},
    megatron={_PROJECTION: Split((_PROJECTION,))},
    vllm={_PROJECTION: Whole((_PROJECTION,))},
    quantized=False,
)
NORMS = [
    renamed(canonical, ("hidden",), megatron)
    for canonical, megatron in (
        ("enorm.weight", "enorm.weight"),
        ("hnorm.weight", "hnorm.weight"),
        ("shared_head.norm.weight", "final_layernorm.weight"),
    )
]


def mtp_parts(layer: Sequence[Part]) -> list[Part]:
    """Return the parts of an MTP layer, given those of its decoder layer. In checkpoints, the decoder layer's tensors
    have the same names as in other layers."""
    return [*NORMS, PROJECTION, *(_nested(part) for part in layer)]


def _nested(part: Part) -> Part:
    fused = part.transformer_engine
    return replace(
        part,
        megatron=_prefixed(MEGATRON_LAYER, part.megatron),
        transformer_engine=None if fused is None else _prefixed(MEGATRON_LAYER, fused),
        vllm=_prefixed(VLLM_LAYER, part.vllm),
    )


def _prefixed(prefix: str, tilings: Mapping[str, Tiling]) -> dict[str, Tiling]:
    return {prefix + name: tiling for name, tiling in tilings.items()}
