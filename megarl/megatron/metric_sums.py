"""Metrics of a microbatch as tensors, which are read only after the last microbatch, so that no microbatch waits."""

from __future__ import annotations

import torch

from megarl.core.metrics import Metric

Sums = dict[str, tuple[torch.Tensor, torch.Tensor | None, str]]
"""Metrics by name: (value, weight, reduction)."""


def read(sums: Sums) -> dict[str, Metric]:
    return {
        name: Metric(float(value), 1.0 if weight is None else float(weight), reduction)
        for name, (value, weight, reduction) in sums.items()
    }


def total(value: torch.Tensor) -> tuple[torch.Tensor, None, str]:
    return value.detach().clone(), None, "sum"


def mean(values: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, str]:
    """Return the mean of the values by their weights, whose sum is its weight when microbatches are merged. A mask
    makes it the mean over the trained tokens. Values with a weight of 0 have no part in it, whatever they are.

    weight   bool or float32, 0 or more
    """
    every = weight.sum()
    return (values.detach() * weight).where(weight > 0, 0.0).sum() / every.where(every > 0, 1), every, "mean"


def largest(values: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, None, str]:
    """Return the maximum over the trained tokens, at least 0. values[mask] would make the host wait for its size."""
    return torch.cat((values.detach().where(mask, 0), values.new_zeros(1))).max(), None, "max"
