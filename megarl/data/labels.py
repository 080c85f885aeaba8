"""Labelled responses as token ids: the label of each token, by that of the step that it is part of."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from megarl.core.errors import UserError
from megarl.data.chat import MARK, as_messages, response_span
from megarl.data.row import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def joined(steps: Sequence[str], step_end: str, place: str) -> list[str]:
    """Returns the texts of the steps, each but the last with what ends it. Raises UserError for a step that has this
    within itself: a model that is trained on the row could not tell where the step ends."""
    within = next((number for number, step in enumerate(steps, start=1) if step_end and step_end in step), None)
    if within is not None:
        raise UserError(
            f"{place}: step {within} has data.step_end={step_end!r} in itself; where steps bring their ends along, set "
            "data.step_end to an empty text, else split the step"
        )
    return [step + step_end for step in steps[:-1]] + [steps[-1]]


def text_ends(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | list[Message],
    steps: Sequence[str],
    chat_template: bool,
    num_prompt_tokens: int,
    place: str,
) -> list[int]:
    """Returns for each step the index of the response's token that it ends in, without the last step, which ends with
    the response. Raises UserError where the text of the response is not what the chat template writes."""
    text = response = "".join(steps)
    begin = first = 0
    if chat_template:
        asked = as_messages(prompt, "user")
        text, marked = (
            tokenizer.apply_chat_template([*asked, *as_messages(said, "assistant")], tokenize=False)
            for said in (response, MARK)
        )
        found = response_span(text, marked, response)
        if found is None:
            raise UserError(
                f"{place}: the chat template changes the response, so that its steps cannot be found; drop the row, or "
                "take out what it changes"
            )
        start, _, skipped = found
        begin, first = start - skipped, num_prompt_tokens
    if not tokenizer.is_fast:
        raise UserError(
            f"data.format=labels: the model's tokenizer, {type(tokenizer).__name__}, does not say which text a token is "
            "of; take a model with a tokenizer.json"
        )
    spans = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)["offset_mapping"]
    # Of several tokens of one character, the last ends it.
    ends = list(accumulate((last for _, last in spans), max))
    stops = [begin + stop for stop in accumulate(map(len, steps[:-1]))]
    reached = (ends[min(bisect_left(ends, stop), len(ends) - 1)] for stop in stops)
    return [bisect_right(ends, end) - 1 - first for end in reached]


def token_labels(
    ends: Sequence[int], labels: Sequence[float | None], labelled: Literal["end", "all"], place: str
) -> NDArray[np.float32]:
    """Returns the label of each token of a response, float32 [R], NaN for one without.

    ends       the index of the token that each step ends in; the last one is R − 1
    labels     of each step; None for one without
    labelled   the tokens that have their step's label: the one that ends it, or all

    Raises UserError for two steps that end in one token.
    """
    of_tokens = np.full(ends[-1] + 1, np.nan, np.float32)
    begin = 0
    for number, (end, label) in enumerate(zip(ends, labels, strict=True), start=1):
        if end < begin:
            raise UserError(f"{place}: steps {number - 1} and {number} end in the same token; make them one step")
        if label is not None:
            of_tokens[end if labelled == "end" else begin : end + 1] = label
        begin = end + 1
    return of_tokens
