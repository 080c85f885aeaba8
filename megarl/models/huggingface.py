"""Interpret a Hugging Face config.json: the trained part of the model, and the sizes of its layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megarl.models.families import FAMILIES
from megarl.models.mtp import COUNTS, num_mtp_layers, without_mtp
from megarl.models.multimodal import VISION, WHOLE, whole_config
from megarl.models.vision import vision_of, without_vision

_LATENT_ATTENTION = ("deepseek_v3", "kimi_k2")
_DEEPSEEK_ROUTER = ("deepseek_v3", "glm4_moe", "kimi_k2")
"""Families with multi-head latent attention, and families with DeepSeek's router."""

_WINDOWS = ("gpt_oss",)
_SINKS = ("gpt_oss",)
"""Families for which the trainer computes sliding windows, and families with attention sinks."""

LAYER_TYPES = ("linear_attention", "full_attention")
WINDOW_LAYER_TYPES = ("full_attention", "sliding_attention")
"""Values of `layer_types` in models with gated delta nets, and in models with sliding windows."""

FP8_BLOCK = 128
"""Number of rows, and of columns, per block with one scale in fp8 checkpoints."""


@dataclass(frozen=True, slots=True)
class Experts:
    """The sizes of a mixture of experts.

    Attributes:
        active: number of routed experts per token.
        intermediate: number of rows in one expert's MLP.
        shared_intermediate: number of rows in the shared experts' MLP, which processes every token; 0 without shared
            experts.
        layers: for each layer, whether it has experts; if not, it has a dense MLP.
        has_selection_bias: whether the router is DeepSeek's: sigmoid scores, and a bias that affects only which experts
            are selected.
        has_shared_gate: whether the shared experts' output is multiplied by a gate.
        is_interleaved: whether experts and router are gpt-oss's: with biases, and with experts whose gate and up rows
            alternate in one tensor.
    """

    count: int
    active: int
    intermediate: int
    shared_intermediate: int
    layers: tuple[bool, ...]
    has_selection_bias: bool = False
    has_shared_gate: bool = False
    is_interleaved: bool = False

    @property
    def gates(self) -> int:
        """Number of rows in the projection to the shared experts' gate."""
        return 1

    @property
    def gate_and_up(self) -> int:
        """Number of rows in one expert's projection to gate and up."""
        return 2 * self.intermediate

    @property
    def number_bytes(self) -> int:
        """Number of bytes per expert index in a route. An index of −1 means no expert."""
        return 1 if self.count <= 128 else 2

    @property
    def route_bytes(self) -> int:
        """Number of bytes in a token's route through all layers."""
        return sum(self.layers) * self.active * self.number_bytes


@dataclass(frozen=True, slots=True)
class LinearAttention:
    """Sizes of the gated delta net layers.

    Attributes:
        width: number of tokens that the causal convolution covers.
        layers: for each layer, whether it is a gated delta net; if not, it has full attention.
        is_grouped: whether the checkpoint stores the projections' rows by key head.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int
    layers: tuple[bool, ...]
    is_grouped: bool

    @property
    def keys(self) -> int:
        """Number of query rows, and of key rows."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Number of value rows, and of gate rows."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Number of channels in the convolution: queries, keys and values."""
        return 2 * self.keys + self.values

    @property
    def projected(self) -> int:
        """Number of query, key, value and gate rows."""
        return self.channels + self.values

    @property
    def per_token(self) -> int:
        """Number of rows for a token's step size and decay, two for each value head."""
        return 2 * self.value_heads

    @property
    def unconvolved(self) -> int:
        """Size of a convolution's middle axis, which depthwise convolutions do not use."""
        return 1

    @property
    def value_heads_per_key(self) -> int:
        return self.value_heads // self.key_heads

    @property
    def value_rows_per_key(self) -> int:
        """Number of value rows per key head."""
        return self.value_heads_per_key * self.value_dim


