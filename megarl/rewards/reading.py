"""Renders samples for a reward model whose tokenizer differs from the actor's. The trained token ids stay unchanged."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from megarl.config.model_schema import RewardModel
from megarl.core.completion import VersionRun
from megarl.core.prompt import Prompt
from megarl.core.sample import Sample
from megarl.data.chat import MARK, response_span
from megarl.data.typed_tokens import TypedTokens
from megarl.models.classifier import Kind
from megarl.rewards.result import TRUNCATED, VERBATIM, Issues
from megarl.rewards.rollout_file import token_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONTEXT = 5
"""Number of prompt tokens decoded before a response."""

CUTS = 1024
"""Number of places at which a response may be truncated."""


class Unreadable(ValueError):
    """Raised if a reward model cannot read the responses to a prompt; the message is a short reason."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A sample tokenized for a reward model.

    Attributes:
        sample: the tokenized sample. Only the scores of its response tokens count.
        ends: for each of these response tokens, its end offset in the text of the sampled response.
        issues: problems that the response caused.
    """

    sample: Sample
    ends: tuple[int, ...]
    issues: Issues = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Rendered:
    """A sample as text.

    Attributes:
        marked: the text, with special tokens in the messages marked.
        span: start and end of the response in the text without marks, and how many of its first characters are missing.
            A sequence classifier does not need it.
        change: how the chat template changes the response, if it is inserted verbatim for this reason; otherwise None.
    """

    marked: str
    span: tuple[int, int, int]
    change: str | None = None


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
        scores the response tokens. If the input is too long, the response is truncated at its end. If the conversation
        before the response is too long, its start is dropped. Raise Unreadable if the conversation cannot be rendered
        with any response, or there is no text."""

        @lru_cache(maxsize=1)
        def encoded(response: str) -> tuple[_Rendered, list[int], list[tuple[int, int]]]:
            rendered = self._render(sample.prompt, response)
            return rendered, *self._ids_and_spans(rendered.marked)

        response = truncated(sample.text, lambda text: len(encoded(text)[1]) <= self._longest)
        rendered, ids, spans = encoded(sample.text if response is None else response)
        if not ids:
            raise Unreadable("the prompt and the response have no text to score")
        ids, spans = ids[-self._longest :], spans[-self._longest :]
        excess = None if response == sample.text else f"the input exceeds the limit of {self._longest} tokens"
        issues = {TRUNCATED: excess, **({VERBATIM: rendered.change} if self._settings.input_format == "chat" else {})}
        if self._kind == "sequence":
            return reading_of(sample, ids, len(ids) - 1, (len(sample.text),), issues)
        start, stop, skipped = rendered.span
        counted = [i for i, (first, last) in enumerate(spans) if start < last and first < stop and first < last]
        if not counted:  # the response has no text: use the score at its position
            return reading_of(sample, ids, len(ids) - 1, (len(sample.text),), issues)
        ends = tuple(skipped + min(last, stop) - start for _, last in spans[counted[0] : counted[-1] + 1])
        return reading_of(sample, ids[: counted[-1] + 1], counted[0], ends, issues)

    def check_prompt(self, prompt: Prompt) -> None:
        """Raise Unreadable if the model cannot read responses to this prompt."""
        try:
            num_tokens = len(self._ids_and_spans(self._render(prompt, "").marked)[0])
        except Unreadable as problem:
            raise Unreadable(f"{problem}. Fix: set reward_model.input_format=text, or drop the row") from None
        if not num_tokens:
            raise Unreadable("the prompt has no text. Fix: add text, or drop the row")
        if num_tokens >= self._longest:
            raise Unreadable(
                f"the prompt has {num_tokens} tokens in the reward model's tokenizer, so the limit of "
                f"{self._longest} leaves none for the response. Fix: raise reward_model.context_length, or drop the row"
            )

    def sampled(self, sample: Sample, ends: Sequence[int]) -> list[int]:
        """Map end offsets in the response text to the indices of the sampled tokens that contain them. The last offset
        maps to the last token."""
        # Start decoding in the prompt, because some tokenizers drop the space before the first token of a text.
        context, response_ids = sample.prompt.token_ids[-CONTEXT:].tolist(), sample.response_ids.tolist()
        texts = token_texts(lambda ids: text_of(self._actor_tokenizer, list(ids)), [*context, *response_ids])
        token_ends = list(accumulate(map(len, texts[len(context) :])))
        last = len(response_ids) - 1
        return [min(bisect_left(token_ends, end), last) for end in ends[:-1]] + [last]

    def _ids_and_spans(self, marked: str) -> tuple[list[int], list[tuple[int, int]]]:
        return self._typed.ids_and_spans(marked, add_special_tokens=self._settings.input_format == "text")

    def _render(self, prompt: Prompt, response: str) -> _Rendered:
        """Return the text to score. The chat template renders the response unless input_format=text, or the template
        rejects the response or changes it so that a token classifier's scores cannot be attributed to its text. In
        these cases, the response is inserted verbatim."""
        if self._settings.input_format == "text":
            marked = self._typed.mark(text_of(self._actor_tokenizer, prompt.token_ids.tolist()))
            return self._inserted(marked, response, "", None)
        try:
            marked = self._conversation(prompt, self._typed.mark(response))
        except Unreadable as rejection:
            return self._verbatim(prompt, response, str(rejection))
        if self._kind == "sequence":
            return _Rendered(marked, (0, 0, 0))
        text, other = self._typed.text(marked), self._typed.text(self._conversation(prompt, MARK))
        if MARK not in other:
            raise Unreadable("the chat template does not render the assistant's message")
        span = response_span(text, other, response)
        if span is None:
            return self._verbatim(prompt, response, "the chat template changes the response")
        return _Rendered(marked, span)

    def _verbatim(self, prompt: Prompt, response: str, change: str) -> _Rendered:
        """Return the conversation with the response inserted verbatim where the chat template places responses."""
        before, _, after = self._conversation(prompt, MARK).rpartition(MARK)
        messages = self._typed.mark(prompt.messages)
        closed, header = (render(self._tokenizer, messages, "messages", opens) for opens in (False, True))
        # Exclude the empty reasoning block that some templates insert: the response contains its own reasoning, if any.
        is_header = header != closed and before.startswith(header)
        return self._inserted(header if is_header else before, response, after, change)

    def _inserted(self, before: str, response: str, after: str, change: str | None) -> _Rendered:
        start = len(self._typed.text(before))
        return _Rendered(before + self._typed.mark(response) + after, (start, start + len(response), 0), change)

    def _conversation(self, prompt: Prompt, response: str) -> str:
        messages = [*self._typed.mark(prompt.messages), {"role": "assistant", "content": response}]
        return render(self._tokenizer, messages, "messages")


def truncated(text: str, fits: Callable[[str], bool]) -> str | None:
    """Return a prefix of the text that fits: the text, or the longest of CUTS prefixes. None if none of them fits."""
    if fits(text):
        return text
    ends = range(0, len(text), max(1, len(text) // CUTS))
    num_fitting = bisect_left(ends, True, key=lambda end: not fits(text[:end]))
    return text[: ends[num_fitting - 1]] if num_fitting else None


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


def reading_of(sample: Sample, ids: Sequence[int], first: int, ends: tuple[int, ...], issues: Issues) -> Reading:
    """Return a reading with these token ids. Only scores of tokens from index `first` on are used."""
    # Make a prompt per sample, because the prompt includes all tokens before the first one whose score counts.
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
    return Reading(rendered, ends, issues)
