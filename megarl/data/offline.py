"""Offline data: conversations, preference pairs and labeled steps, read and tokenized once."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from megarl.algorithms.specs import LabelObjective
from megarl.config.schema import Config
from megarl.core.completion import VersionRun
from megarl.core.errors import UserError
from megarl.core.prompt import Prompt
from megarl.core.prompt_images import PromptImage
from megarl.core.sample import Sample
from megarl.data.arithmetic import DEFAULT_SIZE, arithmetic_labels, arithmetic_messages, arithmetic_preferences
from megarl.data.chat import MARK, conversation, prompt_ids, render_text, response_span, with_response
from megarl.data.files import label_rows, message_rows, preference_rows
from megarl.data.image_files import ImageFiles, RowImages
from megarl.data.image_rows import ImageRows
from megarl.data.prompts import require_chat_template, require_size, too_long
from megarl.data.row import Content, LabelRow, MessageRow, PreferenceRow, as_messages
from megarl.data.sources import place_of, row_name, rows_of_files
from megarl.data.typed_tokens import typed_tokens
from megarl.models.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tokens = tuple[list[int], list[bool]]
"""Token ids of the prompt and response, and a mask for the trained tokens."""

Labels = NDArray[np.float32]
"""Label of each response token, NaN for tokens without a label."""

Tokenized = tuple[int, Tokens, Labels | None]
"""Number of prompt tokens, the tokens of the prompt and response, and the response's labels, if any."""


@dataclass(frozen=True, slots=True)
class OfflineData:
    """The tokenized rows of an offline data source.

    Attributes:
        rows: the samples of each row: one for a conversation or labeled steps, two for a preference pair, the chosen
            response first.
        data_hash: SHA-256 over the token ids of all rows, in order, with their loss masks, labels and images.
        images: the encoded images of the rows; None without data.image_column.
    """

    rows: tuple[tuple[Sample, ...], ...]
    data_hash: str
    num_dropped: int
    images: ImageFiles | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Sample, ...]:
        return self.rows[index]

    @property
    def row_images(self) -> RowImages:
        """The images of each row."""
        # The samples of a row share its images.
        return RowImages(self.images, [row[0].images for row in self.rows])


def load_offline_data(config: Config, model_folder: Path) -> OfflineData:
    """Read and tokenize every row. Raise a UserError if a row cannot be read or tokenized, or has more than
    rollout.context_length tokens (unless data.overlong=drop), or the source has too few rows. The message names the
    source and the row."""
    tokenizer = load_tokenizer(model_folder, date=config.data.date)
    require_chat_template(config, tokenizer, model_folder)
    image_rows = ImageRows.of(config, model_folder)
    samples_by_row = list(_samples(config, tokenizer, image_rows))
    rows = tuple(row for row in samples_by_row if row is not None)
    require_size(len(samples_by_row), len(rows), config.data)
    files = None if image_rows is None else image_rows.files
    return OfflineData(rows, _hash(rows), len(samples_by_row) - len(rows), files)


def _samples(
    config: Config, tokenizer: PreTrainedTokenizerBase, image_rows: ImageRows | None
) -> Iterator[tuple[Sample, ...] | None]:
    """Yield the samples of each row; None for a row that is dropped."""
    rows: Iterator[Any] = islice(_rows(config), config.data.size)
    for row in rows if image_rows is None else image_rows.load(rows):
        place, name = place_of(row, config.data), row_name(row, config.data)
        samples = []
        for number, tokenized in enumerate(_TOKENIZERS[type(row)](row, tokenizer, config, place)):
            num_prompt_tokens, (ids, mask), labels = tokenized
            images: tuple[PromptImage, ...] = ()
            if image_rows is not None:
                ids, mask, images = image_rows.expand_masked(ids, mask, row.images, place)
                for image in images:
                    num_prompt_tokens += (image.num_tokens - 1) * (image.start < num_prompt_tokens)
            samples.append(_sample(name, number, num_prompt_tokens, (ids, mask), labels, images))
        longest = max(samples, key=lambda sample: sample.num_tokens)
        num_image_tokens = sum(image.num_tokens for image in longest.images)
        is_dropped = too_long(longest.num_tokens, "the row", config, place, num_image_tokens)
        yield None if is_dropped else tuple(samples)


def _rows(config: Config) -> Iterator[MessageRow] | Iterator[PreferenceRow] | Iterator[LabelRow]:
    data = config.data
    if data.source == "arithmetic":
        readers = {"messages": arithmetic_messages, "labels": arithmetic_labels, "preferences": arithmetic_preferences}
        return readers[data.format](config.run.seed, data.size or DEFAULT_SIZE)
    if data.format == "messages":
        return rows_of_files(data, lambda path: message_rows(path, data.messages_column, data.image_column))
    if data.format == "labels":
        columns = (data.prompt_column, data.steps_column, data.labels_column)
        return rows_of_files(data, lambda path: label_rows(path, *columns))
    columns = (data.prompt_column, data.chosen_column, data.rejected_column)
    return rows_of_files(data, lambda path: preference_rows(path, *columns, data.image_column))


def _conversation(row: MessageRow, tokenizer: PreTrainedTokenizerBase, config: Config, place: str) -> list[Tokenized]:
    """Return the tokens of a conversation. Its prompt is everything before the first trained token."""
    ids, mask = conversation(tokenizer, row.messages, place)
    if mask[0]:
        raise UserError(
            f"{place}: the conversation starts with the assistant, so its first token has no context. Fix: "
            "add a prompt, or drop the row"
        )
    return [(mask.index(True), (ids, mask), None)]


