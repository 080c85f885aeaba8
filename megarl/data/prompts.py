"""The prompts of a run, read from the configured data source and tokenized once."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megarl.config.data_schema import OWN_TASKS, Data
from megarl.config.model_schema import Teacher
from megarl.config.schema import Config
from megarl.core.arrays import HoldsArrays
from megarl.core.errors import UserError
from megarl.core.prompt import Prompt
from megarl.data import reasoning
from megarl.data.arithmetic import DEFAULT_SIZE, arithmetic_rows
from megarl.data.chat import add_system_prompt, prompt_ids, with_response
from megarl.data.files import ALL_COLUMNS, NO_COLUMNS, content_of, file_rows
from megarl.data.image_files import ImageFiles, RowImages
from megarl.data.image_rows import ImageRows
from megarl.data.row import Content, Row, as_messages
from megarl.data.sources import place_of, row_name, rows_of_files
from megarl.models.tokenizer import decode, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


MAX_WEIGHT = 1e100
"""Maximum weight of a row; its reciprocal is the minimum positive weight. With weights outside this range, sums could
overflow, and products could underflow to 0 for all rows."""


@dataclass(frozen=True, slots=True, eq=False)
class GivenResponse(HoldsArrays):
    """A prompt's response from the data.

    Attributes:
        token_ids: int32 [R], with the end-of-sequence token.
        mask: bool [R], True for the assistant's tokens.
        text: the decoded response without special tokens.
    """

    token_ids: NDArray[np.int32]
    mask: NDArray[np.bool_]
    text: str

    def __post_init__(self) -> None:
        self._freeze("token_ids", np.int32)
        self._freeze("mask", np.bool_)


@dataclass(frozen=True, slots=True)
class PromptSet:
    """The tokenized prompts of a data source.

    Attributes:
        data_hash: SHA-256 over the token ids, images, answers, additional columns, privileged prompts and given
            responses of all prompts, in order.
        weights: sampling weight of each prompt; None for uniform sampling.
        privileged: prompts for teachers: column -> prompt id -> token ids, int32 [P]. Prompt ids without such a prompt
            are absent.
        responses: given responses by prompt id; empty without data.response_column.
        images: the encoded images of the prompts; None without data.image_column.
    """

    prompts: tuple[Prompt, ...]
    data_hash: str
    num_dropped: int = 0
    weights: tuple[float, ...] | None = None
    privileged: Mapping[str, Mapping[str, NDArray[np.int32]]] = field(default_factory=dict)
    responses: Mapping[str, GivenResponse] = field(default_factory=dict)
    images: ImageFiles | None = None

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: int) -> Prompt:
        return self.prompts[index]

    @property
    def row_images(self) -> RowImages:
        """The images of each prompt."""
        return RowImages(self.images, [prompt.images for prompt in self.prompts])


def load_prompts(config: Config, model_folder: Path, columns: Mapping[str, str | None] = NO_COLUMNS) -> PromptSet:
    """Read and tokenize every prompt. Raise a UserError if a row cannot be read or tokenized, a prompt leaves no room
    for `rollout.max_new_tokens` (unless data.overlong=drop), a response is missing or too long, the source has too few
    rows, or a teacher's column has no prompts. The message names the source and the row. columns: columns required by
    reward functions, as in `file_rows`."""
    data = config.data
    teachers, images = _teachers_by_column(config), None
    columns = {**dict.fromkeys(teachers), **columns, **data.ordering_columns, **data.given_columns}
    if config.samples_images:
        candidates = [_Read(row.source, _caption(row, data)) for row in _judged_rows(config, columns)]
    else:
        tokenizer = load_tokenizer(model_folder, date=data.date)
        require_chat_template(config, tokenizer, model_folder)
        images = ImageRows.of(config, model_folder)
        rows = _judged_rows(config, columns)
        rows = rows if images is None else images.load(rows)
        candidates = [_read(row, tokenizer, config, teachers, images) for row in rows]
    kept = [read for read in candidates if read is not None]
    require_size(len(candidates), len(kept), data)
    privileged = {
        column: {read.prompt.id: read.privileged[column] for read in kept if column in read.privileged}
        for column in teachers
    }
    _require_privileged(teachers, privileged)
    if (sort_column := data.sort_column) is not None:
        kept.sort(key=lambda read: read.prompt.columns[sort_column])
    prompts = tuple(read.prompt for read in kept)
    weights = prompt_weights(data, prompts, [read.source for read in kept])
    responses = {read.prompt.id: read.response for read in kept if read.response is not None}
    data_hash = _hash(prompts, privileged, responses)
    files = None if images is None else images.files
    return PromptSet(prompts, data_hash, len(candidates) - len(prompts), weights, privileged, responses, files)


def require_chat_template(config: Config, tokenizer: PreTrainedTokenizerBase, model_folder: Path) -> None:
    if config.data.chat_template and tokenizer.chat_template is None:
        raise UserError(
            f"data.chat_template=true: the tokenizer of {model_folder} has no chat template. Fix: set "
            "data.chat_template=false"
        )


def _judged_rows(config: Config, columns: Mapping[str, str | None]) -> Iterator[Row]:
    """Yield the rows. Raise a UserError if a row has no reward function or, without rewards, no teacher with a prompt,
    or if its sort value or weight is invalid."""
    rewards, column = config.rewards, config.data.source_column
    functions = [] if rewards.judge is not None or config.has_reward_model else rewards.functions
    teachers = config.teachers.models if config.has_teachers and not config.has_rewards else []
    for row in _rows(config, columns):
        source = None if column is None else row.columns[column]
        if teachers and not any(teacher.applies_to(source) for teacher in teachers):
            raise UserError(
                f"{place_of(row, config.data)}: no teacher in teachers.models lists {source!r} (the row's {column!r}) "
                f"in its sources, and no reward applies. Fix: add {source!r} to the sources of a teacher, or add a "
                "teacher without sources"
            )
        applied = [teacher for teacher in teachers if teacher.applies_to(source)]
        if applied and not any(_sees(teacher, row, config.data) for teacher in applied):
            raise UserError(
                f"{place_of(row, config.data)}: no prompt in the column {applied[0].prompt_column!r} (prompt_column of "
                f"the teacher {applied[0].name}), and no reward applies. Fix: set prompt_column "
                "to a column with prompts, fill the column, "
                "or drop the row"
            )
        if functions and not any(entry.applies_to(source) for entry in functions):
            raise UserError(
                f"{place_of(row, config.data)}: no function in rewards.functions lists {source!r} (the row's "
                f"{column!r}) in its sources. Fix: add {source!r} to the sources of a function, or add a function "
                "without sources"
            )
        _require_numbers(row, config.data)
        yield row


def _sees(teacher: Teacher, row: Row, data: Data) -> bool:
    """Return whether the row has a prompt for the teacher."""
    column = teacher.prompt_column
    return column is None or content_of(row.columns.get(column), column, place_of(row, data)) is not None


def _teachers_by_column(config: Config) -> dict[str, list[Teacher]]:
    """Return the columns with prompts for teachers, and the teachers that see them."""
    columns: dict[str, list[Teacher]] = {}
    for teacher in config.teachers.models if config.has_teachers else ():
        if teacher.prompt_column is not None:
            columns.setdefault(teacher.prompt_column, []).append(teacher)
    return columns


def _require_privileged(
    teachers_by_column: Mapping[str, Sequence[Teacher]], privileged: Mapping[str, Mapping[str, NDArray[np.int32]]]
) -> None:
    """Raise a UserError if a column of prompts for teachers is empty in all remaining rows of the teachers' sources."""
    for column, teachers in teachers_by_column.items():
        if not privileged[column]:
            raise UserError(
                f"teachers.models: {teachers[0].name} with prompt_column={column}: no remaining row of the teacher's "
                "sources has a prompt in this column. Fix: change prompt_column or sources, fill the column, or raise "
                "rollout.context_length"
            )


