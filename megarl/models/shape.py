"""Derive the architecture parameters that determine the shapes of a model's weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from megarl.core.errors import UserError
from megarl.models.classifier import score_head_of
from megarl.models.families import completed
from megarl.models.huggingface import (
    Experts,
    LatentAttention,
    LinearAttention,
    WindowedAttention,
    experts,
    has_sinks,
    kv_heads,
    latent_attention,
    linear_attention,
    rotary_channels,
    windowed_attention,
)
from megarl.models.mtp import num_mtp_layers, trains_mtp
from megarl.models.unsupported import unsupported
from megarl.models.vision import VisionShape, vision_of

_QKV_BIAS = ("qwen2", "qwen2_5_vl_text")
_QK_NORM = ("qwen3", "qwen3_moe", "qwen3_vl_moe_text", "qwen3_vl_text")
"""Families that always have biases in the query, key and value projections, and families with norms of queries and
keys."""


class LayerKind(NamedTuple):
    """The properties in which a model's layers differ: whether the MLP is a mixture of experts, and whether attention
    is linear."""

    has_experts: bool
    is_linear: bool


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The architecture parameters that determine the shapes of a model's weights.

    Attributes:
        kv_heads: number of key heads, equal to the number of value heads.
        rotary_dim: number of channels per head with a rotary position embedding.
        tied: whether the output layer shares the embedding's weight.
        fused: whether the checkpoint fuses the query, key and value projections, and the gate and up projections.
        mtp_layers: number of multi-token prediction (MTP) layers, which follow the other layers.
        trains_mtp: whether these layers are trained.
        windows: the layers with a sliding window; None if all softmax attention is full.
        has_sinks: whether each attention head has a learned logit that its softmax includes, without a value vector.
        vision: the sizes of the vision tower; None if the model is used without one.
    """

    model_type: str
    num_layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
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
    linear: LinearAttention | None = None
    mtp_layers: int = 0
    trains_mtp: bool = False
    windows: WindowedAttention | None = None
    has_sinks: bool = False
    vision: VisionShape | None = None

    @property
    def query(self) -> int:
        """Number of rows in the query projection."""
        return self.heads * self.head_dim

    @property
    def active_intermediate(self) -> float:
        """Number of MLP rows that process a token, averaged over the layers."""
        if self.experts is None:
            return self.intermediate
        rows = self.experts.active * self.experts.intermediate + self.experts.shared_intermediate
        return sum(rows if mixed else self.intermediate for mixed in self.experts.layers) / self.num_layers

    @property
    def key(self) -> int:
        """Number of rows in the key projection, and in the value projection."""
        return self.kv_heads * self.head_dim

    @property
    def has_output_gate(self) -> bool:
        """Whether softmax attention multiplies its output by a gate, which the query projection also computes. Models
        with gated delta nets do."""
        return self.linear is not None

    @property
    def gated_query(self) -> int:
        """Number of rows in the projection to queries and output gates."""
        return 2 * self.query

    @property
    def softmax_layers(self) -> int:
        """Number of layers with softmax attention. The others are gated delta nets."""
        return self.num_layers - (sum(self.linear.layers) if self.linear else 0)

    @property
    def value(self) -> int:
        """Number of columns in the output projection."""
        return self.heads * (self.latent.value_dim if self.latent else self.head_dim)

    @property
    def latent_keys_and_values(self) -> int:
        """Number of rows in the up-projection from the latent for keys and values."""
        return self.heads * (self.latent.content_dim + self.latent.value_dim) if self.latent else 0

    @property
    def latent_and_position(self) -> int:
        """Number of rows in the down-projection to this latent and to the rotary key channels shared by all heads."""
        return self.latent.kv_rank + self.latent.position_dim if self.latent else 0

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and self.experts.layers[layer]

    def kind(self, layer: int) -> LayerKind:
        """Return the kind of a layer. MTP layers have the kind of the last decoder layer. In models with gated delta
        nets, they have full attention and, as in vLLM, experts if the first layer has them."""
        if layer >= self.num_layers and self.linear is not None:
            return LayerKind(self.has_experts(0), is_linear=False)
        layer = min(layer, self.num_layers - 1)
        return LayerKind(self.has_experts(layer), self.linear is not None and self.linear.layers[layer])

    @classmethod
    def of(cls, hf_config: Mapping[str, Any]) -> ModelShape:
        """Build the shape from a Hugging Face config.json. Raise a UserError if the model family is unknown, a key is
        missing or a feature is not supported."""
        model = _checked(hf_config)
        hidden, heads = _number(model, "hidden_size"), _number(model, "num_attention_heads")
        family, latent, linear = model["model_type"], latent_attention(model), linear_attention(model)
        # With latent attention, head_dim in config.json counts only the rotary channels of a head.
        head_dim = latent.content_dim + latent.position_dim if latent else model["head_dim"] or hidden // heads
        return cls(
            model_type=family,
            num_layers=_number(model, "num_hidden_layers"),
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads(model),
            head_dim=head_dim,
            rotary_dim=latent.position_dim if latent else rotary_channels(model, head_dim),
            intermediate=_number(model, "intermediate_size"),
            vocab=_number(model, "vocab_size"),
            # A classifier's config may set this key, but a classifier has no LM head to tie.
            tied=bool(model["tie_word_embeddings"]) and score_head_of(hf_config) is None,
            qkv_bias=family in _QKV_BIAS or model["attention_bias"],
            attention_out_bias=family not in ("glm4_moe", *_QKV_BIAS) and model["attention_bias"],
            mlp_bias=model["mlp_bias"],
            qk_norm=bool(linear or family in _QK_NORM or (family == "glm4_moe" and model["use_qk_norm"])),
            fused=family == "phi3",
            experts=experts(model),
            latent=latent,
            linear=linear,
            mtp_layers=num_mtp_layers(hf_config),
            trains_mtp=trains_mtp(hf_config),
            windows=windowed_attention(model),
            has_sinks=has_sinks(model),
            vision=vision_of(hf_config),
        )


def _checked(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    try:
        model = completed(hf_config)
    except ValueError as error:
        raise UserError(f"config.json: {error}") from None
    if features := unsupported(model):
        raise UserError(
            f"config.json: {', '.join(features)}: megarl does not support this for {model['model_type']}. Fix: use "
            "another model"
        )
    return model


def _number(model: Mapping[str, Any], key: str) -> int:
    value = model.get(key)
    if not isinstance(value, int):
        raise UserError(
            f"config.json: {key} must be an integer, found {value!r}. Fix: use the config.json of the original model"
        )
    return value
