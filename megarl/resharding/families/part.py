"""A part of a decoder layer, as data: its canonical tensors and how Megatron's and vLLM's parameters tile them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from megarl.models.shape import ModelShape
from megarl.resharding.families.tiling import Tiling


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a decoder layer. Names are relative to the layer's prefix, in Megatron, in vLLM and in the checkpoint.

    tensors             canonical tensor -> its shape, as names of ModelShape's attributes (several: their sum)
    megatron, vllm      local parameter -> its tiling
    transformer_engine  the same for Megatron's layers of Transformer Engine (None: as in `megatron`)
    float32             canonical tensors that are kept so, whatever the dtype of the model
    quantised           whether engines that quantise have its matrices quantised
    per_expert          whether it describes one expert: {} in names is its number, in Megatron's that among the rank's
                        own; a parameter of vLLM has all of the worker's, one after the other
    """

    tensors: Mapping[str, tuple[str | tuple[str, ...], ...]]
    megatron: Mapping[str, Tiling]
    vllm: Mapping[str, Tiling]
    transformer_engine: Mapping[str, Tiling] | None = None
    float32: tuple[str, ...] = ()
    quantised: bool = True
    per_expert: bool = False

    def shapes(self, model: ModelShape) -> dict[str, tuple[int, ...]]:
        sizes = {name: tuple(_size(model, dim) for dim in dims) for name, dims in self.tensors.items()}
        return {name.format(expert): shape for expert in self._experts(model) for name, shape in sizes.items()}

    def megatron_tilings(self, transformer_engine: bool, experts: Sequence[int]) -> dict[str, Tiling]:
        """Returns local parameter -> tiling for a rank that has the experts with these numbers."""
        tilings = self.transformer_engine if transformer_engine and self.transformer_engine else self.megatron
        if not self.per_expert:
            return dict(tilings)
        return {
            local.format(i): tiling.of_experts([expert])
            for i, expert in enumerate(experts)
            for local, tiling in tilings.items()
        }

    def vllm_tilings(self, experts: Iterable[int], padded: int | None = None) -> dict[str, Tiling]:
        """Returns local parameter -> tiling for a worker that has the experts with these numbers. padded: the size to
        which the worker pads its share of their intermediate size."""
        if not self.per_expert:
            return dict(self.vllm)
        return {local: replace(tiling.of_experts(experts), padded=padded) for local, tiling in self.vllm.items()}

    def _experts(self, model: ModelShape) -> range:
        return range(model.experts.count) if self.per_expert and model.experts else range(1)


def _size(model: ModelShape, dim: str | tuple[str, ...]) -> int:
    return attrgetter(dim)(model) if isinstance(dim, str) else sum(_size(model, part) for part in dim)
