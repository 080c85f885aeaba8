"""A reward model that acts as a judge: a language model that rates each sample in text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megarl.config.model_schema import RewardModel
from megarl.core.types import Sample
from megarl.data.typed_tokens import TypedTokens
from megarl.rewards.classifier import ModelReward
from megarl.rewards.rating import TEMPLATE, question, rating
from megarl.rewards.reading import Reading, Unreadable, reading_of, render, text_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ModelJudge:
    """Renders the question about a sample in the judge's tokens and parses the rating in the judge's answer."""

    def __init__(
        self,
        settings: RewardModel,
        longest: int,
        tokenizer: PreTrainedTokenizerBase,
        actor_tokenizer: PreTrainedTokenizerBase,
    ):
        """`longest` is the maximum number of tokens in the question and the answer combined."""
        self._judge, self._longest = settings.judge, longest
        self._tokenizer, self._actor_tokenizer = tokenizer, actor_tokenizer
        self._typed = TypedTokens(tokenizer)
        self._template = TEMPLATE if settings.judge.template is None else settings.judge.template

    def read(self, sample: Sample) -> Reading:
        """Tokenize the question as a user message, followed by the header of the judge's turn. Raise Unreadable if the
        question leaves too few tokens for an answer, or the chat template rejects it."""
        # Special tokens of the actor's chat template are dropped, because the judge may use the same ones.
        prompt = text_of(self._actor_tokenizer, sample.prompt.token_ids.tolist())
        mark = self._typed.mark  # the response must not start the judge's turn
        content = question(self._template, mark(prompt), mark(sample.text), sample.prompt.answer)
        message = {"role": "user", "content": content}
        text = render(self._tokenizer, [message], "question", opens_turn=True)
        ids = self._typed.ids(text)
        if len(ids) + self._judge.max_new_tokens > self._longest:
            raise Unreadable(
                f"the question ({len(ids)} tokens) and the answer (reward_model.judge.max_new_tokens="
                f"{self._judge.max_new_tokens}) exceed the context of {self._longest} tokens. Fix: raise "
                "reward_model.context_length"
            )
        return reading_of(sample, ids, len(ids) - 1, (len(sample.text),))

    def reward(self, sample: Sample, scores: Sequence[int], reading: Reading | None = None) -> ModelReward:
        """Return the sample's reward, or a failure if the answer with the token ids `scores` has no rating."""
        try:
            return ModelReward(rating(text_of(self._tokenizer, list(scores)), self._judge.scale))
        except ValueError as reason:
            return ModelReward(None, failure=str(reason))
