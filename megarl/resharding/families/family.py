"""A model family, as data: the canonical tensors of a layer and how Megatron's and vLLM's parameters tile them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megarl.resharding.families.tiling import Tiling


@dataclass(frozen=True, slots=True)
class Family:
    """A decoder whose layers are all alike. Names in a layer are relative to its prefix.

    tensors              canonical tensor of a layer -> its shape, as names of ModelShape's attributes
    megatron, vllm       local parameter of a layer -> its tiling; Megatron's with norm layers of their own
    megatron_fused_norms Megatron's separate norm parameter -> its name where Transformer Engine fuses it into a linear
    unsupported          config keys that must be absent or false: they add tensors that are not declared here
    """

    tensors: Mapping[str, tuple[str, ...]]
    megatron: Mapping[str, Tiling]
    vllm: Mapping[str, Tiling]
    megatron_fused_norms: Mapping[str, str]
    unsupported: tuple[str, ...] = ()
    layer: str = "model.layers.{}."
    embedding: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm.weight"
    head: str = "lm_head.weight"
