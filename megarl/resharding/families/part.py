"""A part of a decoder layer, as data: its canonical tensors and how Megatron's and vLLM's parameters tile them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megarl.resharding.families.tiling import Tiling


@dataclass(frozen=True, slots=True)
class Part:
    """Names are relative to the layer's prefix, in Megatron, in vLLM and in the checkpoint.

    tensors             canonical tensor -> its shape, as names of ModelShape's attributes
    megatron, vllm      local parameter -> its tiling
    transformer_engine  the same for Megatron's layers of Transformer Engine (None: as in `megatron`)
    """

    tensors: Mapping[str, tuple[str, ...]]
    megatron: Mapping[str, Tiling]
    vllm: Mapping[str, Tiling]
    transformer_engine: Mapping[str, Tiling] | None = None

    def megatron_tilings(self, transformer_engine: bool) -> Mapping[str, Tiling]:
        return self.transformer_engine if transformer_engine and self.transformer_engine else self.megatron
