"""Metrics that know how they are reduced: over microbatches, over ranks, over steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

Reduction = Literal["mean", "sum", "max", "min"]


@dataclass(frozen=True, slots=True)
class Metric:
    """A value, its reduction, and its weight in a mean (tokens, samples …; unused by other reductions)."""

    value: float
    weight: float = 1.0
    reduction: Reduction = "mean"

    def __reduce__(self) -> tuple[type[Metric], tuple[float, float, Reduction]]:
        """Is pickled as its three values: a driver unpickles some ten thousand in a step, and what dataclasses with
        slots are pickled by asks for the fields of each."""
        return Metric, (self.value, self.weight, self.reduction)


def merge(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Combines the metrics of several microbatches or ranks, name by name. A mean of weight 0 is left out."""
    groups: dict[str, list[Metric]] = {}
    for part in parts:
        for name, metric in part.items():
            groups.setdefault(name, []).append(metric)
    merged = {name: _reduce(name, metrics) for name, metrics in groups.items()}
    return {name: metric for name, metric in merged.items() if metric is not None}


def merge_updates(updates: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Combines the metrics of a step's updates as `merge` does, but for sums, such as the loss: each is a sum over a
    whole update, and the step has the mean of the updates'."""
    return merge({name: _as_mean(metric) for name, metric in update.items()} for update in updates)


def values(metrics: Mapping[str, Metric]) -> dict[str, float]:
    return {name: metric.value for name, metric in metrics.items()}


def _as_mean(metric: Metric) -> Metric:
    return replace(metric, weight=1.0, reduction="mean") if metric.reduction == "sum" else metric


def _reduce(name: str, metrics: list[Metric]) -> Metric | None:
    reductions = {metric.reduction for metric in metrics}
    assert len(reductions) == 1, f"{name} is reduced in two ways: {reductions}"
    reduction = reductions.pop()
    weight = sum(metric.weight for metric in metrics)
    if reduction == "mean":
        if weight == 0:
            return None
        return Metric(sum(m.value * m.weight for m in metrics if m.weight) / weight, weight, "mean")
    combine = {"sum": sum, "max": max, "min": min}[reduction]
    return Metric(combine(metric.value for metric in metrics), weight, reduction)