def _require_numbers(row: Row, data: Data) -> None:
    """Raise a UserError for a row whose sort value is not a number, or whose weight is neither 0 nor a number from
    1 / MAX_WEIGHT to MAX_WEIGHT."""
    for column, key in data.ordering_columns.items():
        value = row.columns[column]
        is_number = isinstance(value, int | float) and abs(value) <= sys.float_info.max
        if not is_number or (key == "data.weight_column" and value and not 1 / MAX_WEIGHT <= value <= MAX_WEIGHT):
            expected = "a number" if key == "data.sort_column" else f"0 or a number from 1e-100 to {MAX_WEIGHT:g}"
            raise UserError(
                f"{place_of(row, data)}: column {column!r} ({key}): expected {expected}, found {value!r}. Fix: write "
                f"{expected}, or drop the row"
            )


def _rows(config: Config, columns: Mapping[str, str | None]) -> Iterator[Row]:
    data, seed = config.data, config.run.seed
    if data.source == OWN_TASKS:
        return (Row(number, [], None, {}) for number in range(1, (data.size or DEFAULT_SIZE) + 1))
    if not data.is_procedural:

        def read(path: Path) -> Iterator[Row]:
            names = data.prompt_column, data.answer_column
            return file_rows(path, *names, columns, data.source_column, data.image_column)

        return islice(rows_of_files(data, read), data.size)
    available = () if data.reasoning_task is None else reasoning.COLUMNS
    needed = [(name, function) for name, function in columns.items() if function is not None and name != ALL_COLUMNS]
    needed += [] if data.source_column is None else [(data.source_column, "data.source_column")]
    for name, function in needed:
        if name not in available:
            remedy = f"use one of the columns {', '.join(available)}" if available else "use a file with this column"
            raise UserError(
                f"data.source={data.source}: missing column {name!r}, which {function} requires. Fix: {remedy}"
            )
    if data.reasoning_task is None:
        return arithmetic_rows(seed, data.size or DEFAULT_SIZE)
    included = {*columns, *([] if data.source_column is None else [data.source_column])}
    return reasoning.reasoning_rows(_stages(data, data.reasoning_task), seed, included)


