"""Compares the outputs of trainer, engine and plain transformers at each stage of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

LIMITS = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.0125}
"""dtype -> maximum relative difference between a token's hidden states that is attributed to rounding. The relative
rounding error of a single number is up to 6e-8 (float32), 4e-3 (bfloat16) or 5e-4 (float16), and errors accumulate over
the layers."""

LOG_PROBS = "log-probs"
"""Stage whose mean difference over the tokens is compared with the run's logprob_check.limit."""

Outputs = Mapping[str, np.ndarray]
"""Maps each stage to its per-token outputs, in the order of the forward pass."""

PAIRS = (("trainer", "engine"), ("trainer", "plain"), ("engine", "plain"))


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of the model, and the difference between its outputs for each pair of implementations."""

    name: str
    limit: float
    differences: Mapping[tuple[str, str], float]

    @property
    def differs(self) -> bool:
        return not self.differences["trainer", "engine"] <= self.limit

    @property
    def outlier(self) -> str:
        """The implementation whose output differs more from plain transformers: `trainer` or `engine`."""
        return max(("trainer", "engine"), key=lambda side: self.differences[side, "plain"])


def difference(name: str, a: np.ndarray, b: np.ndarray) -> float:
    """Return the difference over the tokens that `a` and `b` have in common: the mean of |a − b| for log-probs, and the
    maximum of ‖a − b‖ / ‖b‖ for hidden states."""
    count = min(len(a), len(b))
    a, b = a[:count].astype(np.float64), b[:count].astype(np.float64)
    if name == LOG_PROBS:
        return float(np.abs(a - b).mean())
    return float((np.linalg.norm(a - b, axis=-1) / np.maximum(np.linalg.norm(b, axis=-1), 1e-12)).max())


def compare(sides: Mapping[str, Outputs], dtype: str, logprob_limit: float) -> list[Stage]:
    """Compare the stages that all implementations have. Return them in the order of the forward pass. logprob_limit:
    the run's limit for the mean log-prob difference."""
    names = [name for name in sides["trainer"] if all(name in outputs for outputs in sides.values())]
    return [
        Stage(
            name,
            logprob_limit if name == LOG_PROBS else LIMITS[dtype],
            {(a, b): difference(name, sides[a][name], sides[b][name]) for a, b in PAIRS},
        )
        for name in names
    ]


def first_different(stages: list[Stage]) -> Stage | None:
    return next((stage for stage in stages if stage.differs), None)


def table(stages: list[Stage]) -> str:
    """Return a table with one row per stage and one column per pair of implementations."""
    width = max(len(stage.name) for stage in stages)
    titles = [f"{a} – {b}" for a, b in PAIRS]
    rows = [f"{'':<{width}}  {'  '.join(titles)}"]
    for stage in stages:
        values = (f"{stage.differences[pair]:.1e}".rjust(len(title)) for pair, title in zip(PAIRS, titles, strict=True))
        rows.append(f"{stage.name:<{width}}  {'  '.join(values)}{'  <' if stage.differs else ''}")
    return "\n".join(rows)


def verdict(stages: list[Stage]) -> str:
    """Describe the first stage that differs, by how much, and the implementation that probably causes it."""
    first = first_different(stages)
    if first is None:
        worst = max(stages, key=lambda stage: stage.differences["trainer", "engine"] / stage.limit)
        return (
            "The trainer and the engine agree. The largest difference relative to its limit is "
            f"{worst.differences['trainer', 'engine']:.1e} after {worst.name} (limit {worst.limit:g})"
        )
    by_side = {side: first.differences[side, "plain"] for side in ("trainer", "engine")}
    return (
        f"{first.name} is the first stage that differs. After it, the trainer and the engine differ by "
        f"{first.differences['trainer', 'engine']:.1e} (limit for rounding: {first.limit:g}). The trainer differs from "
        f"plain transformers by {by_side['trainer']:.1e}, and the engine by {by_side['engine']:.1e}. Fix: inspect this "
        f"stage in the {first.outlier}"
    )
