"""Procedural data: the tasks of the package reasoning-gym, such as logic puzzles, algebra, games and graphs.

Run as a module, it is the process in which rows are made: some tasks go through sets of text, whose order follows from
the seed of Python's hashes, which is a process's own unless it starts with another.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

from megarl.core.errors import UserError
from megarl.data.files import ALL_COLUMNS
from megarl.data.row import Row

COLUMNS = ("task", "options", "metadata")
"""The columns of a row: the task's name, its options, and what reasoning-gym says of the entry beside its question and
its answer. In a `composite` of tasks, the first two are those of the row's own."""

OURS = ("seed", "size")
"""The options that follow from run.seed, data.size and data.stages."""


def load_gym() -> ModuleType:
    """Returns the package. It imports all of its tasks, and so all of what they need. Raises UserError where something
    is missing."""
    try:
        import reasoning_gym
        import reasoning_gym.composite
        import reasoning_gym.utils
    except ModuleNotFoundError as error:
        raise UserError(
            f"data.source=reasoning_gym: the package {error.name} is not installed here; all tasks need it, as "
            "reasoning-gym imports all of them: pip install 'megarl[rewards]' (of which pycosat needs a C compiler)"
        ) from None
    return reasoning_gym


@dataclasses.dataclass(frozen=True)
class Task:
    """A task of reasoning-gym, with its options."""

    name: str
    options: Mapping[str, Any]

    def dataset(self, seed: int, size: int) -> Any:
        """Returns the task's entries. Raises UserError for a task or an option that there is not, or a value that the
        task refuses."""
        from reasoning_gym.factory import DATASETS

        gym = load_gym()
        if self.name not in DATASETS:
            close = difflib.get_close_matches(self.name, DATASETS, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise UserError(
                f"data.source: reasoning-gym has no task {self.name!r}; {hint}known: {', '.join(sorted(DATASETS))}"
            )
        known = [field.name for field in dataclasses.fields(DATASETS[self.name][1]) if field.name not in OURS]
        for option in self.options:
            if option not in known:
                raise UserError(
                    f"data.options.{option}: {self.name} has no such option; known: {', '.join(known) or 'none'}"
                )
        try:
            return gym.create_dataset(self.name, seed=seed, size=size, **self._typed(gym))
        except (AssertionError, TypeError, ValueError) as error:
            raise UserError(f"data.options={json.dumps(self.options)}: {self.name} refuses it: {error}") from None

    def of(self, metadata: Mapping[str, Any]) -> Task:
        """Returns the task of one entry: of a composite, one of its tasks."""
        if self.name != "composite":
            return self
        part = next(part for part in self.options["datasets"] if part["name"] == metadata["source_dataset"])
        return Task(part["name"], part.get("config", {}))

    def _typed(self, gym: ModuleType) -> dict[str, Any]:
        """Returns the options in the types that the task has in mind."""
        options = dict(self.options)
        if self.name == "composite":
            spec = gym.composite.DatasetSpec
            options["datasets"] = [spec(**{"weight": 1.0, "config": {}} | part) for part in options.get("datasets", [])]
        return options


def reasoning_rows(stages: Sequence[tuple[Task, int]], seed: int, wanted: Collection[str] = COLUMNS) -> Iterator[Row]:
    """Yields so many rows of each task, one task after the other, the same ones for the same seed.

    wanted: the columns that a row brings along, ALL_COLUMNS for every one.

    Raises UserError as Task.dataset does.
    """
    request = pickle.dumps((list(stages), seed))
    command, environment = [sys.executable, "-m", "megarl.data.reasoning"], {**os.environ, "PYTHONHASHSEED": "0"}
    chosen = COLUMNS if ALL_COLUMNS in wanted else [name for name in COLUMNS if name in wanted]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
        process.stdin.write(request)
        process.stdin.close()
        try:
            while (row := pickle.load(process.stdout)) is not None:
                if isinstance(row, UserError):
                    raise row
                yield dataclasses.replace(row, columns={name: row.columns[name] for name in chosen})
        except EOFError:
            raise RuntimeError(f"reasoning-gym ended the process of its rows ({process.wait()}); see above") from None
        finally:
            process.kill()


def _make_rows(stages: Sequence[tuple[Task, int]], seed: int) -> Iterator[Row]:
    """Yields the rows with all columns."""
    number = 0
    for task, size in stages:
        dataset = task.dataset(seed + number, size)
        for i in range(size):
            entry = dataset[i]
            of_row = task.of(entry["metadata"])
            columns = dict(zip(COLUMNS, (of_row.name, dict(of_row.options), entry["metadata"]), strict=True))
            number += 1
            yield Row(number, entry["question"], entry["answer"], columns)


def main() -> None:
    """Reads tasks and a seed from stdin, pickled, and writes rows to stdout likewise, None after the last one; or the
    UserError that is in their place."""
    stages, seed = pickle.load(sys.stdin.buffer)
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(2, 1)  # what a task prints is no row
        try:
            for row in _make_rows(stages, seed):
                pickle.dump(row, out)
            pickle.dump(None, out)
        except UserError as error:
            pickle.dump(error, out)


if __name__ == "__main__":
    from megarl.data.reasoning import main as main_of_module  # whose Task is the one that is pickled

    main_of_module()
