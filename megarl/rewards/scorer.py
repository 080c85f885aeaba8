"""Scores samples by what reward functions, a model and a judge say. One that fails gives a failure, never a zero."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from megarl.config import schema
from megarl.core.errors import UserError
from megarl.core.types import Episode, Sample, Score, TokenTotals
from megarl.rewards import judge
from megarl.rewards.classifier import ModelReward
from megarl.rewards.process import on_turns, together, turn_ends
from megarl.rewards.result import Result

MODEL = "reward_model"
"""The name of a reward model's part of the reward."""

ENVIRONMENT = "environment"
"""The name of an environment's part of the reward."""


class Scorer:
    """The weights of a config's reward functions, its reward model and its judge."""

    def __init__(
        self,
        functions: Sequence[schema.RewardFunction],
        model_weight: float = 1.0,
        rewards_tokens: bool = False,
        environment_weight: float = 1.0,
    ) -> None:
        """Raises UserError for a function that is listed twice.

        model_weight         the weight of a reward model's score
        rewards_tokens       whether the advantages have a use for rewards of single tokens
        environment_weight   the weight of an environment's rewards
        """
        _require_distinct(functions)
        weights = {MODEL: model_weight, judge.NAME: 1.0, ENVIRONMENT: environment_weight}
        self._weights = {entry.label: entry.weight for entry in functions} | weights
        self._per_turn = {entry.label for entry in functions if entry.per_turn}
        self._rewards_tokens = rewards_tokens

    def score(
        self,
        sample: Sample,
        results: Mapping[str, Result],
        model_reward: ModelReward | None = None,
        verdict: judge.Verdict | None = None,
    ) -> tuple[Score, list[float] | None]:
        """Returns the sample's score and the rewards of its tokens.

        The score's value is the weighted sum of what the functions (by name), the model and the judge (None: there is
        none) say, if all of them say something; a function of turns says the sum of their rewards. The R response
        tokens' rewards are a part of the value, NaN for a token without one, and None if no token has one of its own.
        Of a rollout in an environment, the sum of its turns' rewards is part of the value of each of its samples.
        """
        if sample.episode is not None and sample.episode.failure is not None:
            return Score(value=None, parts={}, failure=f"environment: {sample.episode.failure}"), None
        said, failures = _said(sample, results, model_reward, verdict)
        parts: dict[str, float] = {}
        by_token = []
        num_turns = len(turn_ends(sample.response_mask))
        for name, result in said.items():
            per_turn = name in self._per_turn
            rewards = _rewards(result.value, num_turns) if per_turn else _rewards([result.value], 1)
            if rewards is None:
                wanted = (
                    f"{num_turns} finite numbers in a list, one a turn" if per_turn else "a finite number or a bool"
                )
                failures.append(f"{name} returned {result.returned}, not {wanted}, on sample {sample.id}")
                continue
            parts[name] = math.fsum(rewards)
            if per_turn and self._rewards_tokens:
                by_token.append([self._weights[name] * reward for reward in on_turns(rewards, sample.response_mask)])
        if sample.episode is not None:
            parts |= _environment_parts(sample.episode)
            own = sample.episode.rewards[sample.episode.first_turn :][:num_turns]
            if self._rewards_tokens and any(reward is not None for reward in own):
                turns = [math.nan if reward is None else self._weights[ENVIRONMENT] * reward for reward in own]
                by_token.append(on_turns(turns, sample.response_mask))
        if failures:
            return Score(value=None, parts=parts, failure=f"rewards.functions: {'; '.join(failures)}"), None
        if model_reward is not None and model_reward.by_token is not None:
            by_token.append([self._weights[MODEL] * reward for reward in model_reward.by_token])
        value = sum(self._weights[name] * part for name, part in parts.items() if name in self._weights)
        if not by_token:
            return Score(value, parts), None
        rewards = together(by_token)
        return Score(
            value, parts, token_reward_totals=TokenTotals.of([reward for reward in rewards if not math.isnan(reward)])
        ), rewards


def _environment_parts(episode: Episode) -> dict[str, float]:
    """Returns the sum of the turns' rewards, and the sums of those that have names, which are parts of it."""
    named = {f"{ENVIRONMENT}_{name}": total for name, total in episode.parts.items()}
    of_turns = [reward for reward in episode.rewards if reward is not None]
    return {ENVIRONMENT: math.fsum([*of_turns, episode.outcome]), **named}


def _require_distinct(functions: Sequence[schema.RewardFunction]) -> None:
    """Raises UserError for two entries with one label."""
    labels = [entry.label for entry in functions]
    label = next((label for label in labels if labels.count(label) > 1), None)
    if label is None:
        return
    first, *others = [(entry.function, entry.options, entry.sources) for entry in functions if entry.label == label]
    same = all(other == first for other in others)
    remedy = "list it once, with the sum of the weights" if same else "give each a `name` of its own for its metrics"
    raise UserError(f"rewards.functions: {label} is listed twice; {remedy}")


def _said(
    sample: Sample, results: Mapping[str, Result], model_reward: ModelReward | None, verdict: judge.Verdict | None
) -> tuple[dict[str, Result], list[str]]:
    """Returns what the model, the judge and each function returned, and the reasons why some returned nothing."""
    said: dict[str, Result] = {}
    failures: list[str] = []
    if model_reward is not None and model_reward.failure is None:
        said[MODEL] = Result(model_reward.value, str(model_reward.value))
    elif model_reward is not None:
        failures.append(f"{MODEL} {model_reward.failure}, on sample {sample.id}")
    if isinstance(verdict, str):
        failures.append(f"{judge.NAME} {verdict}, on sample {sample.id}")
    elif verdict is not None:
        said[judge.NAME] = Result(verdict, str(verdict))
    for name, result in results.items():
        if result.failure is None:
            said[name] = result
        else:
            failures.append(f"{name} {result.failure} on sample {sample.id}")
    return said, failures


def _rewards(results: object, count: int) -> list[float] | None:
    """Returns `count` rewards, None if the results are not as many finite numbers, or their sum is not finite."""
    if not isinstance(results, list) or len(results) != count:
        return None
    finite = all(isinstance(result, float) and math.isfinite(result) for result in results)
    return results if finite and math.isfinite(sum(results)) else None
