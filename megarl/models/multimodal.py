"""Convert between the config.json of multimodal models and the text-model configs used inside megarl.

Hugging Face nests the text model's config in that of the whole model. Older Qwen2.5-VL folders use a single level.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.models.families import TEXT_MODELS

TEXT, VISION = "text_config", "vision_config"
"""Keys of the nested configs."""

WHOLE = "megarl_multimodal"
"""Key that stores the multimodal model's outer config keys in its text model's config."""

WITH_TOWER = "megarl_vision"
"""Key that marks the config of a text model that is used with its vision tower."""

_SHARED = ("dtype", "quantization_config", "tie_word_embeddings", "torch_dtype")
"""Keys that apply to the text model if the whole model's config has them."""

_OUTER = ("architectures", "model_type", "transformers_version")
_OUTER_PREFIXES = ("image_", "video_", "vision_")
"""Keys of the whole model in a config.json with one level."""


TEXT_TYPES: Mapping[str, str] = {
    name: f"{name}_text" for name in ("qwen2_5_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe")
}
"""`model_type` of a multimodal model -> that of its text model."""

WHOLE_ONLY = tuple(text for whole, text in TEXT_TYPES.items() if whole not in TEXT_MODELS)
"""Text-model types that vLLM can run only as part of the whole model."""


def text_config(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of a multimodal model's text model. The keys `vision_config` and `WHOLE` keep the rest, so that
    `whole_config` can restore it. Other configs are returned unchanged, except that megarl's own keys are removed: a
    file must not set them."""
    hf_config = {key: value for key, value in hf_config.items() if key not in (WHOLE, WITH_TOWER)}
    whole = str(hf_config.get("model_type"))
    nested = hf_config.get(TEXT)
    has_one_level = nested is None and VISION in hf_config
    if whole not in TEXT_TYPES or not (has_one_level or isinstance(nested, dict)):
        return hf_config
    others = {key: value for key, value in hf_config.items() if key not in (TEXT, VISION)}
    if has_one_level:
        outer = {key: value for key, value in others.items() if key in _OUTER or key.startswith(_OUTER_PREFIXES)}
        text = {key: value for key, value in others.items() if key not in outer}
    else:
        outer = others
        text = {key: value for key, value in (nested or {}).items() if key not in (WHOLE, WITH_TOWER)}
    shared = {key: others[key] for key in _SHARED if key in others}
    if "tie_word_embeddings" in others or "tie_word_embeddings" in text:
        # As in transformers, the outer key decides, but Qwen2.5-VL's embeddings are also tied if the inner key is true.
        is_tied = whole == "qwen2_5_vl" and bool(text.get("tie_word_embeddings"))
        text["tie_word_embeddings"] = bool(others.get("tie_word_embeddings")) or is_tied
    named = {"architectures": [TEXT_MODELS[whole]]} if whole in TEXT_MODELS else {}
    vision = {VISION: hf_config[VISION]} if VISION in hf_config else {}
    return {"model_type": TEXT_TYPES[whole], **shared, **text, **named, **vision, WHOLE: outer}


def whole_config(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the multimodal model's config.json, in its nested form, given the result of `text_config`."""
    outer = hf_config[WHOLE]
    text = {key: value for key, value in hf_config.items() if key not in ("architectures", VISION, WHOLE)}
    shared = {key: text[key] for key in _SHARED if key in text}
    return {**outer, **shared, TEXT: text, VISION: hf_config[VISION]}
