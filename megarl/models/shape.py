"""The numbers of a model's architecture that decide the shapes of its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megarl.core.errors import UserError
from megarl.models.classifier import score_head_of
from megarl.models.huggingface import (
    Experts,
    LatentAttention,
    completed,
    experts,
    kv_heads,
    latent_attention,
    unsupported,
)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The numbers of an architecture that decide the shapes of its weights.

    heads      heads of queries
    kv_heads   heads of keys and values
    tied       whether the head's weight is the embedding's
    fused      whether the checkpoint has query, key and value projections as one tensor, and so gate and up
    """

    model_type: str
    num_layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    qkv_bias: bool
    attention_out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    fused: bool
    experts: Experts | None
    latent: LatentAttention | None

    @property
    def query(self) -> int:
        """The rows of the query projection."""
        return self.heads * self.head_dim

    @property
    def active_intermediate(self) -> float:
        """The rows of the MLPs that a token goes through, the mean over the layers."""
        if self.experts is None:
            return self.intermediate
        rows = self.experts.active * self.experts.intermediate + self.experts.shared_intermediate
        return sum(rows if mixed else self.intermediate for mixed in self.experts.layers) / self.num_layers

    @property
    def key(self) -> int:
        """The rows of the key projection, and of the value projection."""
        return self.kv_heads * self.head_dim

    @property
    def rotary_dim(self) -> int:
        """The channels of a head that turn with its position."""
        return self.latent.position_dim if self.latent else self.head_dim

    @property
    def value(self) -> int:
        """The columns of the output projection."""
        return self.heads * (self.latent.value_dim if self.latent else self.head_dim)

    @property
    def latent_keys_and_values(self) -> int:
        """The rows of the projection from the latent of keys and values."""
        return self.heads * (self.latent.content_dim + self.latent.value_dim) if self.latent else 0

    @property
    def latent_and_position(self) -> int:
        """The rows of the projection to that latent and to the key's channels with positions, which all heads share."""
        return self.latent.kv_rank + self.latent.position_dim if self.latent else 0

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and self.experts.layers[layer]

    @classmethod
    def of(cls, hf_config: Mapping[str, Any]) -> ModelShape:
        """Returns the shape that a Hugging Face config.json describes. Raises UserError for an unknown family, a
        missing key, or a feature that is not supported."""
        model = _checked(hf_config)
        hidden, heads = _number(model, "hidden_size"), _number(model, "num_attention_heads")
        family, latent = model["model_type"], latent_attention(model)
        return cls(
            model_type=family,
            num_layers=_number(model, "num_hidden_layers"),
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads(model),
            # In latent attention, head_dim of config.json is only the part of a head that has positions.
            head_dim=latent.content_dim + latent.position_dim if latent else model["head_dim"] or hidden // heads,
            intermediate=_number(model, "intermediate_size"),
            vocab=_number(model, "vocab_size"),
            # A classifier's config may say so too, but there is no language head to tie.
            tied=bool(model["tie_word_embeddings"]) and score_head_of(hf_config) is None,
            qkv_bias=family == "qwen2" or model["attention_bias"],
            attention_out_bias=family != "qwen2" and model["attention_bias"],
            mlp_bias=model["mlp_bias"],
            qk_norm=family in ("qwen3", "qwen3_moe"),
            fused=family == "phi3",
            experts=experts(model),
            latent=latent,
        )


def _checked(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    try:
        model = completed(hf_config)
    except ValueError as error:
        raise UserError(f"config.json: {error}") from None
    if features := unsupported(model):
        raise UserError(f"config.json: {', '.join(features)}: not supported for {model['model_type']}")
    return model


def _number(model: Mapping[str, Any], key: str) -> int:
    value = model.get(key)
    if not isinstance(value, int):
        raise UserError(f"config.json: {key} must be an integer, found {value!r}")
    return value
