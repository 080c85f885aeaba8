"""Interpret a Hugging Face config.json: model family, defaults for missing keys, and unsupported features."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megarl.core.errors import UserError

_ANY = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": None,
    "hidden_act": "silu",
    "mlp_bias": False,
    "num_key_value_heads": None,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
}

_GATED_DELTA = _ANY | {
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "head_dim": 256,
    "layer_types": None,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "output_gate_type": "silu",
    "partial_rotary_factor": 0.25,
}
"""Defaults of models with gated delta net layers."""

_GATED_DELTA_EXPERTS = _GATED_DELTA | {
    "moe_intermediate_size": 512,
    "num_key_value_heads": 2,
    "shared_expert_intermediate_size": 512,
}

_DEEPSEEK = _ANY | {
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rope_interleave": True,
    "routed_scaling_factor": 2.5,
    "topk_group": 4,
    "v_head_dim": 128,
}

FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v3": _DEEPSEEK,
    "glm4_moe": _ANY
    | {
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 8,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5,
        "routed_scaling_factor": 1.0,
        "topk_group": 1,
        "use_qk_norm": False,
    },
    "kimi_k2": _DEEPSEEK,
    "llama": _ANY,
    "mistral": _ANY | {"num_key_value_heads": 8, "sliding_window": 4096},
    "mixtral": _ANY
    | {
        "num_experts_per_tok": 2,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "router_jitter_noise": 0.0,
    },
    "phi3": _ANY | {"resid_pdrop": 0.0, "rms_norm_eps": 1e-5},
    "qwen2": _ANY | {"num_key_value_heads": 32, "sliding_window": 4096, "use_sliding_window": False},
    "qwen3": _ANY | {"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096, "use_sliding_window": False},
    "qwen3_moe": _ANY
    | {
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "use_sliding_window": False,
    },
    "qwen3_5_text": _GATED_DELTA | {"num_key_value_heads": 4},
    # Every layer has experts, so config.json has no size of a dense MLP.
    "qwen3_5_moe_text": _GATED_DELTA_EXPERTS | {"intermediate_size": 0, "num_experts": 256, "num_experts_per_tok": 8},
    "qwen3_next": _GATED_DELTA_EXPERTS
    | {
        "decoder_sparse_step": 1,
        "intermediate_size": 5632,
        "mlp_only_layers": None,
        "norm_topk_prob": True,
        "num_experts": 512,
        "num_experts_per_tok": 10,
    },
}
"""Supported `model_type` -> transformers' defaults for keys that config.json omits."""

TEXT_MODELS: Mapping[str, str] = {"qwen3_5": "Qwen3_5ForCausalLM", "qwen3_5_moe": "Qwen3_5MoeForCausalLM"}
"""`model_type` of a multimodal model -> the class of its text model, whose config is in `text_config`."""

TRANSFORMERS_TYPES: Mapping[str, str] = {"kimi_k2": "deepseek_v3"}
"""Supported `model_type` that transformers lacks -> the type of the same architecture in transformers."""

