"""The reward model as a judge: a language model that is asked about each sample, and answers with a rating."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megarl.config.model_schema import RewardModel
from megarl.core.types import Sample
from megarl.rewards.classifier import ModelReward
from megarl.rewards.rating import TEMPLATE, question, rating
from megarl.rewards.reading import Reading, Unreadable, reading_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ModelJudge:
    """Writes the question about a sample in the judge's tokens, and reads the rating from the tokens of its answer."""

    def __init__(
        self,
        settings: RewardModel,
        longest: int,
        tokenizer: PreTrainedTokenizerBase,
        actor_tokenizer: PreTrainedTokenizerBase,
    ):
        """Takes the reward model's settings.

        longest     the most tokens of question and answer
        tokenizer   the judge's, with a chat template
        """
        self._judge, self._longest = settings.judge, longest
        self._tokenizer, self._actor_tokenizer = tokenizer, actor_tokenizer
        self._template = TEMPLATE if settings.judge.template is None else settings.judge.template

    def read(self, sample: Sample) -> Reading:
        """Returns the question, as the user's message, after which the judge speaks. Raises Unreadable for one that
        leaves too few tokens for an answer, and where the chat template refuses it."""
        from jinja2.exceptions import TemplateError

        # Without the special tokens of the actor's chat template, which the judge may have, too.
        prompt = self._actor_tokenizer.decode(sample.prompt.token_ids.tolist(), skip_special_tokens=True)
        asked = question(self._template, prompt, sample.text, sample.prompt.answer)
        message = {"role": "user", "content": asked}
        try:
            text = self._tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
        except TemplateError as error:
            raise Unreadable(f"has a chat template that refuses the question: {error}") from error
        ids = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) + self._judge.max_new_tokens > self._longest:
            raise Unreadable(
                f"would be asked in {len(ids)} tokens, and with reward_model.judge.max_new_tokens="
                f"{self._judge.max_new_tokens} for its answer has {self._longest}; raise reward_model.context_length"
            )
        return reading_of(sample, ids, len(ids) - 1, (len(sample.text),))

    def reward(self, sample: Sample, scores: Sequence[int], reading: Reading | None = None) -> ModelReward:
        """Returns the sample's reward, the failure for an answer without a rating. scores: the answer's token ids."""
        try:
            return ModelReward(rating(self._tokenizer.decode(scores, skip_special_tokens=True), self._judge.scale))
        except ValueError as reason:
            return ModelReward(None, failure=f"gave {reason}")
