"""Per-token labels for a response, derived from its step labels."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from megarl.core.errors import UserError
from megarl.data.chat import MARK, response_span
from megarl.data.row import Content, as_messages

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def joined(steps: Sequence[str], step_end: str, place: str) -> list[str]:
    """Return the text of each step, with `step_end` appended to all but the last. Raise a UserError if a step contains
    `step_end`: a model trained on the row could not recognize where the step ends."""
    ambiguous = next((number for number, step in enumerate(steps, start=1) if step_end and step_end in step), None)
    if ambiguous is not None:
        raise UserError(
            f"{place}: step {ambiguous} contains data.step_end={step_end!r}. Fix: if steps include their endings, set "
            "data.step_end=''; otherwise split the step"
        )
    return [step + step_end for step in steps[:-1]] + [steps[-1]]


def text_ends(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Content,
    steps: Sequence[str],
    chat_template: bool,
    num_prompt_tokens: int,
    place: str,
) -> list[int]:
    """Return, for each step but the last, the index of the response token in which the step ends. Raise a UserError if
    the chat template alters the text of the response."""
    text = response = "".join(steps)
    begin = first = 0
    if chat_template:
        prompt_messages = as_messages(prompt, "user")
        text, marked = (
            str(tokenizer.apply_chat_template([*prompt_messages, *as_messages(content, "assistant")], tokenize=False))
            for content in (response, MARK)
        )
        span = response_span(text, marked, response)
        if span is None:
            raise UserError(
                f"{place}: the chat template changes the response, so its steps cannot be located. Fix: drop the row, "
                "or remove the text that the template changes"
            )
        start, _, skipped = span
        begin, first = start - skipped, num_prompt_tokens
    if not tokenizer.is_fast:
        raise UserError(
            f"data.format=labels: the model's tokenizer, {type(tokenizer).__name__}, does not report character "
            "offsets. Fix: use a model with a tokenizer.json"
        )
    spans = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)["offset_mapping"]
    # If a character consists of several tokens, it ends in the last of them.
    ends = list(accumulate((last for _, last in spans), max))
    stops = [begin + stop for stop in accumulate(map(len, steps[:-1]))]
    reached = (ends[min(bisect_left(ends, stop), len(ends) - 1)] for stop in stops)
    return [bisect_right(ends, end) - 1 - first for end in reached]


def token_labels(
    ends: Sequence[int], labels: Sequence[float | None], labeled: Literal["end", "all"], place: str
) -> NDArray[np.float32]:
    """Return the label of each response token, float32 [R], NaN for tokens without a label. Raise a UserError if two
    steps end in the same token.

    Args:
        ends: index of the last token of each step; the last entry is R − 1.
        labels: label of each step; None for a step without a label.
        labeled: which tokens of a step receive its label: only the last token (`end`) or all tokens.
    """
    label_by_token = np.full(ends[-1] + 1, np.nan, np.float32)
    begin = 0
    for number, (end, label) in enumerate(zip(ends, labels, strict=True), start=1):
        if end < begin:
            raise UserError(f"{place}: steps {number - 1} and {number} end in the same token. Fix: merge them")
        if label is not None:
            label_by_token[end if labeled == "end" else begin : end + 1] = label
        begin = end + 1
    return label_by_token
