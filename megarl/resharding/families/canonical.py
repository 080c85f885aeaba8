"""The tensors of one model's Hugging Face checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.config.classifier import score_head_of
from megarl.config.value_head import value_head_shapes
from megarl.resharding.families.attention import attention_parts
from megarl.resharding.families.experts import expert_parts
from megarl.resharding.families.latent_attention import latent_attention_parts
from megarl.resharding.families.mlp import mlp_parts
from megarl.resharding.families.part import Part
from megarl.resharding.families.shape import ModelShape

Shape = tuple[int, ...]

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


class Canonical:
    """Names and shapes, by place: those outside the layers, and those of a layer (names without its prefix)."""

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

    @property
    def head(self) -> str:
        """The tensor that a language model's output layer has as its weight."""
        return EMBEDDING if self.model.tied else HEAD

    def layer_prefix(self, layer: int) -> str:
        return f"model.layers.{layer}."

    def layer_parts(self, layer: int) -> list[Part]:
        mlp = expert_parts(self.model) if self.model.has_experts(layer) else mlp_parts(self.model)
        attention = latent_attention_parts(self.model) if self.model.latent else attention_parts(self.model)
        return [*attention, *mlp]

    def layer_shapes(self, layer: int) -> dict[str, Shape]:
        return {name: shape for part in self.layer_parts(layer) for name, shape in part.shapes(self.model).items()}
