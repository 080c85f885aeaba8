"""Find the features in a Hugging Face config.json that megarl does not support."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from megarl.models.huggingface import (
    LAYER_TYPES,
    WINDOW_LAYER_TYPES,
    experts,
    latent_attention,
    linear_attention,
    rope_parameters,
    rotary_channels,
    windowed_attention,
)
from megarl.models.multimodal import VISION
from megarl.models.vision import CHANNELS, vision_of

ROPE_TYPES: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
LATENT_ROPE_TYPES: Mapping[str, tuple[str, ...]] = {"default": (), "yarn": ("factor",)}
GPT_OSS_ROPE_TYPES: Mapping[str, tuple[str, ...]] = {"yarn": ("factor", "beta_fast", "beta_slow")}
"""Supported type of rotary embeddings -> parameters that the type requires. Models with latent attention support only
the types in LATENT_ROPE_TYPES, and gpt-oss only the one in GPT_OSS_ROPE_TYPES."""

_BIASES = {
    **{"glm4_moe": ("attention_bias",), "gpt_oss": ("attention_bias",), "qwen2": ("attention_bias",)},
    **{"qwen2_5_vl_text": ("attention_bias",)},
    "llama": ("attention_bias", "mlp_bias"),
}
"""Supported bias keys per model family. Qwen2 always has attention biases, regardless of the key's value."""

