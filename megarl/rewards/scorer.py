"""Scores samples with reward functions, a reward model and a judge. A failure yields no score, never a zero."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from megarl.config import schema
from megarl.core.episode import LOST, Episode
from megarl.core.errors import UserError
from megarl.core.latents import AnySample
from megarl.core.sample import Sample
from megarl.core.score import ENVIRONMENT, RewardPart, Score, TokenTotals
from megarl.rewards import judge
from megarl.rewards.classifier import ModelReward
from megarl.rewards.process import on_turns, together, turn_ends
from megarl.rewards.result import UNRATED, WORST_RATING, Result

MODEL = "reward_model"
"""Name of the reward model's reward component."""

LARGEST = 3.4e38
"""Maximum absolute value of a reward. The trainer computes in float32, and squares of much larger rewards would
overflow even float64."""

ONE_TURN = (True,)
"""Response mask of an image, which counts as a single turn."""


class Scorer:
    """Combines results into scores, with the weights of the reward functions, the reward model and the environment."""

    def __init__(
        self,
        functions: Sequence[schema.RewardFunction],
        model_weight: float = 1.0,
        rewards_tokens: bool = False,
        environment_weight: float = 1.0,
    ) -> None:
        """Create a scorer. Raise UserError if a function is listed twice. `rewards_tokens`: whether the advantage
        estimator uses per-token rewards."""
        _require_distinct(functions)
        weights = {MODEL: model_weight, judge.NAME: 1.0, ENVIRONMENT: environment_weight}
        self._weights = {entry.label: entry.weight for entry in functions} | weights
        self._per_turn = {entry.label for entry in functions if entry.per_turn}
        self._rewards_tokens = rewards_tokens

    def score(
        self,
        sample: AnySample,
        results: Mapping[str, Result],
        model_reward: ModelReward | None = None,
        verdict: judge.Verdict | None = None,
    ) -> tuple[Score, list[float] | None]:
        """Return the sample's score and its per-token rewards.

        The score's value is the weighted sum of the rewards from the functions, the reward model and the judge, or
        None if any of them failed. A per-turn function contributes the sum over turns. In an environment rollout, each
        sample's value includes the sum of all turn rewards in the rollout.

        The per-token rewards are R values, NaN for tokens without a reward. They are already included in the score's
        value. They are None if no reward is assigned to individual tokens.

        Args:
            results: results of the functions, by name.
            model_reward, verdict: None if the run has no reward model or no judge.
        """
        if sample.episode is not None and sample.episode.failure is not None:
            is_lost = sample.episode.info.stop_reason == LOST
            failure = f"environment: {sample.episode.failure}"
            return Score(value=None, parts={}, failure=failure, is_infrastructure=is_lost), None
        returned, failures = _returned(sample, results, model_reward, verdict)
        parts: dict[str, float] = {}
        of_whole: dict[str, float] = {}
        issues: dict[str, str | None] = {}
        by_token = []
        by_turn: list[list[float]] = []
        mask = sample.response_mask if isinstance(sample, Sample) else ONE_TURN
        num_turns = len(turn_ends(mask))
        for name, result in returned.items():
            issues |= {f"{name}_{issue}": problem for issue, problem in result.issues.items()}
            per_turn = name in self._per_turn
            rewards = _rewards(result.value, num_turns) if per_turn else _rewards([result.value], 1)
            if rewards is None:
                expected = (
                    f"a list of {num_turns} finite numbers, one per turn" if per_turn else "a finite number or a bool"
                )
                failures.append(f"{name} returned {result.returned} instead of {expected} on sample {sample.id}")
                continue
            parts[name] = math.fsum(rewards)
            if result.issues.get(UNRATED) is not None:
                parts[name] = 1 - WORST_RATING if self._weights[name] < 0 else WORST_RATING
            if per_turn:
                by_turn.append([self._weights[name] * reward for reward in rewards])
            if not (per_turn and self._rewards_tokens):
                of_whole[name] = parts[name]
        if sample.episode is not None:
            parts |= _environment_parts(sample.episode)
            of_whole[ENVIRONMENT] = sample.episode.outcome if self._rewards_tokens else parts[ENVIRONMENT]
            turn_rewards = sample.episode.rewards[sample.episode.first_turn :][:num_turns]
            if any(reward is not None for reward in turn_rewards):
                weight = self._weights[ENVIRONMENT]
                by_turn.append([math.nan if reward is None else weight * reward for reward in turn_rewards])
        if self._rewards_tokens:
            by_token += [on_turns(rewards, mask) for rewards in by_turn]
        if failures:
            is_lost = len(failures) == _num_lost(results, verdict)
            failure = f"rewards.functions: {'; '.join(failures)}"
            return Score(None, parts, failure, is_infrastructure=is_lost, issues=issues), None
        if model_reward is not None and model_reward.by_token is not None:
            by_token.append([self._weights[MODEL] * reward for reward in model_reward.by_token])
            of_whole.pop(MODEL)
        value = sum(self._weights[name] * part for name, part in parts.items() if name in self._weights)
        tokens = [reward for rewards in by_token for reward in rewards if not math.isnan(reward)]
        invalid = next((number for number in (value, *tokens) if not abs(number) <= LARGEST), None)
        if invalid is not None:
            subject = "the weighted sum of the rewards" if invalid is value else "the reward of a token"
            limit = ", more than float32 can represent" if math.isfinite(invalid) else ""
            failure = f"rewards.functions: {subject} of sample {sample.id} is {invalid}{limit}"
            return Score(None, parts, failure, issues=issues), None
        weights = self._weights
        reward_parts = {name: RewardPart(part, weights[name]) for name, part in of_whole.items() if name in weights}
        score = Score(value, parts, turn_rewards=_sums(by_turn, sample), reward_parts=reward_parts, issues=issues)
        if not by_token:
            return score, None
        rewards = together(by_token)
        totals = TokenTotals.of([reward for reward in rewards if not math.isnan(reward)])
        return replace(score, token_reward_totals=totals), rewards


