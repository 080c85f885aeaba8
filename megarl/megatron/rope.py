"""The frequencies of rotary position embeddings, as a model's config.json asks for them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch


def inverse_frequencies(rope: Mapping[str, Any], dim: int) -> torch.Tensor:
    """Radians per position of each pair of channels, float32 [dim / 2]. rope: rope_parameters of config.huggingface."""
    base = 1.0 / rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    match rope["rope_type"]:
        case "default":
            return base
        case "linear":
            return base / rope["factor"]
        case "llama3":
            return _llama3(base, rope)
    raise AssertionError(rope["rope_type"])


def _llama3(base: torch.Tensor, rope: Mapping[str, Any]) -> torch.Tensor:
    """Long waves are stretched by the factor, short ones are not, those between in proportion to how often they turn
    within the original context (Llama 3.1)."""
    # In the order of operations of transformers and vLLM, so that rounding is theirs too.
    turns = rope["original_max_position_embeddings"] / (2 * math.pi / base)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    unscaled = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - unscaled) * base / rope["factor"] + unscaled * base
