"""Procedural data from the reasoning-gym package, such as logic puzzles, algebra, games and graphs.

Run as a program, this module is the subprocess that generates the rows. Some tasks iterate over sets of strings, whose
order depends on PYTHONHASHSEED, which can only be set before a process starts.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from numbers import Integral
from types import ModuleType
from typing import Any

from megarl.core.errors import InfrastructureFailure, UserError, install_extra
from megarl.core.interpreter import PYTHON
from megarl.data.files import ALL_COLUMNS
from megarl.data.row import Row
from megarl.usercode.child_process import ChildFailure, ChildProcess
from megarl.usercode.failures import RESTARTS
from megarl.usercode.parent import connect, send

COLUMNS = ("task", "options", "metadata")
"""The columns of a row: the task's name, its options, and the metadata of the reasoning-gym entry. In a `composite`
task, the name and options are those of the row's subtask."""

RESERVED_OPTIONS = ("seed", "size")
"""Options that are determined by run.seed, data.size and data.stages."""


def load_gym() -> ModuleType:
    """Import and return reasoning-gym. This imports all tasks and the packages that they depend on. Raise a UserError
    if one of these packages is missing."""
    try:
        import reasoning_gym
        import reasoning_gym.composite
        import reasoning_gym.utils
    except ModuleNotFoundError as error:
        raise UserError(
            f"data.source=reasoning_gym: the package {error.name} is not installed, but reasoning-gym needs it for "
            f"every task. Fix: {install_extra('rewards')} (pycosat needs a C compiler)"
        ) from None
    return reasoning_gym


@dataclasses.dataclass(frozen=True)
class Task:
    """A reasoning-gym task and its options."""

    name: str
    options: Mapping[str, Any]

    def dataset(self, seed: int, size: int) -> Any:
        """Return the task's data set. Raise a UserError for an unknown task or option, or an invalid value."""
        from reasoning_gym.factory import DATASETS

        gym = load_gym()
        if self.name not in DATASETS:
            close = difflib.get_close_matches(self.name, DATASETS, n=1)
            hint = f"Did you mean {close[0]}? " if close else ""
            raise UserError(
                f"data.source: unknown reasoning-gym task {self.name!r}. {hint}Fix: use one of "
                f"{', '.join(sorted(DATASETS))}"
            )
        known = [f.name for f in dataclasses.fields(DATASETS[self.name][1]) if f.name not in RESERVED_OPTIONS]
        for option in self.options:
            if option not in known:
                raise UserError(
                    f"data.options.{option}: unknown option of {self.name}. Fix: remove it, or use one of "
                    f"{', '.join(known)}"
                )
        try:
            return gym.create_dataset(self.name, seed=seed, size=size, **self._typed(gym))
        except (AssertionError, TypeError, ValueError) as error:
            raise UserError(
                f"data.options={json.dumps(self.options)}: {self.name} rejects these options: {error}. Fix: change "
                "the rejected option in data.options"
            ) from None

    def of(self, metadata: Mapping[str, Any]) -> Task:
        """Return the task of one entry; for a composite task, the entry's subtask."""
        if self.name != "composite":
            return self
        part = next(part for part in self.options["datasets"] if part["name"] == metadata["source_dataset"])
        return Task(part["name"], part.get("config", {}))

    def _typed(self, gym: ModuleType) -> dict[str, Any]:
        """Return the options with values converted to the types that the task expects."""
        options = dict(self.options)
        if self.name == "composite":
            spec = gym.composite.DatasetSpec
            options["datasets"] = [spec(**{"weight": 1.0, "config": {}} | part) for part in options.get("datasets", [])]
        return options


def reasoning_rows(stages: Sequence[tuple[Task, int]], seed: int, included: Collection[str] = COLUMNS) -> Iterator[Row]:
    """Yield the given number of rows for each task, task by task. The rows are deterministic for a given seed.
    `included` names the columns to include; ALL_COLUMNS includes every column. Raise a UserError under the same
    conditions as `Task.dataset`. If the process that generates the rows is killed, a new process continues, up to
    RESTARTS times; after that, raise InfrastructureFailure."""
    names = COLUMNS if ALL_COLUMNS in included else [name for name in COLUMNS if name in included]
    num_rows = 0
    for _ in range(RESTARTS + 1):
        try:
            for row in islice(_rows_of_process(stages, seed), num_rows, None):
                num_rows += 1
                yield Row(row.number, row.prompt, row.answer, {name: row.columns[name] for name in names})
            return
        except ChildFailure as failure:
            if not failure.was_killed:
                raise RuntimeError(
                    f"the reasoning-gym process exited before it sent all rows ({failure}). Its output above shows the "
                    "cause"
                ) from None
    raise InfrastructureFailure(
        f"data.source: the reasoning-gym process was killed {RESTARTS + 1} times. The kernel kills processes when "
        "memory runs out. Fix: run on a node with more memory, or lower data.size"
    )


def _rows_of_process(stages: Sequence[tuple[Task, int]], seed: int) -> Iterator[Row]:
    """Yield the rows that a new process generates, with all columns. Raise ChildFailure if the process ends early."""
    process = ChildProcess([*PYTHON, "-m", "megarl.data.reasoning"], {**os.environ, "PYTHONHASHSEED": "0"})
    try:
        request = {"stages": [(task.name, task.options, size) for task, size in stages], "seed": seed}
        process.send(json.dumps(request).encode() + b"\n")
        while "end" not in (message := process.receive()):
            if "refused" in message:
                raise UserError(message["refused"])
            yield Row(*decode(message["row"]))
    finally:
        process.kill()


def _make_rows(stages: Sequence[tuple[Task, int]], seed: int) -> Iterator[Row]:
    """Yield the rows with all columns."""
    number = 0
    for task, size in stages:
        dataset = task.dataset(seed + number, size)
        for i in range(size):
            entry = dataset[i]
            row_task = task.of(entry["metadata"])
            columns = {"task": row_task.name, "options": dict(row_task.options), "metadata": entry["metadata"]}
            number += 1
            yield Row(number, entry["question"], entry["answer"], columns)


def main() -> None:
    """Receive tasks and a seed. Send one message per row and then `end`, or `refused` with the reason."""
    parent = connect()
    request = json.loads(parent.readline())
    try:
        stages = [(Task(name, options), size) for name, options, size in request["stages"]]
        for row in _make_rows(stages, request["seed"]):
            send(parent, {"row": encode((row.number, row.prompt, row.answer, row.columns))})
        send(parent, {"end": True})
    except UserError as error:
        send(parent, {"refused": str(error)})


def encode(value: Any) -> Any:
    """Encode a value as JSON such that `decode` restores an equal value. JSON alone would turn tuples into lists and
    keys into text, but reasoning-gym's verifiers need the original types."""
    if isinstance(value, tuple):
        return {"tuple": list(map(encode, value))}
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(item)] for key, item in value.items()]}
    if isinstance(value, list):
        return list(map(encode, value))
    if isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)  # including numpy's integers
    return value


def decode(value: Any) -> Any:
    if isinstance(value, list):
        return list(map(decode, value))
    if not isinstance(value, dict):
        return value
    [(kind, items)] = value.items()
    return tuple(map(decode, items)) if kind == "tuple" else {decode(key): decode(item) for key, item in items}


if __name__ == "__main__":
    main()
