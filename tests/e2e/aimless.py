"""Environments with random rewards, for control runs that must not learn."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from megarl.environments import Step, Turn
from megarl.environments.shipped.calculator import CalculatorEnvironment
from megarl.environments.shipped.search import SearchEnvironment

CHOICE = Random(0)


class AimlessSearch(SearchEnvironment):
    async def step(self, turn: Turn) -> Step:
        step = await super().step(turn)
        return replace(step, reward=CHOICE.choice((0.0, 1.0))) if step.done else step


class AimlessCalculator(CalculatorEnvironment):
    async def reward(self, turn: Turn) -> float:
        return CHOICE.choice((0.0, 1.0))
