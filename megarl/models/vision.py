"""The vision towers of vision-language models, which turn images into features for the text model.

With `model.vision`, a config has the additional key WITH_TOWER. Without it, only the text model is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megarl.models.multimodal import VISION, WHOLE, WITH_TOWER

CANONICAL_PREFIX, MEGATRON_PREFIX, ENGINE_PREFIX = "model.visual.", "vision.", "visual."
"""Prefixes of the tower's parameters in checkpoints, in Megatron's first chunk and in vLLM."""


_QWEN3_TOWER = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "num_position_embeddings": 2304,
    "out_hidden_size": 3584,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_QWEN3_DEEPSTACK = _QWEN3_TOWER | {"deepstack_visual_indexes": [8, 16, 24]}

TOWERS: Mapping[str, Mapping[str, Any]] = {
    "qwen2_5_vl": {
        "depth": 32,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "hidden_size": 3584,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 112,
    },
    "qwen3_5": _QWEN3_TOWER,
    "qwen3_5_moe": _QWEN3_TOWER,
    "qwen3_vl": _QWEN3_DEEPSTACK,
    "qwen3_vl_moe": _QWEN3_DEEPSTACK,
}
"""`model_type` of a multimodal model -> transformers' defaults for keys that its vision_config omits."""

_ROTARY_SECTIONS = {
    "qwen2_5_vl": (16, 24, 24),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), (11, 11, 10)),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe"), (24, 20, 20)),
}
_IMAGE_TOKENS = {"qwen3_5": 248056, "qwen3_5_moe": 248056}
_IMAGE_TOKEN = 151655
"""transformers' defaults for mrope_section and image_token_id."""

CHANNELS = 3
"""Number of color channels in an image."""


@dataclass(frozen=True, slots=True)
class VisionShape:
    """The sizes of a vision tower.

    Attributes:
        model_type: transformers' type of the whole model, such as "qwen3_vl".
        depth, hidden, heads, intermediate: sizes of the tower's transformer.
        patch: height and width of a patch, in pixels.
        temporal_patch: number of frames in a patch; an image is repeated to fill them.
        merge: number of patches per side that are merged into one feature.
        out_hidden: channels of a feature, equal to the text model's hidden size.
        deepstack: indices of the tower's layers whose features are added after the text model's first layers.
        image_token: id of the placeholder token.
        rotary_sections: numbers of channel pairs whose angles depend on time, on height and on width.
        is_interleaved: whether the channels of the sections alternate instead of being consecutive.
        positions: number of learned position embeddings; 0 if the tower has only rotary embeddings.
        window: height and width, in patches, of the windows that attention is restricted to; None without windows.
        full_layers: indices of the layers with full attention, in a tower with windows.
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
    positions: int = 0
    window: int | None = None
    full_layers: tuple[int, ...] = ()

    @property
    def is_gated(self) -> bool:
        """Whether the tower's layers are those of Qwen2.5-VL, with RMSNorm and a gated MLP."""
        return self.model_type == "qwen2_5_vl"

    @property
    def has_deepstack(self) -> bool:
        """Whether features of the tower's inner layers can be added in the text model."""
        return self.model_type in ("qwen3_vl", "qwen3_vl_moe")

    @property
    def has_transposed_experts(self) -> bool:
        """Whether checkpoints store stacked experts as [experts, columns, rows]."""
        return self.model_type == "qwen3_vl_moe"

    @property
    def patch_dim(self) -> int:
        """Number of values in a patch."""
        return CHANNELS * self.temporal_patch * self.patch**2

    @property
    def merged(self) -> int:
        """Total number of channels of the patches that are merged into one feature."""
        return self.hidden * self.merge**2


def add_vision(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of a text model, marked as used with its vision tower."""
    return {**hf_config, WITH_TOWER: True}


def without_vision(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Undo `add_vision`."""
    return {key: value for key, value in hf_config.items() if key != WITH_TOWER}


def vision_of(hf_config: Mapping[str, Any]) -> VisionShape | None:
    """Return the sizes of the tower; None if the model is used without one. hf_config: the result of `read_config`."""
    if WITH_TOWER not in hf_config:
        return None
    whole = hf_config[WHOLE]
    family = whole["model_type"]
    tower = {**TOWERS[family], **hf_config[VISION]}
    rope = hf_config.get("rope_scaling") or hf_config.get("rope_parameters") or {}
    time, height, width = rope.get("mrope_section") or _ROTARY_SECTIONS[family]
    window = tower.get("window_size")
    return VisionShape(
        model_type=family,
        depth=tower["depth"],
        hidden=tower["hidden_size"],
        heads=tower["num_heads"],
        intermediate=tower["intermediate_size"],
        patch=tower["patch_size"],
        temporal_patch=tower["temporal_patch_size"],
        merge=tower["spatial_merge_size"],
        out_hidden=tower["out_hidden_size"],
        deepstack=tuple(tower.get("deepstack_visual_indexes") or ()),
        image_token=whole.get("image_token_id", _IMAGE_TOKENS.get(family, _IMAGE_TOKEN)),
        rotary_sections=(time, height, width),
        # transformers ignores mrope_interleaved.
        is_interleaved=family != "qwen2_5_vl",
        positions=tower.get("num_position_embeddings", 0),
        window=None if window is None else window // tower["patch_size"],
        full_layers=tuple(tower.get("fullatt_block_indexes") or ()),
    )
