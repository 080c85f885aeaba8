"""A reward model that acts as a judge: a language model that rates each sample in text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from megarl.config.model_schema import RewardModel
from megarl.core.prompt import Prompt
from megarl.core.sample import Sample
from megarl.data.typed_tokens import TypedTokens
from megarl.rewards.classifier import ModelReward
from megarl.rewards.rating import TEMPLATE, question, rating
from megarl.rewards.reading import Reading, Unreadable, reading_of, render, text_of, truncated
from megarl.rewards.result import TRUNCATED

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
        self._judge, self._longest = settings.judge, longest - settings.judge.max_new_tokens
        self._tokenizer, self._actor_tokenizer = tokenizer, actor_tokenizer
        self._typed = TypedTokens(tokenizer)
        self._template = TEMPLATE if settings.judge.template is None else settings.judge.template

    def read(self, sample: Sample) -> Reading:
        """Return the question as a user message, followed by the header of the judge's turn. If the question leaves
        too few tokens for an answer, or the chat template rejects it, the response is truncated at its end. If the
        question is too long even without the response, its start is dropped. Raise Unreadable if the template rejects
        the question without the response."""
        question_of = lru_cache(maxsize=1)(lambda response: self._question(sample.prompt, response))
        problem: str | None = None

        def fits(response: str) -> bool:
            nonlocal problem
            try:
                num_tokens = len(question_of(response))
            except Unreadable as rejection:
                problem = problem or str(rejection)
                return False
            if num_tokens > self._longest:
                problem = problem or f"the question has {num_tokens} tokens, but the limit is {self._longest}"
            return num_tokens <= self._longest

        response = truncated(sample.text, fits)
        ids = question_of(sample.text if response is None else response)[-self._longest :]
        return reading_of(sample, ids, len(ids) - 1, (len(sample.text),), {TRUNCATED: problem})

    def check_prompt(self, prompt: Prompt) -> None:
        """Raise Unreadable if the judge cannot read the question about this prompt."""
        num_tokens = len(self._question(prompt, ""))
        if num_tokens >= self._longest:
            raise Unreadable(
                f"the question has {num_tokens} tokens without the response, but the judge's context has "
                f"{self._longest} (excluding reward_model.judge.max_new_tokens={self._judge.max_new_tokens}). Fix: "
                "raise reward_model.context_length, or drop the row"
            )

    def _question(self, prompt: Prompt, response: str) -> list[int]:
        # Drop the special tokens of the actor's chat template, because the judge's template may use the same ones.
        text = text_of(self._actor_tokenizer, prompt.token_ids.tolist())
        mark = self._typed.mark  # typed special tokens must not start the judge's turn
        content = question(self._template, mark(text), mark(response), mark(str(prompt.answer)))
        return self._typed.ids(
            render(self._tokenizer, [{"role": "user", "content": content}], "question", opens_turn=True)
        )

    def reward(self, sample: Sample, scores: Sequence[int], reading: Reading | None = None) -> ModelReward:
        """Return the sample's rating. `scores` contains the token ids of the judge's answer."""
        rated = rating(text_of(self._tokenizer, list(scores)), self._judge.scale)
        return ModelReward(float(rated), issues={**rated.issues, **({} if reading is None else reading.issues)})