_ENGINE_VALUES = {
    "gpt_oss": {
        **{"attention_bias": True, "rms_norm_eps": 1e-5, "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        "tie_word_embeddings": False,
    },
}
"""model_type -> keys that vLLM ignores, and the values that it assumes instead. For gpt-oss, vLLM also ignores
layer_types."""

_PARTIAL_ROTATION = ("glm4_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
"""Families with rotary embeddings on only some of the channels in a head."""


def unsupported(model: Mapping[str, Any]) -> list[str]:
    """Return the unsupported features in a completed config, each as its key and value."""
    parts = _attention, _windows, _rope, _others, _experts, _linear_attention, _engine_values, _vision
    return [feature for part in parts for feature in part(model)]


def _attention(model: Mapping[str, Any]) -> Iterator[str]:
    supported = _BIASES.get(model["model_type"], ())
    for key in ("attention_bias", "mlp_bias"):
        if model[key] and key not in supported:
            yield f"{key} true"
    for key in ("attention_dropout", "resid_pdrop"):
        if model.get(key):
            yield f"{key} {model[key]}"


def _windows(model: Mapping[str, Any]) -> Iterator[str]:
    if windowed_attention(model) is not None:
        yield from _layer_types(model, WINDOW_LAYER_TYPES)


def _layer_types(model: Mapping[str, Any], known: Collection[str]) -> Iterator[str]:
    kinds, num_layers = model["layer_types"], model["num_hidden_layers"]
    if unknown := set(kinds or ()) - set(known):
        yield f"layer_types with {', '.join(sorted(unknown))}"
    if kinds and len(kinds) != num_layers:
        yield f"layer_types with {len(kinds)} layers for num_hidden_layers {num_layers}"


def _rope(model: Mapping[str, Any]) -> Iterator[str]:
    key = "rope_scaling" if model.get("rope_scaling") else "rope_parameters"
    is_gpt_oss = model["model_type"] == "gpt_oss"
    known = GPT_OSS_ROPE_TYPES if is_gpt_oss else LATENT_ROPE_TYPES if latent_attention(model) else ROPE_TYPES
    rope = rope_parameters(model)
    kind = rope["rope_type"]
    if kind not in known:
        yield f"{key} with rope_type {kind}"
    elif missing := [name for name in known[kind] if name not in rope]:
        yield f"{key} with rope_type {kind} without {', '.join(missing)}"
    factor = rope["partial_rotary_factor"]
    partial = isinstance(factor, int | float) and 0 < factor < 1
    if factor != 1 and not (partial and model["model_type"] in _PARTIAL_ROTATION):
        yield f"partial_rotary_factor {factor}"
    if not rope.get("truncate", True) and not is_gpt_oss:
        yield f"{key} with truncate false"
    for name in ("attention_factor", *(("mscale", "mscale_all_dim") if is_gpt_oss else ())):
        if rope.get(name) is not None:
            yield f"{key} with {name} {rope[name]}"
    if not model.get("rope_interleave", True):
        yield "rope_interleave false"


def _linear_attention(model: Mapping[str, Any]) -> Iterator[str]:
    linear = linear_attention(model)
    if linear is None:
        return
    yield from _layer_types(model, LAYER_TYPES)
    if linear.value_heads % linear.key_heads:
        yield f"linear_num_value_heads {linear.value_heads} with linear_num_key_heads {linear.key_heads}"
    if not model["attn_output_gate"]:
        yield "attn_output_gate false"
    if model["output_gate_type"] not in ("silu", "swish"):
        yield f"output_gate_type {model['output_gate_type']}"


def _engine_values(model: Mapping[str, Any]) -> Iterator[str]:
    for key, value in _ENGINE_VALUES.get(model["model_type"], {}).items():
        if model[key] != value:
            yield f"{key} {str(model[key]).lower()}"
    windows = windowed_attention(model) if model["model_type"] == "gpt_oss" else None
    if windows is not None and windows.layers != tuple(layer % 2 == 0 for layer in range(len(windows.layers))):
        yield "layer_types that do not alternate, starting with sliding_attention"


def _others(model: Mapping[str, Any]) -> Iterator[str]:
    if model["hidden_act"] != "silu":
        yield f"hidden_act {model['hidden_act']}"
    if model["quantization_config"]:
        yield f"quantization_config with quant_method {model['quantization_config'].get('quant_method')}"


def _experts(model: Mapping[str, Any]) -> Iterator[str]:
    mixture = experts(model)
    if mixture is None:
        return
    if model.get("router_jitter_noise"):
        yield f"router_jitter_noise {model['router_jitter_noise']}"
    # After normalization, the weight of a single active expert is one, so the router has no gradient.
    if mixture.active == 1 and model.get("norm_topk_prob", True):
        yield "num_experts_per_tok 1"
    if mixture.has_selection_bias:
        yield from _deepseek_router(model)
    # In transformers, these models always normalize; in vLLM, the key decides.
    if model["model_type"] == "qwen3_vl_moe_text" and not model.get("norm_topk_prob", True):
        yield "norm_topk_prob false"


def _vision(model: Mapping[str, Any]) -> Iterator[str]:
    vision = vision_of(model)
    if vision is None:
        return
    tower, rope = model[VISION], rope_parameters(model)
    activation = "silu" if vision.is_gated else "gelu_pytorch_tanh"
    channels = tower.get("in_channels", tower.get("in_chans", CHANNELS))
    if tower.get("hidden_act", activation) != activation:
        yield f"vision_config with hidden_act {tower['hidden_act']}"
    if channels != CHANNELS:
        yield f"vision_config with in_channels {channels}"
    if vision.hidden % (4 * vision.heads):  # half of a head's pairs of channels depend on height, half on width
        yield f"vision_config with hidden_size {vision.hidden} and num_heads {vision.heads}"
    if vision.out_hidden != model["hidden_size"]:
        yield f"vision_config with out_hidden_size {vision.out_hidden} for hidden_size {model['hidden_size']}"
    if math.isqrt(vision.positions) ** 2 != vision.positions:
        yield f"vision_config with num_position_embeddings {vision.positions}, which is not a square"
    inner = [layer for layer in vision.deepstack if not 0 <= layer < vision.depth]
    if inner or (vision.deepstack and not vision.has_deepstack):
        yield f"vision_config with deepstack_visual_indexes {list(vision.deepstack)}"
    if len(vision.deepstack) > model["num_hidden_layers"]:
        num_layers = model["num_hidden_layers"]
        yield f"deepstack_visual_indexes with {len(vision.deepstack)} layers for num_hidden_layers {num_layers}"
    if vision.window is not None and vision.window < vision.merge:
        yield f"vision_config with window_size {tower['window_size']} for patches of {vision.patch} pixels"
    if rope["rope_type"] != "default":
        yield f"rope_type {rope['rope_type']} with images"
    head_dim = model["head_dim"] or model["hidden_size"] // model["num_attention_heads"]
    pairs = rotary_channels(model, head_dim) // 2
    if sum(vision.rotary_sections) != pairs:
        yield f"mrope_section {list(vision.rotary_sections)} for {pairs} pairs of channels"


def _deepseek_router(model: Mapping[str, Any]) -> Iterator[str]:
    """Yield the unsupported features of DeepSeek's router. DeepSeek scores a group of experts by its two best experts.
    Megatron instead uses the average number of active experts per selected group, so this number must be two."""
    for key, supported in (("norm_topk_prob", True), ("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if model.get(key, supported) != supported:
            yield f"{key} {model[key]}"
    active, groups, selected = model["num_experts_per_tok"], model["n_group"], model["topk_group"]
    if groups > selected and active // selected != 2:
        yield f"num_experts_per_tok {active} with topk_group {selected}"
