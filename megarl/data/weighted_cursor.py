"""The prompts that come next where some of them should come more often than others: drawn by weights."""

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
    """Draws prompt indexes by weights: no prompt comes twice in one take, as long as there are enough others.

    A prompt's weight is that of the data, and with `solved_weight` also max(solved_weight, 1 − s), s being the share of
    its samples that were a success when it was last sampled, 0 before: prioritised sampling of Kimi k1.5
    (https://arxiv.org/abs/2501.12599, section 2.3.4), which has 1 − s.
    """

    def __init__(
        self, num_prompts: int, seed: int, weights: Sequence[float] | None = None, solved_weight: float | None = None
    ) -> None:
        assert num_prompts > 0, "a cursor over no prompts"
        assert weights is None or len(weights) == num_prompts, "a weight for each prompt"
        self._num_prompts, self._seed = num_prompts, seed
        self._weights, self._solved_weight = weights, solved_weight
        self._takes = 0
        self._rates: dict[int, float] = {}

    def take(self, n: int) -> list[int]:
        """Returns n indexes, which depend on nothing but the seed, the number of takes before, and the weights."""
        generator = random.Random(f"take {self._seed} {self._takes}")
        self._takes += 1
        weights = [self._weight(i) for i in range(self._num_prompts)]
        taken: list[int] = []
        while len(taken) < n:
            # Of exponential numbers with these rates the smallest are a draw without replacement (Efraimidis and
            # Spirakis 2006). expovariate is a logarithm of random(), whose values Python keeps over its versions.
            arrivals = [(generator.expovariate(w), i) for i, w in enumerate(weights) if w > 0]
            taken += [i for _, i in heapq.nsmallest(n - len(taken), arrivals)]
        return taken

    def note(self, rates: Mapping[int, float]) -> None:
        """Takes up measured shares of successes, by the index of the prompt."""
        self._rates |= rates

    def metrics(self) -> dict[str, float]:
        """Returns the share of prompts that have been sampled, and the mean of their rates."""
        if not self._rates:
            return {}
        return {
            "data/seen_frac": len(self._rates) / self._num_prompts,
            "data/solve_rate_mean": fmean(self._rates.values()),
        }

    def state(self) -> WeightedState:
        """Returns what `restore` needs beside the weights to go on from here; JSON can hold it."""
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
        given = 1.0 if self._weights is None else self._weights[index]
        if self._solved_weight is None:
            return given
        return given * max(self._solved_weight, 1 - self._rates.get(index, 0.0))
