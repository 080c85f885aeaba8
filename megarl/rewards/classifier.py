"""From a classifier's scores of a sample's tokens to the sample's reward."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megarl.config.classifier import Kind
from megarl.config.schema import RewardModel
from megarl.core.types import Sample
from megarl.rewards.process import aggregated, on_trained_tokens, step_ends, step_stops
from megarl.rewards.reading import Reader, Reading, Unreadable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class ModelReward:
    """What a reward model says of a sample.

    value      its reward, not finite where the model's scores are not; None if it could not be asked
    by_token   R rewards of its response tokens, which sum up to value, NaN for one without; None: they have none of
               their own
    failure    None, or why there is no value
    """

    value: float | None
    by_token: list[float] | None = None
    failure: str | None = None


class ClassifierReward:
    """The rule by which a reward model's scores become rewards."""

    def __init__(
        self,
        kind: Kind,
        settings: RewardModel,
        tokenizer: PreTrainedTokenizerBase,
        reader: Reader | None,
        rewards_tokens: bool,
    ):
        """kind: of classifier. tokenizer: its own. reader: None where it reads the sampled ids. rewards_tokens: whether
        the advantages have a use for rewards of single tokens."""
        self._kind, self._settings, self._tokenizer, self._reader = kind, settings, tokenizer, reader
        self._by_token = rewards_tokens and kind == "token" and settings.aggregation is None

    def reward(self, sample: Sample, scores: Sequence[float], reading: Reading | None = None) -> ModelReward:
        """scores: of the response's tokens, the sampled ones or those of the reading; of a sequence classifier the last
        is that of the sample."""
        if self._kind == "sequence":
            return ModelReward(scores[-1])
        scored = self._scored(sample) if reading is None else self._scored_of(sample, reading)
        value = aggregated(self._settings.aggregation or "sum", [scores[i] for i in scored])
        if not self._by_token or not math.isfinite(value):
            return ModelReward(value)
        try:
            at = scored if reading is None else self._reader.sampled(sample, [reading.ends[i] for i in scored])
        except Unreadable as reason:
            return ModelReward(None, failure=str(reason))
        scores_at = dict(zip(at, (scores[i] for i in scored), strict=True))
        by_token = on_trained_tokens(scores_at, sample.response_mask)
        return ModelReward(math.fsum(reward for reward in by_token if not math.isnan(reward)), by_token)

    def _scored(self, sample: Sample) -> Sequence[int]:
        """Indexes of the sampled tokens whose scores count."""
        if self._settings.step_end is None:
            return range(len(sample.response_ids))
        pieces = [self._tokenizer.decode([token]) for token in sample.response_ids.tolist()]
        return step_ends(pieces, self._settings.step_end)

    def _scored_of(self, sample: Sample, reading: Reading) -> Sequence[int]:
        """The same of the reading's tokens."""
        last = len(reading.ends) - 1
        if self._settings.step_end is None:
            return range(last + 1)
        ends, stops = reading.ends, step_stops(sample.text, self._settings.step_end)
        reached = (ends[min(bisect_left(ends, stop), last)] for stop in stops)
        # The last of several tokens of one character.
        return sorted({*(bisect_right(ends, end) - 1 for end in reached), last})
