"""Describe the tensors in a model's Hugging Face checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Self

from megarl.models.classifier import score_head_of
from megarl.models.shape import ModelShape
from megarl.models.value_head import value_head_shapes
from megarl.resharding.families.attention import attention_parts
from megarl.resharding.families.experts import expert_parts
from megarl.resharding.families.latent_attention import latent_attention_parts
from megarl.resharding.families.mlp import mlp_parts
from megarl.resharding.families.part import Part

Shape = tuple[int, ...]

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


class Canonical:
    """Names and shapes of the tensors in a checkpoint.

    `outer_shapes` has the tensors outside the layers, and `layer_shapes` those in one layer. Names in a layer omit the
    layer's prefix.
    """

    def __init__(self, hf_config: Mapping[str, Any]):
        self.model = ModelShape.of(hf_config)
        self.outer_shapes: dict[str, Shape] = {
            EMBEDDING: (self.model.vocab, self.model.hidden),
            FINAL_NORM: (self.model.hidden,),
        }
        self.score_head = score_head_of(hf_config)
        if self.score_head is not None:
            self.outer_shapes |= self.score_head.shapes(self.model.hidden)
        elif not self.model.tied:
            self.outer_shapes[HEAD] = (self.model.vocab, self.model.hidden)
        self.value_head = value_head_shapes(hf_config)
        self.outer_shapes |= self.value_head
        self._layers: dict[bool, _Layer] = {}

    @property
    def head(self) -> str:
        """Name of the tensor that a language model's output layer uses as its weight."""
        return EMBEDDING if self.model.tied else HEAD

    def layer_prefix(self, layer: int) -> str:
        return f"model.layers.{layer}."

    def layer_parts(self, layer: int) -> list[Part]:
        return self._layer(layer).parts

    def layer_shapes(self, layer: int) -> dict[str, Shape]:
        return self._layer(layer).shapes

    def float32(self, layer: int) -> frozenset[str]:
        """Return the names of the layer's tensors that are float32 regardless of the model's dtype."""
        return self._layer(layer).float32

    def quantized(self, layer: int) -> frozenset[str]:
        """Return the names of the layer's tensors that are quantized for engines with quantized weights."""
        return self._layer(layer).quantized

    def _layer(self, layer: int) -> _Layer:
        has_experts = self.model.has_experts(layer)
        if has_experts not in self._layers:
            self._layers[has_experts] = _Layer.of(self.model, has_experts)
        return self._layers[has_experts]


class _Layer(NamedTuple):
    """The parts and tensors in a layer. All layers with experts share them, and so do all dense layers."""

    parts: list[Part]
    shapes: dict[str, Shape]
    float32: frozenset[str]
    quantized: frozenset[str]

    @classmethod
    def of(cls, model: ModelShape, has_experts: bool) -> Self:
        parts = parts_of_layer(model, has_experts)
        shapes = {name: shape for part in parts for name, shape in part.shapes(model).items()}
        quantized_shapes = (part.shapes(model) for part in parts if part.quantized)
        return cls(
            parts,
            shapes,
            frozenset(name for part in parts for name in part.float32),
            frozenset(name for tensors in quantized_shapes for name, shape in tensors.items() if len(shape) == 2),
        )


def parts_of_layer(model: ModelShape, has_experts: bool) -> list[Part]:
    attention = latent_attention_parts(model) if model.latent else attention_parts(model)
    return [*attention, *(expert_parts(model) if has_experts else mlp_parts(model))]
