"""A run's metrics and rollouts as Arrow tables."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.core.errors import UserError
from megarl.core.files import is_plain
from megarl.core.jsonl import read_objects
from megarl.report.history import read_history
from megarl.rewards.rollout_images import image_path
from megarl.run.folder import RunFolder

if TYPE_CHECKING:
    import pyarrow

PARTS = "parts"
TYPES: dict[str, type] = {
    **dict.fromkeys(("sample_id", "prompt_id", "rollout_id", "prompt", "response"), str),
    **dict.fromkeys(("failure", "finish_reason", "stop_reason", "image", "preview"), str),
    **dict.fromkeys(("step", "num_response_tokens", "first_turn", "num_denoising_steps"), int),
    **dict.fromkeys(("reward", "advantage"), float),
}
"""Types of the fields with a single value. Fields other than these, PARTS, MASK and LISTS become JSON text."""

LISTS: dict[str, type] = {
    **dict.fromkeys(("prompt_ids", "response_ids", "trained_denoising_steps"), int),
    **dict.fromkeys(("rollout_logprobs", "logprob_differences", "token_advantages", "turn_rewards"), float),
    "tokens": str,
}
"""Element types of the fields that are lists. A number that is not finite is null in the file and in the table."""

MASK = "mask"
"""Field with the lengths of alternating runs of trained and untrained tokens. The column has one value per token."""

FILES = ("image", "preview")
"""Fields that name a file relative to the rollout file. The table contains the full path."""

MAX_ID = 2**31 - 1


def read_metrics(folder: str | Path) -> pyarrow.Table:
    """Return a run's metrics, one row per step, in the order of the steps.

    The column `step` is int64. Each metric is a column of float64, with null where a step lacks the metric or its
    value is not finite.

    Args:
        folder: a run folder, such as `runs/latest`. The run may still be running.

    Raises:
        UserError: the folder has no metrics.
    """
    import pyarrow

    path = RunFolder(Path(folder)).metrics
    if not path.exists():
        raise UserError(f"{folder}: not a run folder (no metrics.jsonl). Fix: pass a run folder such as runs/latest")
    history = read_history(path)
    columns: dict[str, Any] = {"step": pyarrow.array(history.steps, pyarrow.int64())}
    for name, values in history.columns.items():
        columns[name] = pyarrow.array(values, pyarrow.float64(), from_pandas=True)
    return pyarrow.table(columns)


def read_rollouts(folder: str | Path, steps: Sequence[int] | None = None) -> pyarrow.Table:
    """Return the samples of a run with their rewards, one row per sample.

    Scalars have Arrow types. Fields with one value per token are list columns: `prompt_ids` and `response_ids` of
    int32, `rollout_logprobs`, `logprob_differences` and `token_advantages` of float32, `tokens` of strings, and `mask`
    (whether the token is trained; null if all are) of bool. `turn_rewards` is a list of float32. For image models,
    `trained_denoising_steps` is a list of int32, `rollout_logprobs` contains one value for each of these steps, and
    `image` is the path of a PNG file. Each reward function's value is a column `parts.NAME`. All other fields, such as
    `answer` and `messages`, are JSON text, because their type may differ between rows.

    Args:
        folder: a run folder, such as `runs/latest`.
        steps: steps to read; None reads all of them.

    Raises:
        UserError: the folder has no rollouts, or one of these steps has none.
    """
    import pyarrow

    files = RunFolder(Path(folder)).rollout_files()
    if not files:
        raise UserError(f"{folder}: the run has no rollouts. Fix: pass the folder of an RL run, such as runs/latest")
    if missing := [step for step in steps or () if step not in files]:
        raise UserError(f"{folder}: the run has no rollouts of step {missing[0]}. Fix: use steps from {sorted(files)}")
    rows = [row for step in (files if steps is None else steps) for row in _rows(files[step])]
    names = dict.fromkeys(name for row in rows for name in row if name != PARTS)
    columns = {name: _column(name, [row.get(name) for row in rows]) for name in names}
    if MASK in names:
        columns[MASK] = pyarrow.array(list(map(_mask, rows)), pyarrow.list_(pyarrow.bool_()))
    parts = [row[PARTS] if isinstance(row.get(PARTS), dict) else {} for row in rows]
    for name in dict.fromkeys(name for each in parts for name in each):
        columns[f"{PARTS}.{name}"] = _typed([each.get(name) for each in parts], float)
    return pyarrow.table(columns)


def _rows(file: Path) -> list[dict[str, Any]]:
    """Return the objects in a rollout file. A file name that is not one of its images becomes null."""
    rows, _ = read_objects(file)
    for row in rows:
        paths = {name: image_path(file, row[name]) for name in FILES if name in row}
        row |= {name: None if path is None else str(path) for name, path in paths.items()}
    return rows


def _column(name: str, values: Sequence[Any]) -> pyarrow.Array:
    import pyarrow

    if name in TYPES:
        return _typed(values, TYPES[name])
    if name in LISTS:
        kind = LISTS[name]
        element = {int: pyarrow.int32(), float: pyarrow.float32(), str: pyarrow.string()}[kind]
        lists = [
            value if isinstance(value, list) and all(_is_element(i, kind) for i in value) else None for value in values
        ]
        return pyarrow.array(lists, pyarrow.list_(element))
    texts = [None if value is None else json.dumps(value, ensure_ascii=False) for value in values]
    return pyarrow.array(texts, pyarrow.string())


def _is_element(value: Any, kind: type) -> bool:
    if kind is float and value is None:
        return True
    return is_plain(value, kind) and (kind is not int or abs(value) <= MAX_ID)


def _mask(row: Mapping[str, Any]) -> list[bool] | None:
    """Return whether each response token is trained, or None if the lengths are missing or invalid."""
    lengths, count = row.get(MASK), row.get("num_response_tokens")
    if not isinstance(lengths, list) or not all(is_plain(i, int) and i >= 0 for i in lengths) or sum(lengths) != count:
        return None
    return [number % 2 == 0 for number, length in enumerate(lengths) for _ in range(length)]


def _typed(values: Sequence[Any], kind: type) -> pyarrow.Array:
    """Return a column. Values of other types, as in a damaged file, become null."""
    import pyarrow

    return pyarrow.array([value if is_plain(value, kind) else None for value in values], _arrow_type(kind))


def _arrow_type(kind: type) -> pyarrow.DataType:
    import pyarrow

    return {str: pyarrow.string(), int: pyarrow.int64(), float: pyarrow.float64()}[kind]
