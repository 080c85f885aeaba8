"""Sizes of a model that must be divisible by the number of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from megarl.config.divisors import divisibility_error
from megarl.models.huggingface import experts

EXPERT_ROWS = "MLP rows of an expert"


def indivisible(key: str, divisor: int, sizes: Mapping[str, int], legal: Iterable[int]) -> list[str]:
    """Return an error for each size that is not divisible by the divisor. `sizes` maps descriptions to sizes."""
    lines = [divisibility_error(key, divisor, noun, number, legal) for noun, number in sizes.items()]
    return [line for line in lines if line is not None]


def dense_rows(hf: Mapping[str, Any]) -> dict[str, int]:
    """Return {description: number of rows in a dense MLP}, or an empty dict if all layers have experts."""
    mixture = experts(hf)
    has_dense_layers = mixture is None or not all(mixture.layers)
    return {"MLP rows (intermediate_size)": hf["intermediate_size"]} if has_dense_layers else {}
