"""The comparison of what two or three sides give at each stage of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

LIMITS = {"float32": 1e-3, "bfloat16": 0.1}
"""The relative difference of a token's hidden states, above which more than rounding is taken to be at work, by the
dtype of the model: a number's rounding is up to 6e-8 and 4e-3 of it, and the errors of layers add up."""

LOG_PROBS = "log-probs"
LOG_PROB_LIMITS = {"float32": 1e-3, "bfloat16": 1.5}
"""The same for log-probs, in nats."""

Outputs = Mapping[str, np.ndarray]
"""What comes out of each stage, in the order of computing, token by token."""

PAIRS = (("trainer", "engine"), ("trainer", "plain"), ("engine", "plain"))


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of the model, and how far each two sides are apart after it."""

    name: str
    limit: float
    differences: Mapping[tuple[str, str], float]

    @property
    def differs(self) -> bool:
        return not self.differences["trainer", "engine"] <= self.limit

    @property
    def odd(self) -> str:
        """The side that is further from plain transformers."""
        return max(("trainer", "engine"), key=lambda side: self.differences[side, "plain"])


def difference(name: str, a: np.ndarray, b: np.ndarray) -> float:
    """Return the largest over the tokens that both have: of log-probs, |a − b|; of hidden states, ‖a − b‖ / ‖b‖."""
    count = min(len(a), len(b))
    a, b = a[:count].astype(np.float64), b[:count].astype(np.float64)
    if name == LOG_PROBS:
        return float(np.abs(a - b).max())
    return float((np.linalg.norm(a - b, axis=-1) / np.maximum(np.linalg.norm(b, axis=-1), 1e-12)).max())


def compare(sides: Mapping[str, Outputs], dtype: str) -> list[Stage]:
    """Return the stages that all sides have, in the order of computing."""
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
    """Return a row for each stage, with what each two sides differ by."""
    width = max(len(stage.name) for stage in stages)
    titles = [f"{a} – {b}" for a, b in PAIRS]
    rows = [f"{'':<{width}}  {'  '.join(titles)}"]
    for stage in stages:
        values = (f"{stage.differences[pair]:.1e}".rjust(len(title)) for pair, title in zip(PAIRS, titles, strict=True))
        rows.append(f"{stage.name:<{width}}  {'  '.join(values)}{'  <' if stage.differs else ''}")
    return "\n".join(rows)


def verdict(stages: list[Stage]) -> str:
    """Says which stage is the first that differs, by how much, and whose it is."""
    found = first_different(stages)
    if found is None:
        worst = max(stages, key=lambda stage: stage.differences["trainer", "engine"] / stage.limit)
        return (
            f"trainer and engine agree; furthest apart, of what rounding explains, are they after {worst.name}: "
            f"{worst.differences['trainer', 'engine']:.1e} of {worst.limit:g}"
        )
    by_side = {side: found.differences[side, "plain"] for side in ("trainer", "engine")}
    return (
        f"{found.name} is the first that differs: trainer and engine are {found.differences['trainer', 'engine']:.1e} "
        f"apart after it, and rounding explains {found.limit:g}. From plain transformers the trainer is "
        f"{by_side['trainer']:.1e} away, the engine {by_side['engine']:.1e}: look at the {found.odd}'s"
    )