_LATENT_ATTENTION = ("deepseek_v3", "kimi_k2")
_DEEPSEEK_ROUTER = ("deepseek_v3", "glm4_moe", "kimi_k2")
_PARTIAL_ROTATION = ("glm4_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
"""Families with multi-head latent attention, with DeepSeek's router, and with rotary embeddings on only some of the
channels in a head."""

ROPE_TYPES: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
LATENT_ROPE_TYPES: Mapping[str, tuple[str, ...]] = {"default": (), "yarn": ("factor",)}
"""Supported type of rotary embeddings -> parameters that the type requires. Models with latent attention support only
the types in LATENT_ROPE_TYPES."""

FP8_BLOCK = 128
"""Number of rows, and of columns, per block with one scale in fp8 checkpoints."""

_BIASES = {"glm4_moe": ("attention_bias",), "llama": ("attention_bias", "mlp_bias"), "qwen2": ("attention_bias",)}
"""Supported bias keys per model family. Qwen2 always has attention biases, regardless of the key's value."""


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
    """

    count: int
    active: int
    intermediate: int
    shared_intermediate: int
    layers: tuple[bool, ...]
    has_selection_bias: bool = False
    has_shared_gate: bool = False

    @property
    def gates(self) -> int:
        """Number of rows in the projection to the shared experts' gate."""
        return 1

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
class LatentAttention:
    """Sizes of multi-head latent attention. Keys and values are projected from a low-rank latent; queries are as well,
    unless query_rank is None. Each head's query and key have position_dim channels with a rotary embedding and
    content_dim channels without one."""

    query_rank: int | None
    kv_rank: int
    content_dim: int
    position_dim: int
    value_dim: int


_COUNTS = {
    *("decoder_sparse_step", "hidden_size", "intermediate_size", "max_position_embeddings", "num_attention_heads"),
    *("num_hidden_layers", "topk_group", "vocab_size", "full_attention_interval", "linear_conv_kernel_dim"),
    *("linear_key_head_dim", "linear_num_key_heads", "linear_num_value_heads", "linear_value_head_dim"),
}
"""Keys whose value must be a positive integer, because they have no default or are divisors."""

_NUMBERS = (
    *("factor", "high_freq_factor", "low_freq_factor", "original_max_position_embeddings", "partial_rotary_factor"),
    "rope_theta",
)
"""Parameters of rotary embeddings."""

_NAMES = {bool: "true or false", int: "an integer", float: "a number", str: "text"}
_REQUIRED = {
    *("first_k_dense_replace", "kv_lora_rank", "moe_intermediate_size", "n_group", "n_routed_experts", "num_experts"),
    *("num_experts_per_tok", "num_local_experts", "qk_nope_head_dim", "qk_rope_head_dim", "rms_norm_eps"),
    *("routed_scaling_factor", "shared_expert_intermediate_size", "v_head_dim"),
}
"""Keys with a default that must not be null."""

_OPTIONAL = {
    **{"head_dim": 1, "mtp_num_hidden_layers": 1, "num_key_value_heads": 1, "num_nextn_predict_layers": 1},
    "sliding_window": 1,
}
LAYER_TYPES = ("linear_attention", "full_attention")
_OBJECTS = ("id2label", "quantization_config", "rope_parameters", "rope_scaling")

LARGEST = 2**31 - 1
MAX_LAYERS = 10_000


def wrong_type(hf_config: Mapping[str, Any]) -> str | None:
    """Describe the first value in config.json that has the wrong type for its key, or return None."""
    architectures = hf_config.get("architectures")
    if not isinstance(architectures, list | None) or not all(isinstance(name, str) for name in architectures or ()):
        return f"architectures={architectures!r}: expected a list of names"
    for key in _OBJECTS:
        if not isinstance(hf_config.get(key), dict | None):
            return f"{key}={hf_config[key]!r}: expected an object"
    if not isinstance(hf_config.get("mlp_only_layers"), list | None):
        return f"mlp_only_layers={hf_config['mlp_only_layers']!r}: expected a list"
    layer_types = hf_config.get("layer_types")
    if not isinstance(layer_types, list | None) or not all(isinstance(name, str) for name in layer_types or ()):
        return f"layer_types={layer_types!r}: expected a list of names"
    for section in ("rope_parameters", "rope_scaling"):
        for key in _NUMBERS:
            if type(value := (hf_config.get(section) or {}).get(key)) not in (int, float, type(None)):
                return f"{section}.{key}={value!r}: expected a number"
        for key in ("rope_type", "type"):
            if not isinstance(value := (hf_config.get(section) or {}).get(key), str | None):
                return f"{section}.{key}={value!r}: expected text"
    model_type = hf_config.get("model_type")
    defaults = FAMILIES.get(model_type, {}) if isinstance(model_type, str) else {}
    if not defaults:
        return None
    for key in hf_config.keys() & _COUNTS:
        limit = MAX_LAYERS if key == "num_hidden_layers" else LARGEST
        if type(hf_config[key]) is not int or not 0 < hf_config[key] <= limit:
            return f"{key}={hf_config[key]!r}: expected an integer from 1 to {limit}"
    for key, default in {**defaults, **_OPTIONAL}.items():
        value: Any = hf_config.get(key)
        kinds = (int, float) if isinstance(default, float) else type(default)
        if default is None or key in _COUNTS:
            continue
        if value is None:
            if key in hf_config and key in _REQUIRED:
                return f"{key}=null: expected {_NAMES[type(default)]}"
            continue
        if not isinstance(value, kinds) or (isinstance(value, bool) and not isinstance(default, bool)):
            return f"{key}={value!r}: expected {_NAMES[type(default)]}"
        if not isinstance(value, str) and not 0 <= value <= LARGEST:
            return f"{key}={value!r}: expected a number from 0 to {LARGEST}"
    return None


def text_config(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of a multimodal model's text model, which is the part that is trained. `vision_config` is kept,
    so that `untrained_part` can name the omitted part. Other configs are returned unchanged."""
    text, architecture = hf_config.get("text_config"), TEXT_MODELS.get(str(hf_config.get("model_type")))
    if architecture is None or not isinstance(text, dict):
        return dict(hf_config)
    shared = {key: hf_config[key] for key in ("tie_word_embeddings", "dtype", "torch_dtype") if key in hf_config}
    vision = {"vision_config": hf_config["vision_config"]} if "vision_config" in hf_config else {}
    return {**shared, **text, "architectures": [architecture], **vision}


def completed(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with defaults for the keys that config.json omits. Raise a UserError if the model family is not
    supported. The message lists the supported families."""
    model_type = hf_config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise UserError(f"model_type {model_type} is not supported. Fix: use a model of type {', '.join(FAMILIES)}")
    return {**FAMILIES[model_type], **hf_config}


def unsupported(model: Mapping[str, Any]) -> list[str]:
    """Return the unsupported features in a completed config, each as its key and value."""
    return [*_attention(model), *_rope(model), *_others(model), *_experts(model), *_linear_attention(model)]


def weights_dtype(hf_config: Mapping[str, Any]) -> str:
    """Return the dtype of the checkpoint, such as "bfloat16". transformers < 5 calls the key torch_dtype."""
    return hf_config.get("dtype") or hf_config.get("torch_dtype") or "float32"


def rope_parameters(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return rope_type, rope_theta and the parameters for the type. transformers < 5 writes these parameters under
    rope_scaling."""
    parameters = model.get("rope_scaling") or model.get("rope_parameters") or {}
    return {
        "rope_theta": model["rope_theta"],
        "original_max_position_embeddings": model.get("max_position_embeddings"),
        "partial_rotary_factor": model["partial_rotary_factor"],
        **parameters,
        "rope_type": parameters.get("rope_type", parameters.get("type", "default")),
    }


def attention_window(model: Mapping[str, Any]) -> int | None:
    """Return the number of tokens to which a token attends, including itself; None for full causal attention."""
    return model["sliding_window"] if model.get("use_sliding_window", True) else None


def kv_heads(model: Mapping[str, Any]) -> int:
    return model["num_key_value_heads"] or model["num_attention_heads"]


def experts(model: Mapping[str, Any]) -> Experts | None:
    layers = range(model["num_hidden_layers"])
    match model["model_type"]:
        case "mixtral":
            size = model["intermediate_size"]
            return Experts(model["num_local_experts"], model["num_experts_per_tok"], size, 0, (True,) * len(layers))
        case "qwen3_moe" | "qwen3_next" | "qwen3_5_moe_text":
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


def rotary_channels(model: Mapping[str, Any], head_dim: int) -> int:
    """Return the number of channels per head with a rotary embedding, given the number of channels in a head."""
    return int(head_dim * rope_parameters(model)["partial_rotary_factor"])


def untrained_part(hf_config: Mapping[str, Any]) -> str | None:
    """Describe the part of the checkpoint that is neither trained nor exported; None if there is no such part."""
    keys = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
    parts = [f"multi-token prediction ({key}={hf_config[key]})" for key in keys if hf_config.get(key)]
    if (
        hf_config.get("model_type") == "qwen3_next"
    ):  # its config.json does not tell whether the checkpoint has this part
        parts.append("multi-token prediction (tensors mtp.*)")
    parts += ["the vision encoder (vision_config)"] if "vision_config" in hf_config else []
    return ", ".join(parts) or None


def without_untrained_part(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config for a checkpoint without the part that `untrained_part` describes."""
    counts = {key: 0 for key in ("num_nextn_predict_layers", "mtp_num_hidden_layers") if hf_config.get(key)}
    return {key: value for key, value in {**hf_config, **counts}.items() if key != "vision_config"}


def _attention(model: Mapping[str, Any]) -> Iterator[str]:
    supported = _BIASES.get(model["model_type"], ())
    for key in ("attention_bias", "mlp_bias"):
        if model[key] and key not in supported:
            yield f"{key} true"
    for key in ("attention_dropout", "resid_pdrop"):
        if model.get(key):
            yield f"{key} {model[key]}"


def _rope(model: Mapping[str, Any]) -> Iterator[str]:
    key = "rope_scaling" if model.get("rope_scaling") else "rope_parameters"
    rope, known = rope_parameters(model), LATENT_ROPE_TYPES if latent_attention(model) else ROPE_TYPES
    kind = rope["rope_type"]
    if kind not in known:
        yield f"{key} with rope_type {kind}"
    elif missing := [name for name in known[kind] if name not in rope]:
        yield f"{key} with rope_type {kind} without {', '.join(missing)}"
    factor = rope["partial_rotary_factor"]
    partial = isinstance(factor, int | float) and 0 < factor < 1
    if factor != 1 and not (partial and model["model_type"] in _PARTIAL_ROTATION):
        yield f"partial_rotary_factor {factor}"
    if not rope.get("truncate", True):
        yield f"{key} with truncate false"
    if rope.get("attention_factor") is not None:
        yield f"{key} with attention_factor {rope['attention_factor']}"
    if not model.get("rope_interleave", True):
        yield "rope_interleave false"


def _linear_attention(model: Mapping[str, Any]) -> Iterator[str]:
    linear = linear_attention(model)
    if linear is None:
        return
    kinds = model["layer_types"] or ()
    if unknown := set(kinds) - set(LAYER_TYPES):
        yield f"layer_types with {', '.join(sorted(unknown))}"
    if len(linear.layers) != model["num_hidden_layers"]:
        yield f"layer_types with {len(kinds)} layers for num_hidden_layers {model['num_hidden_layers']}"
    if linear.value_heads % linear.key_heads:
        yield f"linear_num_value_heads {linear.value_heads} with linear_num_key_heads {linear.key_heads}"
    if not model["attn_output_gate"]:
        yield "attn_output_gate false"
    if model["output_gate_type"] not in ("silu", "swish"):
        yield f"output_gate_type {model['output_gate_type']}"


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


def _deepseek_router(model: Mapping[str, Any]) -> Iterator[str]:
    """Yield the unsupported features of DeepSeek's router. DeepSeek scores a group of experts by its two best experts.
    Megatron instead uses the average number of active experts per selected group, so this number must be two."""
    for key, supported in (("norm_topk_prob", True), ("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if model.get(key, supported) != supported:
            yield f"{key} {model[key]}"
    active, groups, selected = model["num_experts_per_tok"], model["n_group"], model["topk_group"]
    if groups > selected and active // selected != 2:
        yield f"num_experts_per_tok {active} with topk_group {selected}"
