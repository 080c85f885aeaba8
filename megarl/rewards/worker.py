"""The worker process of a `FunctionPool`. It calls user functions and can be killed at any time.

It sends the name of each function that it imports, then the data columns that the functions use and the names of the
functions that take whole batches or images. Then it receives pickled calls `(id, name, arguments, columns)` and sends
one message with the same `id` per call. `columns` is None in a request to check data rows.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import numbers
import pickle
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from io import BufferedRWPair
from typing import TYPE_CHECKING, Any, overload

from megarl.core.errors import UserError, install_extra
from megarl.data.files import ALL_COLUMNS
from megarl.data.images import decode
from megarl.rewards import judge as judges
from megarl.rewards.options import CHECK_ROW, NUM_TOKENS, PROMPT_IMAGE_FILES, PROMPT_IMAGES, PROVIDED
from megarl.rewards.registry import FUNCTIONS, column_parameters, from_file, resolve, takes_batches
from megarl.rewards.result import Rating
from megarl.sandbox.choice import find_provider
from megarl.usercode.failures import kind_of
from megarl.usercode.feedback import split_feedback
from megarl.usercode.parent import connect, send

if TYPE_CHECKING:
    from PIL import Image

NUM_ARGUMENTS = 3
JUDGE_ARGUMENTS = ("prompt", "first", "second", "answer")

MAX_SHOWN = 100
"""Maximum number of characters of an answer that an error message shows."""

MAX_STACK = 4000
"""Maximum number of characters of a stack trace."""

SANDBOX = "sandbox"
"""Parameter that receives the sandbox provider instead of a data column."""


def main(
    parent: BufferedRWPair,
    functions: Sequence[tuple[str, str, Mapping[str, Any]]],
    judge: str | None,
    sandbox: Mapping[str, Any] | None,
    sandbox_s: float,
) -> None:
    """Serve calls until the parent closes the connection. `functions` lists each function's label, name and options.
    `sandbox` is the config's `sandbox` section, or None if no function may use sandboxes. Each sandbox is stopped after
    `sandbox_s` seconds."""
    try:
        loaded: dict[str, Callable[..., Any]] = {}
        errors: list[str] = []
        for label, name, options in functions:
            send(parent, {"importing": f"rewards.functions: {name}"})
            try:
                loaded[label] = resolve(name, options)
            except UserError as error:
                errors.append(str(error))
        if errors:
            raise UserError("\n".join(errors))
        row_checks = {
            label: check
            for label, name, _ in functions
            if name in FUNCTIONS and (check := getattr(loaded[label], CHECK_ROW, None)) is not None
        }
        if judge is not None:
            send(parent, {"importing": f"rewards.judge: {judge}"})
            loaded[judges.NAME] = from_file("rewards.judge", judge, JUDGE_ARGUMENTS)
        used_columns = {
            name: column_parameters(function, len(JUDGE_ARGUMENTS) if name == judges.NAME else NUM_ARGUMENTS)
            for name, function in loaded.items()
        }
        sandboxed = [name for name, parameters in used_columns.items() if parameters.pop(SANDBOX, None) is not None]
        if sandboxed:
            send(parent, {"importing": f"sandbox, for {', '.join(sandboxed)}"})
            assert sandbox is not None, "functions that use sandboxes require the sandbox section"
            from megarl.config.schema import Sandbox  # importing it takes longer than importing all other modules

            provider = asyncio.run(find_provider(Sandbox(**sandbox), sandbox_s))
            loaded |= {name: partial(loaded[name], **{SANDBOX: provider}) for name in sandboxed}
    except UserError as error:
        send(parent, {"refused": str(error)})
        return
    batch_functions = [label for label, _, _ in functions if takes_batches(loaded[label])]
    send(
        parent,
        {
            "ready": True,
            "columns": _required_by(used_columns),
            "batch_functions": batch_functions,
            "row_checks": {label: list(column_parameters(check, 1)) for label, check in row_checks.items()},
            "image_functions": [
                name for name, columns in used_columns.items() if {PROMPT_IMAGES, PROMPT_IMAGE_FILES} & columns.keys()
            ],
        },
    )
    while True:
        try:
            number, name, arguments, columns = pickle.load(parent)
        except EOFError:  # the pool was closed, or its process died
            return
        if columns is None:
            reply = check_rows(row_checks[name], arguments)
        else:
            score, keywords_of = (call_batch, _batch_keywords) if name in batch_functions else (call, _keywords)
            try:
                keywords = keywords_of(used_columns[name], columns)
            except Exception as error:  # for example, out of memory while decoding
                reply = _failure(error)
            else:
                reply = score(loaded[name], arguments, keywords)
        send(parent, {"id": number, **reply})


def _required_by(used_columns: Mapping[str, Mapping[str, bool]]) -> dict[str, str | None]:
    """Map each column that a function uses to the name of one function that requires it, or to None. Names in
    PROVIDED are included, so that the caller can reject data with such columns."""
    required_by: dict[str, str | None] = {}
    for function, columns in used_columns.items():
        for column, required in columns.items():
            is_required = required and column not in PROVIDED
            required_by[column] = function if is_required else required_by.get(column)
    return required_by


def _keywords(used_columns: Mapping[str, bool], columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments for a call."""
    values = {PROMPT_IMAGE_FILES: (), **columns}
    if PROMPT_IMAGES in used_columns:
        values[PROMPT_IMAGES] = tuple(image.copy() for image in _decode_cached(values[PROMPT_IMAGE_FILES]))
    keywords = {name: values[name] for name in used_columns if name in values}
    return keywords | ({ALL_COLUMNS: _row(columns)} if ALL_COLUMNS in used_columns else {})


