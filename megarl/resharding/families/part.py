"""Declare the parts of a decoder layer: their canonical tensors, and how Megatron and vLLM parameters tile them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from megarl.models.shape import ModelShape
from megarl.resharding.families.tiling import Tiling, Whole


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a decoder layer. All names are relative to the layer's prefix.

    Attributes:
        tensors: canonical tensor -> shape, given as names of ModelShape attributes (a tuple of names is a sum).
        megatron, vllm: local parameter -> its tiling.
        transformer_engine: Megatron tilings for Transformer Engine layers (None: same as `megatron`).
        float32: canonical tensors that stay in float32 regardless of the model's dtype.
        engine_float32: whether vLLM's parameters are float32 regardless of the model's dtype.
        quantized: whether its matrices are quantized for engines with quantized weights.
        per_expert: whether it describes a single expert. {} is the expert's global index in canonical names and its
            index on the rank in Megatron names. A vLLM parameter stacks all experts of the worker.
    """

    tensors: Mapping[str, tuple[str | tuple[str, ...], ...]]
    megatron: Mapping[str, Tiling]
    vllm: Mapping[str, Tiling]
    transformer_engine: Mapping[str, Tiling] | None = None
    float32: tuple[str, ...] = ()
    engine_float32: bool = False
    quantized: bool = True
    per_expert: bool = False

    def shapes(self, model: ModelShape) -> dict[str, tuple[int, ...]]:
        sizes = {name: tuple(_size(model, dim) for dim in dims) for name, dims in self.tensors.items()}
        return {name.format(expert): shape for expert in self._experts(model) for name, shape in sizes.items()}

    def megatron_tilings(self, transformer_engine: bool, experts: Sequence[int]) -> dict[str, Tiling]:
        """Return local parameter -> tiling for a rank with these experts (global indices)."""
        tilings = self.transformer_engine if transformer_engine and self.transformer_engine else self.megatron
        if not self.per_expert:
            return dict(tilings)
        return {
            local.format(i): tiling.for_experts([expert])
            for i, expert in enumerate(experts)
            for local, tiling in tilings.items()
        }

    def vllm_tilings(self, experts: Iterable[int], padded: int | None = None) -> dict[str, Tiling]:
        """Return local parameter -> tiling for a worker with these experts (global indices). `padded` is the size to
        which the worker pads its share of the experts' intermediate size."""
        if not self.per_expert:
            return dict(self.vllm)
        return {local: tiling.for_experts(experts).padded_to(padded) for local, tiling in self.vllm.items()}

    def _experts(self, model: ModelShape) -> range:
        return range(model.experts.count) if self.per_expert and model.experts else range(1)


def renamed(
    canonical: str,
    dims: tuple[str | tuple[str, ...], ...],
    megatron: str,
    tiling: Tiling | None = None,
    quantized: bool = True,
    float32: tuple[str, ...] = (),
) -> Part:
    """Declare one tensor that has the same name in vLLM as in the checkpoint, and a different name in Megatron. Without
    a tiling, every rank has the complete tensor."""
    tiling = tiling or Whole((canonical,))
    return Part({canonical: dims}, {megatron: tiling}, {canonical: tiling}, float32=float32, quantized=quantized)


def norm(canonical: str, dim: str, megatron: str, fused: str) -> Part:
    """Declare a norm, which Transformer Engine fuses into the following linear layer under the name `fused`."""
    return replace(renamed(canonical, (dim,), megatron), transformer_engine={fused: Whole((canonical,))})


def _size(model: ModelShape, dim: str | tuple[str, ...]) -> int:
    return attrgetter(dim)(model) if isinstance(dim, str) else sum(_size(model, part) for part in dim)
