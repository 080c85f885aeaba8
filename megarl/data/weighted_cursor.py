"""The order of prompts under weighted sampling."""

from __future__ import annotations

import heapq
import random
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TypedDict


class WeightedState(TypedDict):
    num_prompts: int
    seed: int
    takes: int
    rates: dict[str, float]


class WeightedCursor:
    """Samples prompt indices by weight. As long as enough prompts have a positive weight, `take` never repeats a
    prompt within a call.

    A prompt's weight comes from the data. With `solved_weight`, it is also multiplied by max(solved_weight, 1 − s),
    where s is the success rate of the prompt's samples in the last step that sampled the prompt, or 0 if no step has.
    Kimi k1.5's prioritized sampling uses 1 − s (https://arxiv.org/abs/2501.12599, section 2.3.4).
    """

    def __init__(
        self, num_prompts: int, seed: int, weights: Sequence[float] | None = None, solved_weight: float | None = None
    ) -> None:
        assert num_prompts > 0, "num_prompts must be positive"
        assert weights is None or len(weights) == num_prompts, "weights must have one entry per prompt"
        self._num_prompts, self._seed = num_prompts, seed
        self._weights, self._solved_weight = weights, solved_weight
        self._takes = 0
        self._rates: dict[int, float] = {}

    def take(self, n: int) -> list[int]:
        """Return n indices. They depend only on the seed, the number of previous takes and the weights."""
        generator = random.Random(f"take {self._seed} {self._takes}")
        self._takes += 1
        weights = [self._weight(i) for i in range(self._num_prompts)]
        taken: list[int] = []
        while len(taken) < n:
            # The n smallest exponential variables with these rates are a draw without replacement (Efraimidis and
            # Spirakis 2006). expovariate is computed from random(), whose sequence Python keeps stable across versions.
            arrivals = [(generator.expovariate(w), i) for i, w in enumerate(weights) if w > 0]
            taken += [i for _, i in heapq.nsmallest(n - len(taken), arrivals)]
        return taken

    def note(self, rates: Mapping[int, float]) -> None:
        """Record the measured success rates of prompts by index."""
        self._rates |= rates

    def metrics(self) -> dict[str, float]:
        """Return the fraction of prompts sampled so far and the mean of their success rates."""
        if not self._rates:
            return {}
        return {
            "data/seen_frac": len(self._rates) / self._num_prompts,
            "data/solve_rate_mean": fmean(self._rates.values()),
        }

    def state(self) -> WeightedState:
        """Return the JSON-serializable state that `restore` needs in addition to the weights."""
        rates = {str(index): rate for index, rate in self._rates.items()}
        return WeightedState(num_prompts=self._num_prompts, seed=self._seed, takes=self._takes, rates=rates)

    @classmethod
    def restore(
        cls, state: WeightedState, weights: Sequence[float] | None = None, solved_weight: float | None = None
    ) -> WeightedCursor:
        cursor = cls(state["num_prompts"], state["seed"], weights, solved_weight)
        cursor._takes = state["takes"]
        cursor._rates = {int(index): rate for index, rate in state["rates"].items()}
        return cursor

    def _weight(self, index: int) -> float:
        weight = 1.0 if self._weights is None else self._weights[index]
        if self._solved_weight is None:
            return weight
        return weight * max(self._solved_weight, 1 - self._rates.get(index, 0.0))