def _row(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data row's columns, without values that the run provides."""
    return {name: value for name, value in columns.items() if name not in (NUM_TOKENS, PROMPT_IMAGE_FILES)}


def _batch_keywords(used_columns: Mapping[str, bool], rows: Sequence[Mapping[str, Any]]) -> dict[str, Sequence[Any]]:
    """Return the keyword arguments for a batch call: a list per column, with None for rows without the column."""
    values: list[dict[str, Any]] = [{PROMPT_IMAGE_FILES: (), **row} for row in rows]
    names = [name for name in used_columns if any(name in row for row in values)]
    keywords: dict[str, Sequence[Any]] = {name: [row.get(name) for row in values] for name in names}
    if PROMPT_IMAGES in used_columns:
        keywords[PROMPT_IMAGES] = PromptImages([row[PROMPT_IMAGE_FILES] for row in values])
    return keywords | ({ALL_COLUMNS: [_row(row) for row in rows]} if ALL_COLUMNS in used_columns else {})


class PromptImages(Sequence["tuple[Image.Image, ...]"]):
    """A tuple with the prompt's images for each sample in a batch. Images are decoded on access, because those of a
    whole step may not fit into memory. Consecutive accesses to samples of the same prompt return the same tuple."""

    def __init__(self, files: Sequence[tuple[bytes, ...]]):
        self._files, self._decode = files, lru_cache(maxsize=1)(_decode)

    def __len__(self) -> int:
        return len(self._files)

    @overload
    def __getitem__(self, index: int) -> tuple[Image.Image, ...]: ...

    @overload
    def __getitem__(self, index: slice) -> PromptImages: ...

    def __getitem__(self, index: int | slice) -> tuple[Image.Image, ...] | PromptImages:
        if isinstance(index, slice):
            return PromptImages(self._files[index])
        return self._decode(self._files[index])


def _decode(files: tuple[bytes, ...]) -> tuple[Image.Image, ...]:
    try:
        return tuple(map(decode, files))
    except MemoryError:
        raise MemoryError(
            "not enough memory to decode the prompt's images. Fix: raise rewards.memory_mib, or use "
            f"{PROMPT_IMAGE_FILES} instead of {PROMPT_IMAGES}"
        ) from None


_decode_cached = lru_cache(maxsize=1)(_decode)
"""`_decode` with a cache, because consecutive calls often use the images of the same prompt."""


def call(
    function: Callable[..., Any], arguments: Sequence[Any], keywords: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Call the function and return the fields of a Result."""
    try:
        return _result(_return_value(function, arguments, keywords or {}))
    except BaseException as error:  # user code may raise anything, including SystemExit
        return _failure(error)


def call_batch(
    function: Callable[..., Any], arguments: Sequence[Sequence[Any]], keywords: Mapping[str, Any]
) -> dict[str, Any]:
    """Call a batch function with lists.

    Returns:
        `{"results": ...}` with the Result fields for each sample. An exception object in place of a score fails only
        that sample. If the call itself fails, the fields of a single Result that applies to all samples.
    """
    num_samples = len(arguments[0])
    try:
        values = _return_value(function, arguments, keywords)
        if getattr(values, "ndim", None) == 1:  # array or tensor
            values = values.tolist()
        if not isinstance(values, list | tuple) or len(values) != num_samples:
            kind = f"a list of {len(values)}" if isinstance(values, list | tuple) else type(values).__name__
            return {"value": None, "failure": f"returned {kind} for {num_samples} samples, not one score for each,"}
        return {"results": [_failure(v) if isinstance(v, BaseException) else _result(v) for v in values]}
    except BaseException as error:
        return _failure(error)


def check_rows(check: Callable[..., Any], rows: Sequence[tuple[Any, Mapping[str, Any]]]) -> dict[str, Any]:
    """Check rows (answer, columns). Return `{"problems": ...}` with a message or None for each row, or the fields of a
    Result if the infrastructure failed."""
    problems: list[str | None] = []
    required = [column for column, is_required in column_parameters(check, 1).items() if is_required]
    for answer, columns in rows:
        missing = [column for column in required if column not in columns]
        if missing:
            problems.append(
                f"the row has no column {missing[0]!r}, which the reward function requires. Fix: add the column to the "
                "data, or limit the function to other rows with data.source_column and `sources`"
            )
            continue
        try:
            check(answer, **columns)
            problems.append(None)
        except BaseException as error:
            if kind_of(error) != "error":
                return _failure(error)
            failure = f"checking its answer {str(answer)[:MAX_SHOWN]!r} {_failure(error)['failure']}"
            described = f"{failure}. Fix: {_remedy(error, answer, list(columns))}"
            problems.append(" ".join(str(error).split()) if "Fix: " in str(error) else described)
    return {"problems": problems}


def _remedy(error: BaseException, answer: Any, columns: Sequence[str]) -> str:
    """Return a remedy for an exception that a check of a data row raised."""
    if isinstance(error, ImportError):
        return install_extra("rewards")
    if isinstance(error, MemoryError):
        return "raise rewards.memory_mib, or drop the row"
    names = " or ".join(["data.answer_column", *(f"column {column!r}" for column in columns)])
    if isinstance(error, TypeError | AttributeError):
        return f"change the type of the value in {names}; the answer is a {type(answer).__name__}"
    return f"change the value in {names}, or drop the row"


def _return_value(function: Callable[..., Any], arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
    """Call the function, and run the coroutine if it is async."""
    value = function(*arguments, **keywords)
    return asyncio.run(value) if inspect.iscoroutine(value) else value


def _result(value: Any) -> dict[str, Any]:
    """Return the Result fields for the value that a function returned for one sample: a reward, or a dict with the keys
    `reward` and `feedback`."""
    try:
        value, feedback = split_feedback(value)
    except TypeError as error:
        return _failure(error)
    extra: dict[str, Any] = {"feedback": feedback} if feedback else {}
    if isinstance(value, list | tuple):
        values = [_number(item) for item in value]
        return {"value": None if None in values else values, "returned": f"a list of {len(value)}", **extra}
    if isinstance(value, Rating):
        extra["issues"] = value.issues
    value, kind = _number(value), type(value).__name__
    return {"value": value, "returned": kind if value is None else str(value), **extra}


def _failure(error: BaseException) -> dict[str, Any]:
    failure = f"raised {type(error).__name__}: {' '.join(str(error).split())}"
    return {"value": None, "failure": failure, "kind": kind_of(error), "stack": _stack(error)}


def _stack(error: BaseException) -> str:
    """Return the end of the stack trace, without this module's frames."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))[-MAX_STACK:]


def _number(value: Any) -> float | None:
    """Convert a bool or a real number from Python, NumPy or torch to a float. Return None for anything else."""
    if getattr(value, "ndim", None) == 0:  # NumPy scalars, and zero-dimensional arrays and tensors
        value = value.item()
    if not isinstance(value, numbers.Real):
        return None
    try:
        return float(value)
    except OverflowError:  # an int larger than any float
        return None


if __name__ == "__main__":
    parent = connect()
    main(parent, **json.loads(parent.readline()))