def _stages(data: Data, task: str) -> list[tuple[reasoning.Task, int]]:
    """Return the task of each stage, with its options, and the stage's number of rows."""
    stages = data.stages or [{"size": data.size or DEFAULT_SIZE}]
    options = [{name: value for name, value in stage.items() if name != "size"} for stage in stages]
    tasks = [reasoning.Task(task, {**data.options, **stage_options}) for stage_options in options]
    return [(task, stage["size"]) for task, stage in zip(tasks, stages, strict=True)]


def prompt_weights(data: Data, prompts: Sequence[Prompt], sources: Sequence[str]) -> tuple[float, ...] | None:
    """Return the sampling weight of each prompt, or None if no weights are configured. The weight is the value in
    data.weight_column, scaled so that the prompts of a source together have the source's share in data.source_weights.
    Raise a UserError if a source has no weight, or all weights are 0. sources: the file of each prompt."""
    column, shares = data.weight_column, data.source_weights
    if column is None and not shares:
        return None
    weights = [1.0 if column is None else float(prompt.columns[column]) for prompt in prompts]
    if not any(weights):
        raise UserError(
            f"data.weight_column={column}: all weights are 0. Fix: set a positive weight for at least one row"
        )
    if not shares:
        return tuple(weights)
    if data.source_column is not None:
        sources = [prompt.columns[data.source_column] for prompt in prompts]
    unknown = next((source for source in sources if source not in shares), None)
    if unknown is not None:
        raise UserError(
            f"data.source_weights: the source {unknown!r} of some rows has no weight. Fix: add a weight for {unknown!r}"
        )
    totals = dict.fromkeys(sources, 0.0)
    for source, weight in zip(sources, weights, strict=True):
        totals[source] += weight
    return tuple(
        shares[source] * weight / totals[source] if weight else 0.0
        for source, weight in zip(sources, weights, strict=True)
    )