def _pair(row: PreferenceRow, tokenizer: PreTrainedTokenizerBase, config: Config, place: str) -> list[Tokenized]:
    """Tokenize a preference pair: the prompt with each response, with the loss mask and the prompt's length."""
    prompt = prompt_ids(tokenizer, row.prompt, config.data.chat_template, place)
    pair = []
    for name, response in (("chosen", row.chosen), ("rejected", row.rejected)):
        chat_template = config.data.chat_template
        ids, mask = with_response(tokenizer, row.prompt, response, prompt, chat_template, f"{place}: {name}")
        if config.trains_reward_model:  # the reward model scores the last token of a sample
            mask = [False] * (len(ids) - 1) + [True]
        pair.append((len(prompt), (ids, mask), None))
    return pair


def _steps(row: LabelRow, tokenizer: PreTrainedTokenizerBase, config: Config, place: str) -> list[Tokenized]:
    """Return the tokens of a labeled response. Tokens without a label are not trained on."""
    chat_template = config.data.chat_template
    prompt = prompt_ids(tokenizer, row.prompt, chat_template, place)
    if token_ids := [step for step in row.steps if isinstance(step, int)]:
        outside = next((token for token in token_ids if not 0 <= token < len(tokenizer)), None)
        if outside is not None:
            raise UserError(
                f"{place}: token id {outside} is outside the tokenizer's vocabulary of {len(tokenizer)}. Fix: use the "
                "tokenizer that wrote the ids, or drop the row"
            )
        ids, ends = prompt + token_ids, list(range(len(token_ids)))
    else:
        steps = _joined([step for step in row.steps if isinstance(step, str)], config.data.step_end, place)
        ids, _ = with_response(tokenizer, row.prompt, "".join(steps), prompt, chat_template, place)
        last = len(ids) - len(prompt) - 1
        ends = [*_text_ends(tokenizer, row.prompt, steps, chat_template, len(prompt), place), last]
    objective = config.algorithm.objective.spec
    assert isinstance(objective, LabelObjective), f"{objective.name} does not use labels"
    labels = _token_labels(ends, row.labels, objective.labeled, place)
    mask = [False] * len(prompt) + (~np.isnan(labels)).tolist()
    return [(len(prompt), (ids, mask), labels)]


_TOKENIZERS = {MessageRow: _conversation, PreferenceRow: _pair, LabelRow: _steps}
"""The function that tokenizes each type of row."""


def _sample(
    prompt_id: str,
    number: int,
    num_prompt_tokens: int,
    tokens: Tokens,
    labels: Labels | None,
    images: tuple[PromptImage, ...],
) -> Sample:
    """Return a sample. Its text fields are empty, since they are not used."""
    ids, mask = tokens
    response = ids[num_prompt_tokens:]
    num_prompt_images = sum(image.start < num_prompt_tokens for image in images)
    prompt_ids = np.array(ids[:num_prompt_tokens], np.int32)
    return Sample(
        id=f"{prompt_id}.{number}",
        prompt=Prompt(prompt_id, "", prompt_ids, images=images[:num_prompt_images]),
        response_ids=np.array(response, np.int32),
        response_logprobs=np.zeros(len(response), np.float32),
        response_mask=np.array(mask[num_prompt_tokens:], np.bool_),
        versions=(VersionRun(0, len(response)),),
        finish_reason="stop",
        text="",
        labels=labels,
        response_images=images[num_prompt_images:],
    )


def _joined(steps: Sequence[str], step_end: str, place: str) -> list[str]:
    """Return the text of each step, with `step_end` appended to all but the last. Raise a UserError if a step contains
    `step_end`: a model trained on the row could not recognize where the step ends."""
    ambiguous = next((number for number, step in enumerate(steps, start=1) if step_end and step_end in step), None)
    if ambiguous is not None:
        raise UserError(
            f"{place}: step {ambiguous} contains data.step_end={step_end!r}. Fix: if steps include their endings, set "
            "data.step_end=''; otherwise split the step"
        )
    return [step + step_end for step in steps[:-1]] + [steps[-1]]


def _text_ends(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Content,
    steps: Sequence[str],
    chat_template: bool,
    num_prompt_tokens: int,
    place: str,
) -> list[int]:
    """Return, for each step but the last, the index of the response token in which the step ends. Raise a UserError if
    the chat template alters the text of the response."""
    rendered = response = "".join(steps)
    begin = first = 0
    typed = typed_tokens(tokenizer)
    if chat_template:
        prompt_messages = as_messages(prompt, "user")
        rendered, other = (
            render_text(tokenizer, [*prompt_messages, *as_messages(content, "assistant")], place)
            for content in (response, MARK)
        )
        span = response_span(typed.text(rendered), typed.text(other), response)
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
    _, spans = typed.ids_and_spans(rendered, add_special_tokens=False)
    # A character that spans several tokens ends with the last of them.
    ends = list(accumulate((last for _, last in spans), max))
    stops = [begin + stop for stop in accumulate(map(len, steps[:-1]))]
    reached = (ends[min(bisect_left(ends, stop), len(ends) - 1)] for stop in stops)
    return [bisect_right(ends, end) - 1 - first for end in reached]


def _token_labels(
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


def _hash(rows: Sequence[Sequence[Sample]]) -> str:
    digest = hashlib.sha256()
    for row in rows:
        tokens = [
            [values.tolist() for values in (sample.prompt.token_ids, sample.response_ids, sample.response_mask)]
            for sample in row
        ]
        tokens += [sample.labels.tolist() for sample in row if sample.labels is not None]
        tokens += [[image.digest for image in sample.images] for sample in row if sample.images]
        digest.update(json.dumps(tokens).encode() + b"\n")
    return digest.hexdigest()
