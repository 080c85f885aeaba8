"""Responses that are given, not sampled: conversations, preferences and labelled steps, read and tokenised once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megarl.config.schema import Config
from megarl.core.errors import UserError
from megarl.core.types import Prompt, Sample, VersionRun
from megarl.data.arithmetic import DEFAULT_SIZE, arithmetic_labels, arithmetic_messages, arithmetic_preferences
from megarl.data.chat import as_messages, conversation, plain, prompt_ids
from megarl.data.files import label_rows, message_rows, preference_rows
from megarl.data.labels import joined, text_ends, token_labels
from megarl.data.prompts import place_of, require_chat_template, require_size, row_name, rows_of_files, too_long
from megarl.data.row import LabelRow, Message, MessageRow, PreferenceRow
from megarl.models.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tokens = tuple[list[int], list[bool]]
"""The ids of prompt and response, and for each whether it is trained on."""

Labels = NDArray[np.float32]
"""The label of each token of a response, NaN for one without."""

Tokenised = tuple[int, Tokens, Labels | None]
"""The length of a prompt, the tokens of it and its response, and the labels of the latter, if it has some."""


@dataclass(frozen=True, slots=True)
class OfflineData:
    """The tokenised rows of an offline data source.

    rows          the samples of each row: one of a conversation or of labelled steps; of a preference two, the chosen
                  one first
    data_hash     SHA-256 over the token ids of all rows, in order, and which of them are trained on, or their labels
    num_dropped   rows that were too long
    """

    rows: tuple[tuple[Sample, ...], ...]
    data_hash: str
    num_dropped: int

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Sample, ...]:
        return self.rows[index]


def load_offline_data(config: Config, model_folder: Path) -> OfflineData:
    """Reads and tokenises every row.

    Raises UserError, with source and row, for one that cannot be read or tokenised or, unless data.overlong=drop,
    has more than rollout.context_length tokens; and for a source with too few rows.
    """
    tokenizer = load_tokenizer(model_folder)
    require_chat_template(config, tokenizer, model_folder)
    read = list(_samples(config, tokenizer))
    rows = tuple(row for row in read if row is not None)
    require_size(len(read), len(rows), config.data)
    return OfflineData(rows, _hash(rows), len(read) - len(rows))


def _samples(config: Config, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[Sample, ...] | None]:
    """Yields the samples of each row, None for one that is dropped."""
    for row in islice(_rows(config), config.data.size):
        place = place_of(row, config.data)
        tokenise = _TOKENISERS[type(row)]
        read = tokenise(row, tokenizer, config, place)
        longest = max(len(ids) for _, (ids, _), _ in read)
        if too_long(longest, "the row", config, place):
            yield None
            continue
        yield tuple(_sample(row_name(row, config.data), number, *tokenised) for number, tokenised in enumerate(read))


def _rows(config: Config) -> Iterator[MessageRow] | Iterator[PreferenceRow] | Iterator[LabelRow]:
    data = config.data
    seed, size = config.run.seed, data.size or DEFAULT_SIZE
    procedural = data.source == "arithmetic"
    if data.format == "messages":
        if procedural:
            return arithmetic_messages(seed, size)
        return rows_of_files(data, lambda path: message_rows(path, data.messages_column))
    if data.format == "labels":
        if procedural:
            return arithmetic_labels(seed, size)
        columns = (data.prompt_column, data.steps_column, data.labels_column)
        return rows_of_files(data, lambda path: label_rows(path, *columns))
    if procedural:
        return arithmetic_preferences(seed, size)
    columns = (data.prompt_column, data.chosen_column, data.rejected_column)
    return rows_of_files(data, lambda path: preference_rows(path, *columns))


def _conversation(row: MessageRow, tokenizer: PreTrainedTokenizerBase, config: Config, place: str) -> list[Tokenised]:
    """Returns the conversation, whose prompt is what comes before the first token that is trained on."""
    ids, said = conversation(tokenizer, row.messages, place)
    if said[0]:
        raise UserError(f"{place}: no token comes before the assistant's first; give it a prompt, or drop the row")
    return [(said.index(True), (ids, said), None)]


def _pair(row: PreferenceRow, tokenizer: PreTrainedTokenizerBase, config: Config, place: str) -> list[Tokenised]:
    """Returns both responses, which have their prompt in common."""
    prompt = prompt_ids(tokenizer, row.prompt, config.data.chat_template, place)
    pair = []
    for name, response in (("chosen", row.chosen), ("rejected", row.rejected)):
        ids, said = _answered(row.prompt, response, prompt, tokenizer, config, f"{place}: {name}")
        if config.trains_reward_model:  # which scores the last token of a sample
            said = [False] * (len(ids) - 1) + [True]
        pair.append((len(prompt), (ids, said), None))
    return pair


def _steps(row: LabelRow, tokenizer: PreTrainedTokenizerBase, config: Config, place: str) -> list[Tokenised]:
    """Returns the response, of which the tokens are trained on that have a label."""
    chat_template = config.data.chat_template
    prompt = prompt_ids(tokenizer, row.prompt, chat_template, place)
    if isinstance(row.steps[0], int):
        outside = next((token for token in row.steps if not 0 <= token < len(tokenizer)), None)
        if outside is not None:
            raise UserError(f"{place}: the model's tokenizer has no token {outside}; it has {len(tokenizer)}")
        ids, ends = prompt + row.steps, list(range(len(row.steps)))
    else:
        steps = joined(row.steps, config.data.step_end, place)
        ids, _ = _answered(row.prompt, "".join(steps), prompt, tokenizer, config, place)
        last = len(ids) - len(prompt) - 1
        ends = [*text_ends(tokenizer, row.prompt, steps, chat_template, len(prompt), place), last]
    labels = token_labels(ends, row.labels, config.algorithm.objective.spec.labelled, place)
    said = [False] * len(prompt) + (~np.isnan(labels)).tolist()
    return [(len(prompt), (ids, said), labels)]


_TOKENISERS = {MessageRow: _conversation, PreferenceRow: _pair, LabelRow: _steps}
"""The functions that tokenise a row, by its kind."""


def _answered(
    prompt: str | list[Message],
    response: str | list[Message],
    prompt_ids: list[int],
    tokenizer: PreTrainedTokenizerBase,
    config: Config,
    place: str,
) -> Tokens:
    """Returns the tokens of the prompt and one response. A plain response ends with the end of the sequence, as a
    sampled one does."""
    if config.data.chat_template:
        asked, answer = as_messages(prompt, "user"), as_messages(response, "assistant")
        if answer[0]["role"] != "assistant":
            raise UserError(f"{place}: begins with the role {answer[0]['role']!r}; a response is the assistant's")
        return conversation(tokenizer, [*asked, *answer], place, first=len(asked))
    ids = tokenizer(plain(response, place), add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    return prompt_ids + ids, [False] * len(prompt_ids) + [True] * len(ids)


def _sample(prompt_id: str, number: int, num_prompt_tokens: int, tokens: Tokens, labels: Labels | None) -> Sample:
    """Returns a sample without its texts, which nobody reads."""
    ids, said = tokens
    response = ids[num_prompt_tokens:]
    return Sample(
        id=f"{prompt_id}.{number}",
        prompt=Prompt(prompt_id, "", ids[:num_prompt_tokens]),
        response_ids=response,
        response_logprobs=np.zeros(len(response), np.float32),
        response_mask=said[num_prompt_tokens:],
        versions=(VersionRun(0, len(response)),),
        finish_reason="stop",
        text="",
        labels=labels,
    )


def _hash(rows: Sequence[Sequence[Sample]]) -> str:
    digest = hashlib.sha256()
    for row in rows:
        tokens = [
            [values.tolist() for values in (sample.prompt.token_ids, sample.response_ids, sample.response_mask)]
            for sample in row
        ]
        tokens += [sample.labels.tolist() for sample in row if sample.labels is not None]
        digest.update(json.dumps(tokens).encode() + b"\n")
    return digest.hexdigest()
