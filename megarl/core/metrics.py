"""Metrics that carry their own reduction over microbatches, ranks and steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

Reduction = Literal["mean", "sum", "max", "min"]


@dataclass(frozen=True, slots=True)
class Metric:
    """A value, its reduction, and its weight in a mean (number of tokens, samples, …). A maximum or minimum with weight
    0 is empty. Sums ignore the weight."""

    value: float
    weight: float = 1.0
    reduction: Reduction = "mean"

    def __reduce__(self) -> tuple[type[Metric], tuple[float, float, Reduction]]:
        """Pickle as a plain tuple. A driver unpickles about ten thousand metrics per step, and the default for slotted
        dataclasses looks up the fields of each."""
        return Metric, (self.value, self.weight, self.reduction)


def merge(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Combine the metrics of several microbatches or ranks by name. Except for sums, metrics with weight 0 are
    omitted."""
    metrics_by_name: dict[str, list[Metric]] = {}
    for part in parts:
        for name, metric in part.items():
            metrics_by_name.setdefault(name, []).append(metric)
    merged = {name: _reduce(name, metrics) for name, metrics in metrics_by_name.items()}
    return {name: metric for name, metric in merged.items() if metric is not None}


def merge_updates(updates: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Combine the metrics of a step's updates like `merge`, but average sums. A sum such as the loss covers one whole
    update; the step reports the mean over its updates."""

    def as_mean(metric: Metric) -> Metric:
        return replace(metric, weight=1.0, reduction="mean") if metric.reduction == "sum" else metric

    return merge({name: as_mean(metric) for name, metric in update.items()} for update in updates)


def values(metrics: Mapping[str, Metric]) -> dict[str, float]:
    return {name: metric.value for name, metric in metrics.items()}


def _reduce(name: str, metrics: list[Metric]) -> Metric | None:
    reductions: set[Reduction] = {metric.reduction for metric in metrics}
    assert len(reductions) == 1, f"{name} has conflicting reductions: {reductions}"
    reduction = reductions.pop()
    weight = sum(metric.weight for metric in metrics)
    if reduction != "sum" and weight == 0:
        return None
    if reduction == "mean":
        return Metric(sum(m.value * m.weight for m in metrics if m.weight) / weight, weight, "mean")
    combine = {"sum": sum, "max": max, "min": min}[reduction]
    return Metric(combine(metric.value for metric in metrics if metric.weight or reduction == "sum"), weight, reduction)
