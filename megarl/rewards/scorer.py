"""Scores samples with the reward functions of a config. A function that fails gives a failure, never a zero."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

from megarl.config import schema
from megarl.core.types import Sample, Score, TokenTotals
from megarl.rewards import judge, registry
from megarl.rewards.classifier import ModelReward
from megarl.rewards.process import on_turns, together, turn_ends

MODEL = "reward_model"
"""The name of a reward model's part."""


class Scorer:
    """Raises ValueError for a function that is not found or is listed twice.

    A function that never returns is stopped by whoever runs the scorer in a process that it can kill.
    """

    def __init__(
        self,
        functions: Sequence[schema.RewardFunction],
        model_weight: float = 1.0,
        judge_name: str | None = None,
        rewards_tokens: bool = False,
    ) -> None:
        """model_weight: of a reward model's score, which others compute. judge_name: path/to/file.py:function.
        rewards_tokens: whether the advantages have a use for rewards of single tokens."""
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
        self._per_turn = {entry.function for entry in functions if entry.per_turn}
        self._rewards_tokens = rewards_tokens

    def verdicts(self, samples: Sequence[Sample]) -> dict[str, judge.Verdict]:
        """The judge's, by sample id; empty if there is none. samples: all of their prompts."""
        return {} if self._judge is None else judge.verdicts(self._judge, samples)

    def score(
        self, sample: Sample, of_model: ModelReward | None = None, verdict: judge.Verdict | None = None
    ) -> tuple[Score, list[float] | None]:
        """Calls every function; the value is the weighted sum of what they, the model and the judge (None: there is
        none) say, if all of them say something. Of turns it is the sum of what is said of each.

        Returns, too, the rewards that the R response tokens have one by one, as a part of the value, NaN for one that
        has none; None if they have none of their own."""
        results, failures = self._results(sample, of_model, verdict)
        parts: dict[str, float] = {}
        by_token = []
        num_turns = len(turn_ends(sample.response_mask))
        for name, result in results.items():
            per_turn = name in self._per_turn
            rewards = _rewards(result, num_turns) if per_turn else _rewards([result], 1)
            if rewards is None:
                wanted = (
                    f"{num_turns} finite numbers in a list, one a turn" if per_turn else "a finite number or a bool"
                )
                failures.append(f"{name} returned {_shown(result)}, not {wanted}, on sample {sample.id}")
                continue
            parts[name] = math.fsum(rewards)
            if per_turn and self._rewards_tokens:
                by_token.append([self._weights[name] * reward for reward in on_turns(rewards, sample.response_mask)])
        if failures:
            return Score(value=None, parts=parts, failure=f"rewards.functions: {'; '.join(failures)}"), None
        if of_model is not None and of_model.by_token is not None:
            by_token.append([self._weights[MODEL] * reward for reward in of_model.by_token])
        value = sum(self._weights[name] * part for name, part in parts.items())
        if not by_token:
            return Score(value, parts), None
        rewards = together(by_token)
        return Score(
            value, parts, token_reward_totals=TokenTotals.of([own for own in rewards if not math.isnan(own)])
        ), rewards

    def _results(
        self, sample: Sample, of_model: ModelReward | None, verdict: judge.Verdict | None
    ) -> tuple[dict[str, Any], list[str]]:
        """What each of them says, and why some say nothing."""
        results: dict[str, Any] = {}
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
        return results, failures


def _rewards(results: Any, count: int) -> list[float] | None:
    """None if they are not as many finite numbers, or their sum is none."""
    if not isinstance(results, list | tuple) or len(results) != count:
        return None
    values = [value for value in map(_finite, results) if value is not None]
    return values if len(values) == count and math.isfinite(sum(values)) else None


def _shown(result: Any) -> str:
    if isinstance(result, list | tuple):
        return f"a list of {len(result)}"
    return str(result) if isinstance(result, float) else type(result).__name__


def _finite(result: Any) -> float | None:
    """None if it is no number, or not a finite one."""
    if not isinstance(result, numbers.Real):
        return None
    try:
        value = float(result)
    except OverflowError:  # an int beyond all floats
        return None
    return value if math.isfinite(value) else None
