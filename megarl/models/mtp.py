"""Multi-token prediction (MTP, section 2.2 of arXiv 2412.19437): an additional layer after the decoder layers, which
predicts the token after the next one. Engines can use it to draft tokens.

Most models are trained without this layer. If a model keeps it, the config has an additional key, whose value is "kept"
or "trained".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KEY = "megarl_mtp"

COUNTS = {
    **dict.fromkeys(("deepseek_v3", "glm4_moe", "qwen3_next"), "num_nextn_predict_layers"),
    **dict.fromkeys(("qwen3_5_moe_text", "qwen3_5_text"), "mtp_num_hidden_layers"),
}
"""Supported `model_type` -> key of the number of MTP layers in config.json."""


def add_mtp(hf_config: Mapping[str, Any], is_trained: bool = False) -> dict[str, Any]:
    return {**hf_config, KEY: "trained" if is_trained else "kept"}


def without_mtp(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config without the additional key, as in Hugging Face folders."""
    return {key: value for key, value in hf_config.items() if key != KEY}


def num_mtp_layers(hf_config: Mapping[str, Any]) -> int:
    """Return the number of MTP layers that the model keeps."""
    return 1 if KEY in hf_config else 0


def trains_mtp(hf_config: Mapping[str, Any]) -> bool:
    return hf_config.get(KEY) == "trained"


def why_no_mtp(model: Mapping[str, Any]) -> str | None:
    """Return why a model cannot keep an MTP layer; None if it can."""
    family = model["model_type"]
    if family not in COUNTS:
        return f"megarl supports multi-token prediction only for models of type {', '.join(COUNTS)}"
    key = COUNTS[family]
    # The config.json of Qwen3-Next does not have the key.
    if model.get(key, 1 if family == "qwen3_next" else None) != 1:
        return f"its config.json has {key}={model.get(key)}, but megarl supports exactly one such layer"
    if model.get("mtp_use_dedicated_embeddings"):
        return "its config.json has mtp_use_dedicated_embeddings=true, but vLLM shares the model's embeddings"
    return None
