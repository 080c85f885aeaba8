"""Check that the values in a Hugging Face config.json have the types that their keys require."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.models.eagle import LAYER_IDS
from megarl.models.families import FAMILIES
from megarl.models.multimodal import VISION, WHOLE

_COUNTS = {
    *("decoder_sparse_step", "hidden_size", "intermediate_size", "max_position_embeddings", "num_attention_heads"),
    *("num_hidden_layers", "topk_group", "vocab_size", "full_attention_interval", "linear_conv_kernel_dim"),
    *("linear_key_head_dim", "linear_num_key_heads", "linear_num_value_heads", "linear_value_head_dim"),
}
"""Keys whose value must be a positive integer, because they have no default or are used as divisors."""

_NUMBERS = (
    *("beta_fast", "beta_slow", "factor", "high_freq_factor", "low_freq_factor", "original_max_position_embeddings"),
    *("partial_rotary_factor", "rope_theta"),
)
"""Parameters of rotary embeddings."""

_NAMES = {bool: "true or false", int: "an integer", float: "a number", str: "text"}
_REQUIRED = {
    *("first_k_dense_replace", "kv_lora_rank", "moe_intermediate_size", "n_group", "n_routed_experts", "num_experts"),
    *("num_experts_per_tok", "num_local_experts", "qk_nope_head_dim", "qk_rope_head_dim", "rms_norm_eps"),
    *("routed_scaling_factor", "shared_expert_intermediate_size", "v_head_dim"),
}
"""Keys that have a default and must not be null."""

_OPTIONAL = {
    **{"head_dim": 1, "mtp_num_hidden_layers": 1, "num_key_value_heads": 1, "num_nextn_predict_layers": 1},
    "sliding_window": 1,
    **{"draft_vocab_size": 1, "num_aux_hidden_states": 1, "num_aux_layers": 1, "target_hidden_size": 1},
}
_TOWER_COUNTS = (
    *("depth", "hidden_size", "intermediate_size", "num_heads", "num_position_embeddings", "out_hidden_size"),
    *("patch_size", "spatial_merge_size", "temporal_patch_size", "window_size"),
)
"""Keys of a vision tower's config whose value must be a positive integer."""

_TOWER_LAYERS = ("deepstack_visual_indexes", "fullatt_block_indexes")
_OBJECTS = ("eagle_config", "id2label", "quantization_config", "rope_parameters", "rope_scaling")

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
    for section, values in (("", hf_config), ("eagle_config.", hf_config.get("eagle_config") or {})):
        layer_ids = values.get(LAYER_IDS)
        if not isinstance(layer_ids, list | None) or not all(type(layer) is int for layer in layer_ids or ()):
            return f"{section}{LAYER_IDS}={layer_ids!r}: expected a list of integers"
    for section in ("rope_parameters", "rope_scaling"):
        for key in _NUMBERS:
            if type(value := (hf_config.get(section) or {}).get(key)) not in (int, float, type(None)):
                return f"{section}.{key}={value!r}: expected a number"
        for key in ("rope_type", "type"):
            if not isinstance(value := (hf_config.get(section) or {}).get(key), str | None):
                return f"{section}.{key}={value!r}: expected text"
        sections = (hf_config.get(section) or {}).get("mrope_section")
        if sections is not None and not (_is_counts(sections) and len(sections) == 3):
            return f"{section}.mrope_section={sections!r}: expected a list of three positive integers"
    if WHOLE in hf_config and (problem := _wrong_tower(hf_config)) is not None:
        return problem
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
        if default is None or key in _COUNTS or key in _OBJECTS:
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


def _wrong_tower(hf_config: Mapping[str, Any]) -> str | None:
    """Describe the first value of the wrong type in the config of a vision tower, or return None."""
    image_token = hf_config[WHOLE].get("image_token_id", 0)
    if type(image_token) is not int or not 0 <= image_token <= LARGEST:
        return f"image_token_id={image_token!r}: expected an integer from 0 to {LARGEST}"
    tower = hf_config.get(VISION, {})
    if not isinstance(tower, dict):
        return f"{VISION}={tower!r}: expected an object"
    for key in tower.keys() & set(_TOWER_COUNTS):
        limit = MAX_LAYERS if key == "depth" else LARGEST
        if type(tower[key]) is not int or not 0 < tower[key] <= limit:
            return f"{VISION}.{key}={tower[key]!r}: expected an integer from 1 to {limit}"
    for key in _TOWER_LAYERS:
        layers = tower.get(key)
        if not isinstance(layers, list | None) or not all(type(layer) is int for layer in layers or ()):
            return f"{VISION}.{key}={layers!r}: expected a list of integers"
    return None


def _is_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 < item <= LARGEST for item in value)
