"""Renders samples for a reward model whose tokenizer differs from the actor's. The trained token ids stay unchanged."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from megarl.config.model_schema import RewardModel
from megarl.core.types import Prompt, Sample, VersionRun
from megarl.data.chat import MARK, response_span
from megarl.data.typed_tokens import TypedTokens
from megarl.models.classifier import Kind

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONTEXT = 5
"""Number of prompt tokens decoded before a response."""


class Unreadable(Exception):
    """Raised if a reward model cannot read a sample; the message is a short reason."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A sample tokenized for a reward model.

    Attributes:
        sample: the tokenized sample. Only the scores of its response tokens count.
        ends: for each of these response tokens, its end offset in the text of the sampled response.
    """

    sample: Sample
    ends: tuple[int, ...]


class Reader:
    """Tokenizes samples for a reward model and maps its scores back to the sampled tokens."""

    def __init__(
        self,
        kind: Kind,
        settings: RewardModel,
        longest: int,
        tokenizer: PreTrainedTokenizerBase,
        actor_tokenizer: PreTrainedTokenizerBase,
    ):
        """`longest` is the maximum number of reward model tokens per sample."""
        self._kind, self._settings, self._longest = kind, settings, longest
        self._tokenizer, self._actor_tokenizer = tokenizer, actor_tokenizer
        self._typed = TypedTokens(tokenizer)

    def read(self, sample: Sample) -> Reading:
        """Tokenize the sample for the reward model. A sequence classifier scores the last token, and a token classifier
        scores the response tokens. Raise Unreadable if the sample cannot be rendered or is too long."""
        marked = self._text(sample)
        text = self._typed.text(marked)
        ids, spans = self._typed.ids_and_spans(marked, add_special_tokens=self._settings.input_format == "text")
        if not ids:
            raise Unreadable("the prompt and the response have no text to score")
        if len(ids) > self._longest:
            raise Unreadable(
                f"the input has {len(ids)} tokens, but the limit is {self._longest}. Fix: raise "
                "reward_model.context_length"
            )
        if self._kind == "sequence":
            return reading_of(sample, ids, len(ids) - 1, (len(sample.text),))
        start, stop, skipped = self._response(sample, text)
        counted = [i for i, (first, last) in enumerate(spans) if start < last and first < stop and first < last]
        if not counted:  # the response has no text: use the score at its position
            return reading_of(sample, ids, len(ids) - 1, (len(sample.text),))
        ends = tuple(skipped + min(last, stop) - start for _, last in spans[counted[0] : counted[-1] + 1])
        return reading_of(sample, ids[: counted[-1] + 1], counted[0], ends)

    def sampled(self, sample: Sample, ends: Sequence[int]) -> list[int]:
        """Return the indices of the sampled tokens that end at these offsets in the response text. The last offset maps
        to the last token. Raise Unreadable if an offset lies within a sampled token."""
        return [self._sampled(sample, end) for end in ends[:-1]] + [len(sample.response_ids) - 1]

    def _sampled(self, sample: Sample, end: int) -> int:
        def length(count: int) -> int:
            return len(self._decoded(sample, count))

        counts = range(len(sample.response_ids) + 1)
        # If a character consists of several tokens, several counts match, and the last one completes the character.
        for count in counts[bisect_left(counts, end, key=length) : bisect_right(counts, end, key=length)]:
            if self._decoded(sample, count) == sample.text[:end]:
                return count - 1
        raise Unreadable(
            f"a step ends after {end} characters of the response, inside a sampled token. Fix: set "
            "reward_model.aggregation, for example to mean"
        )

    def _decoded(self, sample: Sample, count: int) -> str:
        """Return the text of the first `count` response tokens, decoded after the end of the prompt, because some
        tokenizers drop the space before the first token of a text."""
        context = sample.prompt.token_ids[-CONTEXT:].tolist()
        before = text_of(self._actor_tokenizer, context)
        return text_of(self._actor_tokenizer, [*context, *sample.response_ids[:count].tolist()])[len(before) :]

    def _text(self, sample: Sample) -> str:
        """Return the text to score, with the special tokens in the response marked."""
        if self._settings.input_format == "chat":
            return self._rendered(sample, self._typed.mark(sample.text))
        return text_of(self._actor_tokenizer, sample.prompt.token_ids.tolist()) + self._typed.mark(sample.text)

    def _rendered(self, sample: Sample, response: str) -> str:
        messages = [*sample.prompt.messages, {"role": "assistant", "content": response}]
        return render(self._tokenizer, messages, "messages")

    def _response(self, sample: Sample, text: str) -> tuple[int, int, int]:
        """Return the start and end of the response in the text, and the number of characters missing before it."""
        if self._settings.input_format == "text":
            return len(text) - len(sample.text), len(text), 0
        span = response_span(text, self._rendered(sample, MARK), sample.text)
        if span is None:
            raise Unreadable(
                "the chat template rewrites the response, so its tokens cannot be located. Fix: set "
                "reward_model.input_format=text"
            )
        return span


def text_of(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    """Return the text of these tokens without special tokens."""
    return str(tokenizer.decode(ids, skip_special_tokens=True))


def render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Any], content: str, opens_turn: bool = False) -> str:
    """Render messages with the chat template. Raise Unreadable if the template rejects them.

    Args:
        content: description of the messages, for the error.
        opens_turn: whether to append the header of the assistant's turn.
    """
    try:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=opens_turn))
    except Exception as error:  # a template is a program and may raise any exception
        raise Unreadable(f"the chat template rejects the {content}: {error}") from error


def reading_of(sample: Sample, ids: Sequence[int], first: int, ends: tuple[int, ...]) -> Reading:
    """Return a reading with these token ids. Only scores of tokens from index `first` on are used."""
    # Each sample gets its own prompt, because the prompt extends to the first token whose score counts.
    tokens = np.array(ids, np.int32)
    prompt, response = Prompt(sample.id, "", tokens[:first]), tokens[first:]
    n = len(response)
    assert len(ends) == n, f"sample {sample.id}: {n} tokens, but {len(ends)} token ends"
    rendered = Sample(
        id=sample.id,
        prompt=prompt,
        response_ids=response,
        response_logprobs=np.zeros(n, np.float32),
        response_mask=np.ones(n, np.bool_),
        versions=(VersionRun(0, n),),
        finish_reason=sample.finish_reason,
        text=sample.text,
    )
    return Reading(rendered, ends)
