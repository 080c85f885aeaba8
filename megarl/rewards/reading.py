"""Writes samples in the tokens of a reward model that has another tokenizer. The ids that are trained on stay as they
are."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from megarl.config.model_schema import RewardModel
from megarl.core.types import Prompt, Sample, VersionRun
from megarl.data.chat import MARK, response_span
from megarl.models.classifier import Kind

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONTEXT = 5
"""The number of the prompt's tokens that a response is decoded with."""


class Unreadable(Exception):
    """The reason why a reward model cannot read a sample, in a few words."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A sample as a reward model reads it.

    sample   in the reward model's tokens; its response are those whose scores count
    ends     for each of these, how many characters of the sampled response it and those before it have
    """

    sample: Sample
    ends: tuple[int, ...]


class Reader:
    """Writes samples in a reward model's tokens, and finds the sampled tokens that its scores belong to."""

    def __init__(
        self,
        kind: Kind,
        settings: RewardModel,
        longest: int,
        tokenizer: PreTrainedTokenizerBase,
        actor_tokenizer: PreTrainedTokenizerBase,
    ):
        """Takes the reward model's settings.

        kind      the kind of classifier
        longest   the most tokens of its own that it may be given for a sample
        """
        self._kind, self._settings, self._longest = kind, settings, longest
        self._tokenizer, self._actor_tokenizer = tokenizer, actor_tokenizer

    def read(self, sample: Sample) -> Reading:
        """Returns the sample in the reward model's tokens. A sequence classifier's last token counts, and a token
        classifier's tokens of the response's text. Raises Unreadable."""
        text = self._text(sample)
        encoded = self._tokenizer(
            text, add_special_tokens=self._settings.input_format == "text", return_offsets_mapping=True, verbose=False
        )
        ids, spans = encoded["input_ids"], encoded["offset_mapping"]
        if not ids:
            raise Unreadable("has nothing to read: prompt and response have no text")
        if len(ids) > self._longest:
            raise Unreadable(
                f"would read {len(ids)} tokens, more than {self._longest}; raise reward_model.context_length"
            )
        if self._kind == "sequence":
            return reading_of(sample, ids, len(ids) - 1, (len(sample.text),))
        start, stop, skipped = self._response(sample, text)
        counted = [i for i, (first, last) in enumerate(spans) if start < last and first < stop and first < last]
        if not counted:  # a response without text: what the model says where it would be
            return reading_of(sample, ids, len(ids) - 1, (len(sample.text),))
        ends = tuple(skipped + min(last, stop) - start for _, last in spans[counted[0] : counted[-1] + 1])
        return reading_of(sample, ids[: counted[-1] + 1], counted[0], ends)

    def sampled(self, sample: Sample, ends: Sequence[int]) -> list[int]:
        """Returns the indexes of the sampled tokens that end where these of the response's characters do, the last one
        after all of them. Raises Unreadable if one ends inside of a sampled token."""
        return [self._sampled(sample, end) for end in ends[:-1]] + [len(sample.response_ids) - 1]

    def _sampled(self, sample: Sample, end: int) -> int:
        counts = range(len(sample.response_ids) + 1)
        lengths = dict(key=lambda count: len(self._decoded(sample, count)))
        # Several counts fit where a character has more than one token: it is whole with the last of them.
        for count in counts[bisect_left(counts, end, **lengths) : bisect_right(counts, end, **lengths)]:
            if self._decoded(sample, count) == sample.text[:end]:
                return count - 1
        raise Unreadable(
            f"scores a step that ends after {end} characters of the response, where no sampled token does; set "
            "reward_model.aggregation, such as mean"
        )

    def _decoded(self, sample: Sample, count: int) -> str:
        """Returns the text of the first `count` tokens of the response, as it follows on the prompt's: some tokenizers
        drop a space before the first token."""
        context = sample.prompt.token_ids[-CONTEXT:].tolist()
        before, whole = (
            self._actor_tokenizer.decode([*context, *ids], skip_special_tokens=True)
            for ids in ((), sample.response_ids[:count].tolist())
        )
        return whole[len(before) :]

    def _text(self, sample: Sample) -> str:
        if self._settings.input_format == "chat":
            return self._rendered(sample, sample.text)
        return self._prompt_text(sample) + sample.text

    def _prompt_text(self, sample: Sample) -> str:
        return self._actor_tokenizer.decode(sample.prompt.token_ids.tolist(), skip_special_tokens=True)

    def _rendered(self, sample: Sample, response: str) -> str:
        from jinja2.exceptions import TemplateError

        messages = [*sample.prompt.messages, {"role": "assistant", "content": response}]
        try:
            return self._tokenizer.apply_chat_template(messages, tokenize=False)
        except TemplateError as error:
            raise Unreadable(f"has a chat template that refuses the messages: {error}") from error

    def _response(self, sample: Sample, text: str) -> tuple[int, int, int]:
        """Returns where the response begins and ends in the text, and how many of its first characters the text
        lacks."""
        if self._settings.input_format == "text":
            return len(text) - len(sample.text), len(text), 0
        found = response_span(text, self._rendered(sample, MARK), sample.text)
        if found is None:
            raise Unreadable("has a chat template that rewrites the response, so that its tokens cannot be told")
        return found


def reading_of(sample: Sample, ids: Sequence[int], first: int, ends: tuple[int, ...]) -> Reading:
    """Returns the reading of these ids. first: the index of the first token that counts."""
    # No two samples have a prompt in common, which ends with the first token that counts.
    prompt, response = Prompt(sample.id, "", ids[:first]), ids[first:]
    n = len(response)
    assert len(ends) == n, f"sample {sample.id}: {n} tokens with {len(ends)} ends"
    read = Sample(
        id=sample.id,
        prompt=prompt,
        response_ids=response,
        response_logprobs=np.zeros(n, np.float32),
        response_mask=np.ones(n, np.bool_),
        versions=(VersionRun(0, n),),
        finish_reason=sample.finish_reason,
        text=sample.text,
    )
    return Reading(read, ends)
