"""Multi-token prediction (MTP, section 2.2 of arXiv 2412.19437): a layer after the last one that predicts the token
after the next one. Engines draft tokens with it.

Most models are trained without this layer. If a model keeps it, the config has an additional key, whose value is "kept"
or "trained".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KEY = "megarl_mtp"

COUNT = "num_nextn_predict_layers"
"""Key of the number of MTP layers in config.json."""

FAMILIES = ("deepseek_v3", "glm4_moe")
"""Supported `model_type`."""


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
    if model["model_type"] not in FAMILIES:
        return f"megarl supports multi-token prediction only for models of type {' and '.join(FAMILIES)}"
    if model.get(COUNT) != 1:
        return f"its config.json has {COUNT}={model.get(COUNT)}, but megarl supports exactly one such layer"
    return None
