"""The vision towers of vision-language models, which turn images into features for the text model.

Without `model.vision`, only the text model is used. With it, the config has an additional key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

KEY = "megarl_vision"

CANONICAL_PREFIX, MEGATRON_PREFIX, ENGINE_PREFIX = "model.visual.", "vision.", "visual."
"""Prefixes of the tower's parameters in checkpoints, in Megatron's first chunk and in vLLM."""


@dataclass(frozen=True, slots=True)
class VisionShape:
    """The sizes of a vision tower.

    Attributes:
        model_type: transformers' type of the whole model, such as "qwen3_vl".
        depth, hidden, heads, intermediate: sizes of the tower's transformer.
        patch: height and width of a patch, in pixels.
        temporal_patch: number of frames in a patch; an image is repeated to fill them.
        merge: number of patches, in height and in width, that are merged into one feature.
        out_hidden: channels of a feature, equal to the text model's hidden size.
        deepstack: indices of the tower's layers whose features are added after the text model's first layers.
        image_token: id of the placeholder token.
        rotary_sections: numbers of channel pairs whose angles depend on time, height and width.
        is_interleaved: whether the channels of the sections alternate instead of being consecutive.
    """

    model_type: str
    depth: int
    hidden: int
    heads: int
    intermediate: int
    patch: int
    temporal_patch: int
    merge: int
    out_hidden: int
    deepstack: tuple[int, ...]
    image_token: int
    rotary_sections: tuple[int, int, int]
    is_interleaved: bool


def add_vision(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    return {**hf_config, KEY: True}


def without_vision(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config without the additional key."""
    return {key: value for key, value in hf_config.items() if key != KEY}


def vision_of(hf_config: Mapping[str, Any]) -> VisionShape | None:
    """Return the sizes of the tower; None if the model is used without one."""
    if KEY not in hf_config:
        return None
    raise NotImplementedError
