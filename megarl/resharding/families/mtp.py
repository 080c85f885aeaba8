"""Multi-token prediction (MTP) layers of DeepSeek-V3, GLM-4.5, Qwen3-Next and Qwen3.5.

In Hugging Face folders of DeepSeek-V3 and GLM-4.5, the layer is numbered after the last decoder layer and repeats the
embedding and the output layer; trainers and engines use the originals. Qwen's folders store the layer under a separate
prefix, without these copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from megarl.models.shape import ModelShape
from megarl.resharding.families.part import Part, renamed
from megarl.resharding.families.tiling import Split, Tiling, Whole

MTP = ".mtp.layers."
"""Substring of the names of the MTP layer's parameters in Megatron."""

EMBEDDING_COPY, HEAD_COPY = "embed_tokens.weight", "shared_head.head.weight"
"""Copies of the embedding and of the output layer in checkpoints."""

SEPARATE, SEPARATE_ENGINE = "mtp.", "model."
"""Prefixes of a separate MTP layer's tensors in checkpoints, and of its parameters in vLLM's draft model."""

MEGATRON_LAYER = "mtp_model_layer."
"""Prefix of the decoder layer inside an MTP layer."""


def _outer_parts(projection: str, tiling: Tiling, *norms: str) -> list[Part]:
    """Return the parts around the decoder layer, given the checkpoint names of the projection and of the norms for the
    embedding, the hidden state and the output. `tiling` is the projection's tiling in vLLM."""
    into = Part(
        tensors={projection: ("hidden", ("hidden", "hidden"))},
        megatron={"eh_proj.weight": Split((projection,))},
        vllm={projection: tiling},
        quantized=False,
    )
    names = ("enorm.weight", "hnorm.weight", "final_layernorm.weight")
    return [*(renamed(norm, ("hidden",), name) for norm, name in zip(norms, names, strict=True)), into]


_EH, _FC = "eh_proj.weight", "fc.weight"
NUMBERED_PARTS = _outer_parts(_EH, Whole((_EH,)), "enorm.weight", "hnorm.weight", "shared_head.norm.weight")
SEPARATE_PARTS = _outer_parts(
    _FC, Split((_FC,)), "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight", "norm.weight"
)


def is_separate(model: ModelShape) -> bool:
    """Return whether checkpoints store the model's MTP layer under a separate prefix, as Qwen's do."""
    return model.linear is not None


def mtp_parts(model: ModelShape, layer: Sequence[Part]) -> list[Part]:
    """Return the parts of an MTP layer, given those of its decoder layer. In checkpoints, the decoder layer's tensors
    have the same names as in other layers, after a prefix if the MTP layer is separate."""
    if is_separate(model):
        return [*SEPARATE_PARTS, *(_nested(part, "layers.0.", "layers.0.") for part in layer)]
    return [*NUMBERED_PARTS, *(_nested(part, "", "mtp_block.") for part in layer)]


def _nested(part: Part, prefix: str, engine_prefix: str) -> Part:
    fused = part.transformer_engine
    return replace(
        part,
        tensors={prefix + name: shape for name, shape in part.tensors.items()},
        megatron=_prefixed(MEGATRON_LAYER, part.megatron, prefix),
        transformer_engine=None if fused is None else _prefixed(MEGATRON_LAYER, fused, prefix),
        vllm=_prefixed(engine_prefix, part.vllm, prefix),
        float32=tuple(prefix + name for name in part.float32),
    )


def _prefixed(local: str, tilings: Mapping[str, Tiling], prefix: str) -> dict[str, Tiling]:
    """Add prefixes to the local names and to the canonical names."""
    return {
        local + name: replace(tiling, tensors=tuple(prefix + tensor for tensor in tiling.tensors))
        for name, tiling in tilings.items()
    }
