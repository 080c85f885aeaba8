"""Which family a Hugging Face model type belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.resharding.families.family import Family
from megarl.resharding.families.llama import LLAMA, QWEN2

FAMILIES: Mapping[str, Family] = {"llama": LLAMA, "qwen2": QWEN2}


def family_of(hf_config: Mapping[str, Any]) -> Family:
    """Raises ValueError, listing the known families, for a model type that is not declared."""
    model_type = hf_config.get("model_type")
    if model_type not in FAMILIES:
        raise ValueError(f"config.json: model_type={model_type!r} is not supported; known: {', '.join(FAMILIES)}")
    family = FAMILIES[model_type]
    for key in family.unsupported:
        if hf_config.get(key):
            raise ValueError(
                f"config.json: {key}={hf_config[key]} is not supported for {model_type}; "
                "its weights would have no place in Megatron's model"
            )
    return family