def require_size(num_rows: int, num_kept: int, data: Data) -> None:
    """Raise a UserError if a source has too few rows, or if all of them were dropped."""
    if num_rows == 0:
        raise UserError(f"data.source={data.source}: the source has no rows. Fix: use a file with at least one row")
    if data.size is not None and num_rows < data.size:
        raise UserError(
            f"data.size={data.size}: {data.source} has only {num_rows} rows. Fix: set data.size to at most {num_rows}, "
            "or set data.size=null to use all rows"
        )
    if num_kept == 0:
        raise UserError(
            f"data.overlong=drop: all {num_rows} rows of {data.source} are too long. Fix: raise rollout.context_length"
        )


@dataclass(frozen=True, slots=True)
class _Read:
    """One tokenized row: its file, prompt, privileged prompts by column, int32 [P], and given response, if any."""

    source: str
    prompt: Prompt
    privileged: Mapping[str, NDArray[np.int32]] = field(default_factory=dict)
    response: GivenResponse | None = None


def _caption(row: Row, data: Data) -> Prompt:
    """Return the prompt of an image. It has no token ids, because only the text encoder tokenizes captions."""
    if not isinstance(row.prompt, str):
        raise UserError(
            f"{place_of(row, data)}: column {data.prompt_column!r} (data.prompt_column) contains messages, but a "
            "caption must be plain text. Fix: use a column of strings"
        )
    return Prompt(row_name(row, data), row.prompt, np.empty(0, np.int32), row.answer, columns=row.columns)


def _read(
    row: Row,
    tokenizer: PreTrainedTokenizerBase,
    config: Config,
    teachers: Mapping[str, Sequence[Teacher]],
    image_rows: ImageRows | None,
) -> _Read | None:
    """Return the tokenized row, or None if it is dropped. `teachers`: the teachers that see each column."""
    place = place_of(row, config.data)
    if config.data.source == OWN_TASKS:
        return _Read(row.source, Prompt(f"{OWN_TASKS}:{row.number}", "", np.empty(0, np.int32)))
    prompt = add_system_prompt(config.data.system_prompt, row.prompt, place)
    ids = prompt_ids(tokenizer, prompt, config.data.chat_template, place)
    token_ids, images = (ids, ()) if image_rows is None else image_rows.expand(ids, row.images, place)
    if too_long(len(token_ids), "the prompt", config, place, sum(image.num_tokens for image in images)):
        return None
    privileged = {}
    for column, content in _privileged_prompts(row, config.data, teachers):
        content = add_system_prompt(config.data.system_prompt, content, f"{place}: column {column!r}")
        private = prompt_ids(tokenizer, content, config.data.chat_template, f"{place}: column {column!r}")
        if too_long(len(private), f"the prompt in column {column!r}", config, place):
            return None
        privileged[column] = np.array(private, np.int32)
    response = None
    if config.data.response_column is not None:
        response = _response(row, prompt, ids, tokenizer, config)
        if response is None:
            return None
    prompt = Prompt(
        id=row_name(row, config.data),
        text=decode(tokenizer, ids, skip_special_tokens=False),
        token_ids=np.array(token_ids, np.int32),
        answer=row.answer,
        messages=tuple(as_messages(prompt, "user")),
        columns=row.columns,
        images=images,
    )
    return _Read(row.source, prompt, privileged, response)


