"""Computes a sample's reward from a classifier's per-token scores."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megarl.config.model_schema import RewardModel
from megarl.core.sample import Sample
from megarl.models.classifier import Kind
from megarl.rewards.process import aggregated, on_trained_tokens, step_ends, step_stops
from megarl.rewards.reading import Reader, Reading
from megarl.rewards.result import Issues

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class ModelReward:
    """A reward model's result for one sample.

    Attributes:
        value: the reward; not finite if the model's scores are not. None if the model could not score the sample.
        by_token: rewards for the R response tokens, which sum to `value`. NaN for tokens without a reward. None if
            rewards are not assigned to individual tokens.
        failure: the reason why `value` is None, or None.
        issues: problems that the response caused.
    """

    value: float | None
    by_token: list[float] | None = None
    failure: str | None = None
    issues: Issues = field(default_factory=dict)


class ClassifierReward:
    """Converts a reward model's scores to rewards."""

    def __init__(
        self,
        kind: Kind,
        settings: RewardModel,
        tokenizer: PreTrainedTokenizerBase,
        reader: Reader | None,
        rewards_tokens: bool,
    ):
        """`reader` is None if the classifier reads the sampled ids directly. `rewards_tokens`: whether the advantage
        estimator uses per-token rewards."""
        self._kind, self._settings, self._tokenizer, self._reader = kind, settings, tokenizer, reader
        self._by_token = rewards_tokens and kind == "token" and settings.aggregation is None

    def reward(self, sample: Sample, scores: Sequence[float], reading: Reading | None = None) -> ModelReward:
        """Return the sample's reward. `scores` contains one score per sampled response token, or per token of the
        reading if there is one. A sequence classifier's last score is the sample's score."""
        issues = {} if reading is None else reading.issues
        if self._kind == "sequence":
            return ModelReward(scores[-1], issues=issues)
        scored = self._scored(sample) if reading is None else self._scored_in_reading(sample, reading)
        value = aggregated(self._settings.aggregation or "sum", [scores[i] for i in scored])
        if not self._by_token or not math.isfinite(value):
            return ModelReward(value, issues=issues)
        indexes = scored
        if reading is not None and self._reader is not None:
            indexes = self._reader.sampled(sample, [reading.ends[i] for i in scored])
        score_by_index: dict[int, float] = {}
        for index, i in zip(indexes, scored, strict=True):  # several steps may end in the same sampled token
            score_by_index[index] = score_by_index.get(index, 0.0) + scores[i]
        by_token = on_trained_tokens(score_by_index, sample.response_mask)
        total = math.fsum(reward for reward in by_token if not math.isnan(reward))
        return ModelReward(total, by_token, issues=issues)

    def _scored(self, sample: Sample) -> Sequence[int]:
        """Return the indices of the sampled tokens whose scores are used."""
        if self._settings.step_end is None:
            return range(len(sample.response_ids))
        pieces = [str(self._tokenizer.decode([token])) for token in sample.response_ids.tolist()]
        return step_ends(pieces, self._settings.step_end)

    def _scored_in_reading(self, sample: Sample, reading: Reading) -> Sequence[int]:
        """Return the indices of the reading's tokens whose scores are used."""
        last = len(reading.ends) - 1
        if self._settings.step_end is None:
            return range(last + 1)
        ends, stops = reading.ends, step_stops(sample.text, self._settings.step_end)
        reached = (ends[min(bisect_left(ends, stop), last)] for stop in stops)
        # If a character spans several tokens, use the last one.
        return sorted({*(bisect_right(ends, end) - 1 for end in reached), last})
