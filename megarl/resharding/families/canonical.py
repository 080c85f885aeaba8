"""The tensors of one model's Hugging Face checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.resharding.families.classifier import score_head_of
from megarl.resharding.families.registry import family_of
from megarl.resharding.families.shape import ModelShape

Shape = tuple[int, ...]


class Canonical:
    """Names and shapes, by place: those outside the layers, and those of any layer (names without its prefix)."""

    def __init__(self, hf_config: Mapping[str, Any]):
        self.model = ModelShape.of(hf_config)
        self.family = family_of(hf_config)
        self.layer_shapes: dict[str, Shape] = {
            name: tuple(getattr(self.model, dim) for dim in dims) for name, dims in self.family.tensors.items()
        }
        self.outer_shapes: dict[str, Shape] = {
            self.family.embedding: (self.model.vocab, self.model.hidden),
            self.family.final_norm: (self.model.hidden,),
        }
        self.score_head = score_head_of(hf_config)
        if self.score_head is not None:
            self.outer_shapes |= self.score_head.shapes(self.model.hidden)
        elif not self.model.tied:
            self.outer_shapes[self.family.head] = (self.model.vocab, self.model.hidden)

    @property
    def head(self) -> str:
        """The tensor that a language model's output layer has as its weight."""
        return self.family.embedding if self.model.tied else self.family.head

    def layer_prefix(self, layer: int) -> str:
        return self.family.layer.format(layer)