def _response(
    row: Row, prompt: Content, prompt_ids: list[int], tokenizer: PreTrainedTokenizerBase, config: Config
) -> GivenResponse | None:
    """Return the row's given response, or None if the row is dropped. Raise a UserError if the row has no response or,
    unless data.overlong=drop, if the response is longer than rollout.max_new_tokens."""
    column, longest = config.data.response_column, config.rollout.max_new_tokens
    assert column is not None, "the data has no column with responses"
    place = f"{place_of(row, config.data)}: column {column!r} (data.response_column)"
    content = content_of(row.columns.get(column), column, place_of(row, config.data))
    if content is None:
        raise UserError(f"{place}: the prompt has no response. Fix: fill the column, or drop the row")
    ids, mask = with_response(tokenizer, prompt, content, prompt_ids, config.data.chat_template, place)
    first = len(prompt_ids)
    if ids[:first] != prompt_ids:
        raise UserError(
            f"{place}: the chat template renders the prompt differently before this response. Fix: drop the row"
        )
    if len(ids) - first > longest:
        if config.data.overlong == "drop":
            return None
        raise UserError(
            f"{place}: the response has {len(ids) - first} tokens, but rollout.max_new_tokens={longest}. Fix: raise "
            f"rollout.max_new_tokens to at least {len(ids) - first}, or set data.overlong=drop to drop all such rows"
        )
    text = decode(tokenizer, ids[first:], skip_special_tokens=True)
    return GivenResponse(np.array(ids[first:], np.int32), np.array(mask[first:], np.bool_), text)


def _privileged_prompts(
    row: Row, data: Data, teachers_by_column: Mapping[str, Sequence[Teacher]]
) -> Iterator[tuple[str, Content]]:
    """Yield (column, prompt) for each nonempty privileged prompt of a teacher that applies to the row."""
    source = None if data.source_column is None else row.columns[data.source_column]
    for column, teachers in teachers_by_column.items():
        content = content_of(row.columns.get(column), column, place_of(row, data))
        if content is not None and any(teacher.applies_to(source) for teacher in teachers):
            yield column, content


def too_long(length: int, subject: str, config: Config, place: str, num_image_tokens: int = 0) -> bool:
    """Return whether to drop a row of `length` tokens because the row and its response exceed rollout.context_length.
    Raise a UserError for such a row unless data.overlong=drop. num_image_tokens: how many of the tokens stand for
    images."""
    new, context = 0 if config.is_offline else config.rollout.max_new_tokens, config.rollout.context_length
    needed = length + new
    if needed <= context:
        return False
    if config.data.overlong == "drop":
        return True
    total = f" ({length} + rollout.max_new_tokens={new} = {needed})" if new else ""
    lower = "lower rollout.max_new_tokens, " if new else ""
    images = ""
    if num_image_tokens:
        images, lower = f", {num_image_tokens} of them for images", f"{lower}lower data.max_pixels, "
    raise UserError(
        f"{place}: {subject} has {length} tokens{images}{total}, but rollout.context_length={context}. Fix: raise "
        f"rollout.context_length to at least {needed}, {lower}or set data.overlong=drop to drop all such rows"
    )


def _hash(
    prompts: Sequence[Prompt],
    privileged: Mapping[str, Mapping[str, NDArray[np.int32]]],
    responses: Mapping[str, GivenResponse],
) -> str:
    digest = hashlib.sha256()
    for prompt in prompts:
        hashed = [
            prompt.token_ids.tolist() or prompt.text or [],
            *([[image.digest for image in prompt.images]] if prompt.images else []),
            prompt.answer,
            *([prompt.columns] if prompt.columns else []),
            *(ids[prompt.id].tolist() for ids in privileged.values() if prompt.id in ids),
            *(
                [responses[prompt.id].token_ids.tolist(), responses[prompt.id].mask.tolist()]
                if prompt.id in responses
                else []
            ),
        ]
        digest.update(json.dumps(hashed, sort_keys=True).encode() + b"\n")
    return digest.hexdigest()
