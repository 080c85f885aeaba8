"""Compares the outputs of trainer, engine and plain transformers at each stage of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

LIMITS = {"float32": 1e-3, "bfloat16": 0.1}
"""Relative difference of a token's hidden states above which rounding alone is not a plausible cause, by model dtype.
The rounding error of a single number is up to 6e-8 or 4e-3, and errors accumulate over layers."""

LOG_PROBS = "log-probs"
LOG_PROB_LIMITS = {"float32": 1e-3, "bfloat16": 1.5}
"""The corresponding limits for log-probs, in nats."""

Outputs = Mapping[str, np.ndarray]
"""The outputs of each stage per token, in the order of the forward pass."""

PAIRS = (("trainer", "engine"), ("trainer", "plain"), ("engine", "plain"))


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of the model and the differences of its outputs for each pair of sides."""

    name: str
    limit: float
    differences: Mapping[tuple[str, str], float]

    @property
    def differs(self) -> bool:
        return not self.differences["trainer", "engine"] <= self.limit

    @property
    def odd(self) -> str:
        """The side that differs more from plain transformers."""
        return max(("trainer", "engine"), key=lambda side: self.differences[side, "plain"])


def difference(name: str, a: np.ndarray, b: np.ndarray) -> float:
    """Return the largest difference over common tokens: |a − b| for log-probs, ‖a − b‖ / ‖b‖ for hidden states."""
    count = min(len(a), len(b))
    a, b = a[:count].astype(np.float64), b[:count].astype(np.float64)
    if name == LOG_PROBS:
        return float(np.abs(a - b).max())
    return float((np.linalg.norm(a - b, axis=-1) / np.maximum(np.linalg.norm(b, axis=-1), 1e-12)).max())


def compare(sides: Mapping[str, Outputs], dtype: str) -> list[Stage]:
    """Return the stages that all sides have, in the order of the forward pass."""
    names = [name for name in sides["trainer"] if all(name in outputs for outputs in sides.values())]
    return [
        Stage(
            name,
            (LOG_PROB_LIMITS if name == LOG_PROBS else LIMITS)[dtype],
            {(a, b): difference(name, sides[a][name], sides[b][name]) for a, b in PAIRS},
        )
        for name in names
    ]


def first_different(stages: list[Stage]) -> Stage | None:
    return next((stage for stage in stages if stage.differs), None)


def table(stages: list[Stage]) -> str:
    """Return a table with a row per stage and a column per pair of sides."""
    width = max(len(stage.name) for stage in stages)
    titles = [f"{a} – {b}" for a, b in PAIRS]
    rows = [f"{'':<{width}}  {'  '.join(titles)}"]
    for stage in stages:
        values = (f"{stage.differences[pair]:.1e}".rjust(len(title)) for pair, title in zip(PAIRS, titles, strict=True))
        rows.append(f"{stage.name:<{width}}  {'  '.join(values)}{'  <' if stage.differs else ''}")
    return "\n".join(rows)


def verdict(stages: list[Stage]) -> str:
    """Describe the first stage that differs, the size of the difference and the side that likely causes it."""
    first = first_different(stages)
    if first is None:
        worst = max(stages, key=lambda stage: stage.differences["trainer", "engine"] / stage.limit)
        return (
            f"trainer and engine agree; the largest difference relative to its limit is after {worst.name}: "
            f"{worst.differences['trainer', 'engine']:.1e}, limit {worst.limit:g}"
        )
    by_side = {side: first.differences[side, "plain"] for side in ("trainer", "engine")}
    return (
        f"{first.name} is the first stage that differs: trainer and engine differ by "
        f"{first.differences['trainer', 'engine']:.1e} after it (limit for rounding: {first.limit:g}). The trainer "
        f"differs from plain transformers by {by_side['trainer']:.1e}, the engine by {by_side['engine']:.1e}: inspect "
        f"this stage in the {first.odd}"
    )
