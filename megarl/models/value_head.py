"""A value head beside a language head: an MLP on the same hidden states, for a critic that shares the actor's trunk.

No Hugging Face checkpoint has one; a model with it is described by its config.json and one key more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KEY = "megarl_value_head"


def with_value_head(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    return {**hf_config, KEY: True}


def without_value_head(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config without the key of the value head, which no Hugging Face folder has."""
    return {key: value for key, value in hf_config.items() if key != KEY}


def value_head_shapes(hf_config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return canonical name -> shape of the head's parameters, which every tensor-parallel rank has whole; empty for a
    model without it."""
    if not hf_config.get(KEY):
        return {}
    hidden = hf_config["hidden_size"]
    return {
        "value_head.fc1.weight": (hidden, hidden),
        "value_head.fc1.bias": (hidden,),
        "value_head.fc2.weight": (1, hidden),
        "value_head.fc2.bias": (1,),
    }
