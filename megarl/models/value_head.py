"""A value head next to the LM head: an MLP on the same hidden states, for a critic with a shared backbone.

Hugging Face checkpoints have no such head. The config of a model with a value head has an additional key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KEY = "megarl_value_head"


def add_value_head(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    return {**hf_config, KEY: True}


def without_value_head(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config without the value head's key, as in Hugging Face folders."""
    return {key: value for key, value in hf_config.items() if key != KEY}


def value_head_shapes(hf_config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the value head's parameters by canonical name; empty for a model without the head. The
    parameters are replicated on all tensor-parallel ranks."""
    if not hf_config.get(KEY):
        return {}
    hidden = hf_config["hidden_size"]
    return {
        "value_head.fc1.weight": (hidden, hidden),
        "value_head.fc1.bias": (hidden,),
        "value_head.fc2.weight": (1, hidden),
        "value_head.fc2.bias": (1,),
    }
