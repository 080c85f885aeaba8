"""The prompts of a run: read from the data source that the config names, and tokenised once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.batch import Prompt
from megarl.config.schema import Config, Data
from megarl.data.arithmetic import arithmetic_rows
from megarl.data.files import file_rows
from megarl.data.row import Row
from megarl.data.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEFAULT_ARITHMETIC_SIZE = 4096


@dataclass(frozen=True, slots=True)
class PromptSet:
    """data_hash: SHA-256 over the token ids and answers of all prompts, in order."""

    prompts: tuple[Prompt, ...]
    data_hash: str

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: int) -> Prompt:
        return self.prompts[index]


def load_prompts(config: Config, model_folder: Path) -> PromptSet:
    """Reads and tokenises every prompt.

    Raises ValueError, with source and row, for a row that cannot be read or tokenised, for a prompt that leaves no
    room for `rollout.max_new_tokens`, and for a source with too few rows.
    """
    tokenizer = load_tokenizer(model_folder)
    if config.data.chat_template and tokenizer.chat_template is None:
        raise ValueError(
            f"data.chat_template is true, but the tokenizer of {model_folder} has no chat template; set it to false"
        )
    prompts = tuple(_prompt(row, tokenizer, config) for row in _rows(config))
    _require_size(len(prompts), config.data)
    return PromptSet(prompts, _hash(prompts))


def _rows(config: Config) -> Iterator[Row]:
    data = config.data
    if data.source == "arithmetic":
        return arithmetic_rows(config.run.seed, data.size or DEFAULT_ARITHMETIC_SIZE)
    rows = file_rows(Path(data.source).expanduser(), data.prompt_column, data.answer_column)
    return islice(rows, data.size)


def _require_size(num_rows: int, data: Data) -> None:
    if num_rows == 0:
        raise ValueError(f"data.source: {data.source} has no rows; give a file with at least one")
    if data.size is not None and num_rows < data.size:
        raise ValueError(
            f"data.size is {data.size}, but {data.source} has {num_rows} rows; lower it, or set it to null for all"
        )


def _prompt(row: Row, tokenizer: PreTrainedTokenizerBase, config: Config) -> Prompt:
    place = f"{config.data.source}:{row.number}"
    token_ids = _token_ids(row, tokenizer, config.data.chat_template, place)
    _require_room(len(token_ids), config, place)
    source = Path(config.data.source).name
    return Prompt(
        id=f"{source}:{row.number}",
        text=tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False),
        token_ids=tuple(token_ids),
        answer=row.answer,
        source=source,
        messages=tuple(_messages(row)),
    )


def _messages(row: Row) -> list[dict[str, str]]:
    """Plain text is one message of the user."""
    return [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else row.prompt


def _token_ids(row: Row, tokenizer: PreTrainedTokenizerBase, chat_template: bool, place: str) -> list[int]:
    if not chat_template:
        if not isinstance(row.prompt, str):
            raise ValueError(f"{place}: a list of messages needs data.chat_template: true, or give plain text")
        return tokenizer(row.prompt)["input_ids"]

    from jinja2.exceptions import TemplateError

    try:
        return tokenizer.apply_chat_template(_messages(row), add_generation_prompt=True, return_dict=False)
    except TemplateError as error:
        raise ValueError(f"{place}: the model's chat template refuses the messages: {error}") from error


def _require_room(length: int, config: Config, place: str) -> None:
    if length == 0:
        raise ValueError(f"{place}: the prompt has no tokens; give it text, or drop the row")
    new, context = config.rollout.max_new_tokens, config.rollout.context_length
    if length + new > context:
        raise ValueError(
            f"{place}: the prompt has {length} tokens, and {length} + rollout.max_new_tokens {new} = {length + new} "
            f"> rollout.context_length {context}; raise rollout.context_length to at least {length + new}, lower "
            "rollout.max_new_tokens, or drop the row"
        )


def _hash(prompts: Sequence[Prompt]) -> str:
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(json.dumps([prompt.token_ids, prompt.answer], sort_keys=True).encode() + b"\n")
    return digest.hexdigest()
