"""Scores samples with the reward functions of a config. A function that fails gives a failure, never a zero."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

from megarl.config import schema
from megarl.core.errors import UserError
from megarl.core.types import Sample, Score, TokenTotals
from megarl.rewards import judge, registry
from megarl.rewards.classifier import ModelReward
from megarl.rewards.process import on_turns, together, turn_ends

MODEL = "reward_model"
"""The name of a reward model's part of the reward."""


class Scorer:
    """The reward functions of a config, a judge and their weights.

    A function that never returns is stopped by whoever runs the scorer in a process that it can kill.
    """

    def __init__(
        self,
        functions: Sequence[schema.RewardFunction],
        model_weight: float = 1.0,
        judge_name: str | None = None,
        rewards_tokens: bool = False,
    ) -> None:
        """Raises UserError for a function that is not found or is listed twice.

        model_weight     the weight of a reward model's score, which others compute
        judge_name       path/to/file.py:function
        rewards_tokens   whether the advantages have a use for rewards of single tokens
        """
        names = [entry.function for entry in functions]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise UserError(f"rewards.functions: {twice} is listed twice; list it once, with the sum of the weights")
        self._functions = {name: registry.resolve(name) for name in names}
        self._judge: judge.Judge | None = None
        if judge_name is not None:
            self._judge = registry.from_file("rewards.judge", judge_name, "prompt, first, second, answer")
        weights = {MODEL: model_weight, judge.NAME: 1.0}
        self._weights = {entry.function: entry.weight for entry in functions} | weights
        self._per_turn = {entry.function for entry in functions if entry.per_turn}
        self._rewards_tokens = rewards_tokens

    def verdicts(self, samples: Sequence[Sample]) -> dict[str, judge.Verdict]:
        """Returns the judge's verdicts by sample id; empty if there is no judge. samples: all of their prompts."""
        return {} if self._judge is None else judge.verdicts(self._judge, samples)

    def score(
        self, sample: Sample, model_reward: ModelReward | None = None, verdict: judge.Verdict | None = None
    ) -> tuple[Score, list[float] | None]:
        """Calls every function. Returns the sample's score and the rewards of its tokens.

        The score's value is the weighted sum of what the functions, the model and the judge (None: there is none) say,
        if all of them say something; a function of turns says the sum of their rewards. The R response tokens' rewards
        are a part of the value, NaN for a token without one, and None if no token has one of its own.
        """
        results, failures = self._results(sample, model_reward, verdict)
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
        if model_reward is not None and model_reward.by_token is not None:
            by_token.append([self._weights[MODEL] * reward for reward in model_reward.by_token])
        value = sum(self._weights[name] * part for name, part in parts.items())
        if not by_token:
            return Score(value, parts), None
        rewards = together(by_token)
        return Score(
            value, parts, token_reward_totals=TokenTotals.of([reward for reward in rewards if not math.isnan(reward)])
        ), rewards

    def _results(
        self, sample: Sample, model_reward: ModelReward | None, verdict: judge.Verdict | None
    ) -> tuple[dict[str, Any], list[str]]:
        """Returns what each function, the model and the judge say, and the reasons why some say nothing."""
        results: dict[str, Any] = {}
        failures: list[str] = []
        if model_reward is not None and model_reward.failure is None:
            results[MODEL] = model_reward.value
        elif model_reward is not None:
            failures.append(f"{MODEL} {model_reward.failure}, on sample {sample.id}")
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
    """Returns `count` rewards, None if the results are not as many finite numbers, or their sum is not finite."""
    if not isinstance(results, list | tuple) or len(results) != count:
        return None
    values = [value for value in map(_finite, results) if value is not None]
    return values if len(values) == count and math.isfinite(sum(values)) else None


def _shown(result: Any) -> str:
    if isinstance(result, list | tuple):
        return f"a list of {len(result)}"
    return str(result) if isinstance(result, float) else type(result).__name__


def _finite(result: Any) -> float | None:
    """Returns the number as a float, None if it is none, or not a finite one."""
    if not isinstance(result, numbers.Real):
        return None
    try:
        value = float(result)
    except OverflowError:  # an int beyond all floats
        return None
    return value if math.isfinite(value) else None
