"""From a classifier's scores of a sample's tokens to the sample's reward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megarl.batch import Sample
from megarl.config.schema import RewardModel
from megarl.rewards.process import aggregated, on_trained_tokens, step_ends

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class ModelReward:
    """What a reward model says of a sample.

    value      its reward, not finite where the model's scores are not
    by_token   R rewards of its response tokens, in place of one for the whole; None: they have none of their own
    """

    value: float
    by_token: list[float] | None = None


class ClassifierReward:
    """The rule by which a reward model's scores become rewards."""

    def __init__(
        self,
        kind: Literal["sequence", "token"],
        settings: RewardModel,
        tokenizer: PreTrainedTokenizerBase,
        rewards_tokens: bool,
    ):
        """kind: of classifier. tokenizer: its own. rewards_tokens: whether the advantages have a use for rewards of
        single tokens."""
        self._kind, self._settings, self._tokenizer = kind, settings, tokenizer
        self._by_token = rewards_tokens and kind == "token" and settings.aggregation is None

    def reward(self, sample: Sample, scores: Sequence[float]) -> ModelReward:
        """scores: R of the response tokens; of a sequence classifier the last is that of the sample."""
        if self._kind == "sequence":
            return ModelReward(scores[-1])
        scored = {i: scores[i] for i in self._scored(sample)}
        value = aggregated(self._settings.aggregation or "sum", list(scored.values()))
        return ModelReward(value, on_trained_tokens(scored, sample.response_mask) if self._by_token else None)

    def _scored(self, sample: Sample) -> Sequence[int]:
        """Indexes of the tokens whose scores count."""
        if self._settings.step_end is None:
            return range(len(sample.response_ids))
        pieces = [self._tokenizer.decode([token]) for token in sample.response_ids]
        return step_ends(pieces, self._settings.step_end)
