"""Scores samples with the reward functions of a config. A function that fails gives a failure, never a zero."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

from megarl.batch import Sample, Score, TokenTotals
from megarl.config import schema
from megarl.rewards import judge, registry
from megarl.rewards.classifier import ModelReward

MODEL = "reward_model"
"""The name of a reward model's part."""


class Scorer:
    """Raises ValueError for a function that is not found or is listed twice.

    A function that never returns is stopped by whoever runs the scorer in a process that it can kill.
    """

    def __init__(
        self, functions: Sequence[schema.RewardFunction], model_weight: float = 1.0, judge_name: str | None = None
    ) -> None:
        """model_weight: of a reward model's score, which others compute. judge_name: path/to/file.py:function."""
        names = [entry.function for entry in functions]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"rewards.functions: {twice} is listed twice; list it once, with the sum of the weights")
        self._functions = {name: registry.resolve(name) for name in names}
        self._judge: judge.Judge | None = None
        if judge_name is not None:
            self._judge = registry.from_file("rewards.judge", judge_name, "prompt, first, second, answer")
        weights = {MODEL: model_weight, judge.NAME: 1.0}
        self._weights = {entry.function: entry.weight for entry in functions} | weights

    def verdicts(self, samples: Sequence[Sample]) -> dict[str, judge.Verdict]:
        """The judge's, by sample id; empty if there is none. samples: all of their prompts."""
        return {} if self._judge is None else judge.verdicts(self._judge, samples)

    def score(self, sample: Sample, of_model: ModelReward | None = None, verdict: judge.Verdict | None = None) -> Score:
        """Calls every function; the value is the weighted sum of what they, the model and the judge (None: there is
        none) say, if all of them say something."""
        results: dict[str, Any] = {}
        parts: dict[str, float] = {}
        failures: list[str] = []
        if of_model is not None and of_model.failure is None:
            results[MODEL] = of_model.value
        elif of_model is not None:
            failures.append(f"{MODEL} {of_model.failure}, on sample {sample.id}")
        if isinstance(verdict, str):
            failures.append(f"{judge.NAME} {verdict}, on sample {sample.id}")
        elif verdict is not None:
            results[judge.NAME] = verdict
        for name, function in self._functions.items():
            try:
                results[name] = function(sample.prompt.text, sample.text, sample.prompt.answer)
            except Exception as error:  # the user's code may raise anything
                reason = " ".join(str(error).split())
                failures.append(f"{name} raised {type(error).__name__}: {reason} on sample {sample.id}")
        for name, result in results.items():
            value = _finite(result)
            if value is None:
                shown = str(result) if isinstance(result, float) else type(result).__name__
                failures.append(f"{name} returned {shown}, not a finite number or a bool, on sample {sample.id}")
            else:
                parts[name] = value
        if failures:
            return Score(value=None, parts=parts, failure=f"rewards.functions: {'; '.join(failures)}")
        weighted = {name: self._weights[name] * part for name, part in parts.items()}
        by_token = (of_model.by_token if of_model is not None else None) or []
        of_tokens = TokenTotals.of([self._weights[MODEL] * reward for reward in by_token if not math.isnan(reward)])
        return Score(sum(weighted.values()), parts, of_tokens=of_tokens)


def _finite(result: Any) -> float | None:
    """None if it is no number, or not a finite one."""
    if not isinstance(result, numbers.Real):
        return None
    try:
        value = float(result)
    except OverflowError:  # an int beyond all floats
        return None
    return value if math.isfinite(value) else None
