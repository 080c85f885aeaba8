"""Microbatch metrics as device tensors. Reading them only after the last microbatch avoids synchronization."""

from __future__ import annotations

import torch

from megarl.core.metrics import Metric, Reduction

Sum = tuple[torch.Tensor, torch.Tensor | None, Reduction]
"""(value, weight, reduction) of a metric."""

Sums = dict[str, Sum]
"""Metric name -> sum."""


def read(sums: Sums) -> dict[str, Metric]:
    """Return the metrics, with a single transfer from the device."""
    tensors = [tensor for value, weight, _ in sums.values() for tensor in (value, weight) if tensor is not None]
    if not tensors:
        return {}
    numbers = iter(torch.stack([tensor.to(tensors[0].device, torch.float64) for tensor in tensors]).tolist())
    return {
        name: Metric(next(numbers), 1.0 if weight is None else next(numbers), reduction)
        for name, (_, weight, reduction) in sums.items()
    }


def total(value: torch.Tensor) -> Sum:
    return value.detach().clone(), None, "sum"


def mean(values: torch.Tensor, weight: torch.Tensor) -> Sum:
    """Return the weighted mean. The sum of the weights becomes the metric's weight when microbatches are merged.

    With a mask as the weight, the result is the mean over trained tokens. Values with weight 0 are excluded, even if
    they are NaN. The weight is bool or non-negative float32.
    """
    total_weight = weight.sum()
    weighted_sum = (values.detach() * weight).where(weight > 0, 0.0).sum()
    return weighted_sum / total_weight.where(total_weight > 0, 1), total_weight, "mean"


def largest(values: torch.Tensor, mask: torch.Tensor) -> Sum:
    """Return the maximum over the tokens in the mask, or 0 if all are negative. The metric is omitted if the mask
    is empty in every microbatch. Indexing with values[mask] would synchronize with the device."""
    return torch.cat((values.detach().where(mask, 0), values.new_zeros(1))).max(), mask.sum(), "max"