def require_ratings(scores: Sequence[Score]) -> list[Score]:
    """Return a step's scores. If a judge left most responses (and at least two) unrated, blame its settings rather than
    the responses, and turn the scores of the unrated responses into failures."""
    required = list(scores)
    for name in sorted({name for score in scores for name in score.issues if name.endswith(f"_{UNRATED}")}):
        component = name.removesuffix(f"_{UNRATED}")
        judged = [i for i, score in enumerate(scores) if name in score.issues]
        unrated = [i for i in judged if scores[i].issues[name] is not None]
        if len(unrated) <= max(1, len(judged) / 2):
            continue
        for i in unrated:
            failure = (
                f"rewards.functions: {component}: {scores[i].issues[name]} ({len(unrated)} of {len(judged)} responses "
                "have no rating, so the judge's template, scale or maximum number of new tokens may be wrong)"
            )
            parts = {part: value for part, value in scores[i].parts.items() if part != component}
            required[i] = replace(scores[i], value=None, parts=parts, failure=scores[i].failure or failure)
    return required


def _environment_parts(episode: Episode) -> dict[str, float]:
    """Return the environment's total reward and its named components."""
    named = {f"{ENVIRONMENT}_{name}": total for name, total in episode.parts.items()}
    rewards = [*(reward for reward in episode.rewards if reward is not None), episode.outcome]
    # fsum raises an exception if the sum overflows or contains infinities of opposite sign.
    return {ENVIRONMENT: math.fsum(rewards) if math.isfinite(sum(rewards)) else math.nan, **named}


def _sums(by_turn: Sequence[Sequence[float]], sample: AnySample) -> tuple[float, ...]:
    """Return the summed reward of each turn of an environment's sample; empty for other samples. In `by_turn`, NaN
    means that a turn has no reward."""
    turns = () if sample.episode is None else sample.episode.turns
    rewards = together(by_turn) if by_turn else [0.0] * len(turns)
    return tuple(0.0 if math.isnan(reward) else reward for reward in rewards) if turns else ()


def _require_distinct(functions: Sequence[schema.RewardFunction]) -> None:
    """Raise UserError if two entries have the same label."""
    labels = [entry.label for entry in functions]
    label = next((label for label in labels if labels.count(label) > 1), None)
    if label is None:
        return
    first, *others = [(entry.function, entry.options, entry.sources) for entry in functions if entry.label == label]
    same = all(other == first for other in others)
    remedy = "list it once, with the sum of the weights" if same else "set a different `name` in each entry"
    raise UserError(f"rewards.functions: {label} is listed twice. Fix: {remedy}")


def _returned(
    sample: AnySample, results: Mapping[str, Result], model_reward: ModelReward | None, verdict: judge.Verdict | None
) -> tuple[dict[str, Result], list[str]]:
    """Return the results from the model, the judge and the functions that succeeded, and a line for each failure."""
    returned: dict[str, Result] = {}
    failures: list[str] = []
    if model_reward is not None and model_reward.failure is None:
        returned[MODEL] = Result(model_reward.value, str(model_reward.value), issues=model_reward.issues)
    elif model_reward is not None:
        failures.append(f"{MODEL} on sample {sample.id}: {model_reward.failure}")
    if isinstance(verdict, str):
        failures.append(f"{judge.NAME} {verdict} (sample {sample.id})")
    elif verdict is not None:
        returned[judge.NAME] = Result(verdict, str(verdict))
    for name, result in results.items():
        if result.failure is None:
            returned[name] = result
        else:
            failures.append(f"{name} {result.failure} on sample {sample.id}")
    return returned, failures


def _num_lost(results: Mapping[str, Result], verdict: judge.Verdict | None) -> int:
    """Return the number of failures caused by the infrastructure."""
    return sum(result.is_infrastructure for result in results.values()) + isinstance(verdict, judge.Lost)


def _rewards(results: object, count: int) -> list[float] | None:
    """Return the results if they are `count` finite numbers with a finite sum, or None."""
    if not isinstance(results, list) or len(results) != count:
        return None
    finite = all(isinstance(result, float) and math.isfinite(result) for result in results)
    return results if finite and math.isfinite(sum(results)) else None