@dataclass(frozen=True, slots=True)
class WindowedAttention:
    """Layers whose attention is restricted to a sliding window.

    Attributes:
        size: number of tokens that a token attends to, including itself.
        layers: for each layer, whether it has a window; if not, a token attends to all tokens before it.
    """

    size: int
    layers: tuple[bool, ...]

    @property
    def share(self) -> float:
        """Share of the layers that have a window."""
        return sum(self.layers) / len(self.layers)


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Sizes of multi-head latent attention. Keys and values are projected from a low-rank latent; queries are as well,
    unless query_rank is None. Each head's query and key have position_dim channels with a rotary embedding and
    content_dim channels without one."""

    query_rank: int | None
    kv_rank: int
    content_dim: int
    position_dim: int
    value_dim: int


def dequantized(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of an MXFP4 checkpoint after dequantization to bfloat16. Other configs are returned
    unchanged."""
    method = (hf_config.get("quantization_config") or {}).get("quant_method")
    if method != "mxfp4":
        return dict(hf_config)
    rest = {key: value for key, value in hf_config.items() if key not in ("quantization_config", "torch_dtype")}
    return {**rest, "dtype": "bfloat16"}


def weights_dtype(hf_config: Mapping[str, Any]) -> str:
    """Return the dtype of the checkpoint, such as "bfloat16". transformers < 5 calls the key torch_dtype."""
    return hf_config.get("dtype") or hf_config.get("torch_dtype") or "float32"


