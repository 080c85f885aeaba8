"""Metrics of a microbatch while they are tensors: read only after the last microbatch, so that no microbatch waits."""

from __future__ import annotations

import torch

from megarl.core.metrics import Metric

Sums = dict[str, tuple[torch.Tensor, torch.Tensor | None, str]]
"""name -> (value, weight, reduction)."""


def read(sums: Sums) -> dict[str, Metric]:
    return {
        name: Metric(float(value), 1.0 if weight is None else float(weight), reduction)
        for name, (value, weight, reduction) in sums.items()
    }


def total(value: torch.Tensor) -> tuple[torch.Tensor, None, str]:
    return value.detach().clone(), None, "sum"


def mean(values: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, str]:
    """Mean of the values by their weights, the sum of which is what it counts when microbatches are merged. A mask
    makes it the mean over the trained tokens.

    weight   bool or float32, 0 or more
    """
    every = weight.sum()
    return (values.detach() * weight).sum() / every.where(every > 0, 1), every, "mean"


def largest(values: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, None, str]:
    """Over the trained tokens, 0 without any. values[mask] would have the host wait for its size."""
    return torch.cat((values.detach().where(mask, 0), values.new_zeros(1))).max(), None, "max"
