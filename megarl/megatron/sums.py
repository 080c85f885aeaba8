"""Metrics of a microbatch while they are tensors: read only after the last microbatch, so that no microbatch waits."""

from __future__ import annotations

import torch

from megarl.metrics import Metric

Sums = dict[str, tuple[torch.Tensor, torch.Tensor | None, str]]
"""name -> (value, weight, reduction)."""


def read(sums: Sums) -> dict[str, Metric]:
    return {
        name: Metric(float(value), 1.0 if weight is None else float(weight), reduction)
        for name, (value, weight, reduction) in sums.items()
    }


def total(value: torch.Tensor) -> tuple[torch.Tensor, None, str]:
    return value.detach().clone(), None, "sum"


def mean(values: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, str]:
    """Mean over the trained tokens, weighted by their number when microbatches are merged."""
    count = mask.sum()
    return (values.detach() * mask).sum() / count.clamp(min=1), count, "mean"


def largest(values: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, None, str]:
    """Over the trained tokens, 0 without any. values[mask] would have the host wait for its size."""
    return torch.cat((values.detach().where(mask, 0), values.new_zeros(1))).max(), None, "max"