def rope_parameters(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return rope_type, rope_theta and the parameters for the type. transformers < 5 writes these parameters under
    rope_scaling."""
    parameters = model.get("rope_scaling") or model.get("rope_parameters") or {}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    return {
        "rope_theta": model["rope_theta"],
        "original_max_position_embeddings": model.get("max_position_embeddings"),
        "partial_rotary_factor": model["partial_rotary_factor"],
        **parameters,
        # Qwen2.5-VL folders call the type `mrope`; its frequencies are the default ones.
        "rope_type": "default" if kind == "mrope" else kind,
    }


def attention_window(model: Mapping[str, Any]) -> int | None:
    """Return the number of tokens that a token attends to in every layer, including itself. Return None for full causal
    attention, and for families whose windows the trainer computes (see `windowed_attention`)."""
    if model["model_type"] in _WINDOWS:
        return None
    return model["sliding_window"] if model.get("use_sliding_window", True) else None


def kv_heads(model: Mapping[str, Any]) -> int:
    return model["num_key_value_heads"] or model["num_attention_heads"]


def replicates_kv_heads(model_type: str) -> bool:
    """Return whether vLLM replicates KV heads if an engine has more workers than the model has KV heads."""
    return model_type != "gpt_oss"


def experts(model: Mapping[str, Any]) -> Experts | None:
    layers = range(model["num_hidden_layers"])
    match model["model_type"]:
        case "mixtral":
            size = model["intermediate_size"]
            return Experts(model["num_local_experts"], model["num_experts_per_tok"], size, 0, (True,) * len(layers))
        case "gpt_oss":
            size, every = model["intermediate_size"], (True,) * len(layers)
            count, active = model["num_local_experts"], model["num_experts_per_tok"]
            return Experts(count, active, size, 0, every, is_interleaved=True)
        case "qwen3_moe" | "qwen3_next" | "qwen3_vl_moe_text" | "qwen3_5_moe_text":
            dense, step = model.get("mlp_only_layers") or (), model.get("decoder_sparse_step", 1)
            has_shared = "shared_expert_intermediate_size" in FAMILIES[model["model_type"]]
            return Experts(
                # transformers 5 writes num_local_experts.
                model.get("num_local_experts", model["num_experts"]),
                model["num_experts_per_tok"],
                model["moe_intermediate_size"],
                model["shared_expert_intermediate_size"] if has_shared else 0,
                tuple(layer not in dense and (layer + 1) % step == 0 for layer in layers),
                has_shared_gate=has_shared,
            )
        case family if family in _DEEPSEEK_ROUTER:
            return Experts(
                model["n_routed_experts"],
                model["num_experts_per_tok"],
                model["moe_intermediate_size"],
                model["moe_intermediate_size"] * (model["n_shared_experts"] or 0),
                tuple(layer >= model["first_k_dense_replace"] for layer in layers),
                has_selection_bias=True,
            )
    return None


def latent_attention(model: Mapping[str, Any]) -> LatentAttention | None:
    if model["model_type"] not in _LATENT_ATTENTION:
        return None
    return LatentAttention(
        query_rank=model["q_lora_rank"],
        kv_rank=model["kv_lora_rank"],
        content_dim=model["qk_nope_head_dim"],
        position_dim=model["qk_rope_head_dim"],
        value_dim=model["v_head_dim"],
    )


def linear_attention(model: Mapping[str, Any]) -> LinearAttention | None:
    if "linear_num_key_heads" not in FAMILIES[model["model_type"]]:
        return None
    interval, num_layers = model["full_attention_interval"], model["num_hidden_layers"]
    kinds = model["layer_types"] or [LAYER_TYPES[(layer + 1) % interval == 0] for layer in range(num_layers)]
    return LinearAttention(
        key_heads=model["linear_num_key_heads"],
        value_heads=model["linear_num_value_heads"],
        key_dim=model["linear_key_head_dim"],
        value_dim=model["linear_value_head_dim"],
        width=model["linear_conv_kernel_dim"],
        layers=tuple(kind == "linear_attention" for kind in kinds),
        is_grouped=model["model_type"] == "qwen3_next",
    )


def windowed_attention(model: Mapping[str, Any]) -> WindowedAttention | None:
    if model["model_type"] not in _WINDOWS or model["sliding_window"] is None:
        return None
    layers = range(model["num_hidden_layers"])
    kinds = model["layer_types"] or [WINDOW_LAYER_TYPES[(layer + 1) % 2] for layer in layers]
    return WindowedAttention(model["sliding_window"], tuple(kind == "sliding_attention" for kind in kinds))


def has_sinks(model: Mapping[str, Any]) -> bool:
    """Return whether each attention head has a learned logit that its softmax includes, without a value vector."""
    return model["model_type"] in _SINKS


def rotary_channels(model: Mapping[str, Any], head_dim: int) -> int:
    """Return the number of channels per head with a rotary embedding, given the number of channels in a head."""
    return int(head_dim * rope_parameters(model)["partial_rotary_factor"])


def untrained_part(hf_config: Mapping[str, Any]) -> str | None:
    """Describe the part of the checkpoint that is neither trained nor exported; None if there is no such part."""
    parts = [f"multi-token prediction ({key}={hf_config[key]})" for key in _omitted_mtp_keys(hf_config)]
    # The config.json of Qwen3-Next does not show whether the checkpoint has this part.
    if hf_config.get("model_type") == "qwen3_next" and not num_mtp_layers(hf_config):
        parts.append("multi-token prediction (tensors mtp.*)")
    parts += ["the vision encoder (vision_config)"] if VISION in hf_config and vision_of(hf_config) is None else []
    return ", ".join(parts) or None


def without_untrained_part(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the contents of config.json for a checkpoint without the part that `untrained_part` describes. With a
    vision tower, this is the nested config of the whole model."""
    kept = {**without_mtp(hf_config), **dict.fromkeys(_omitted_mtp_keys(hf_config), 0)}
    if vision_of(hf_config) is not None:
        return whole_config(without_vision(kept))
    return {key: value for key, value in kept.items() if key not in (VISION, WHOLE)}


def _omitted_mtp_keys(hf_config: Mapping[str, Any]) -> list[str]:
    """Return the keys of config.json that count MTP layers, unless the model keeps them."""
    keys = dict.fromkeys(COUNTS.values())
    return [] if num_mtp_layers(hf_config) else [key for key in keys if hf_config.get(key)]
