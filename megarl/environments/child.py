"""A process that calls functions of the user, for a `FunctionPool`, which may kill it at any time.

It first says which function it imports, in a line of JSON each, and then which columns of the data they ask for. Then
it reads pickled calls from stdin, (name, arguments, columns), and answers each with such a line. The functions' own
stdin is empty, and what they print goes to stderr.
"""

from __future__ import annotations

import asyncio
import faulthandler
import inspect
import json
import numbers
import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, BinaryIO

from megarl.core import stacks
from megarl.core.errors import UserError
from megarl.data.files import ALL_COLUMNS
from megarl.rewards import judge as comparisons
from megarl.rewards.registry import asked_columns, from_file, resolve

NUM_ARGUMENTS = 3
JUDGE_ARGUMENTS = ("prompt", "first", "second", "answer")


def main(functions: Sequence[str], judge: str | None) -> None:
    calls, answers = _take_pipes()
    faulthandler.enable()
    stacks.write_on_request()
    try:
        known = {}
        for name in functions:
            _write(answers, {"importing": f"rewards.functions: {name}"})
            known[name] = resolve(name)
        if judge is not None:
            _write(answers, {"importing": f"rewards.judge: {judge}"})
            known[comparisons.NAME] = from_file("rewards.judge", judge, JUDGE_ARGUMENTS)
    except UserError as error:
        _write(answers, {"refused": str(error)})
        return
    asked = {
        name: asked_columns(function, len(JUDGE_ARGUMENTS) if name == comparisons.NAME else NUM_ARGUMENTS)
        for name, function in known.items()
    }
    _write(answers, {"ready": True, "columns": _needed_by(asked)})
    while True:
        try:
            name, arguments, columns = pickle.load(calls)
        except EOFError:  # the pool is closed, or its process has ended
            return
        _write(answers, answer(known[name], arguments, _given(asked[name], columns)))


def _needed_by(asked: Mapping[str, Mapping[str, bool]]) -> dict[str, str | None]:
    """Returns all columns that functions ask for, each with one that cannot do without it, or None."""
    needed: dict[str, str | None] = {}
    for function, columns in asked.items():
        for column, required in columns.items():
            needed[column] = function if required else needed.get(column)
    return needed


def _given(asked: Mapping[str, bool], columns: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the further arguments of a call, by name."""
    named = {name: columns[name] for name in asked if name in columns}
    return named | ({ALL_COLUMNS: dict(columns)} if ALL_COLUMNS in asked else {})


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Returns stdin and stdout, which the functions then no longer have."""
    calls, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return calls, answers


def _write(answers: BinaryIO, line: dict[str, Any]) -> None:
    answers.write(json.dumps(line).encode() + b"\n")
    answers.flush()


def answer(
    function: Callable[..., Any], arguments: Sequence[Any], further: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Calls the function, and waits for it if it is async. Returns the fields of a Result."""
    try:
        value = function(*arguments, **(further or {}))
        if inspect.iscoroutine(value):
            value = asyncio.run(value)
        if isinstance(value, list | tuple):
            values = [_number(item) for item in value]
            return {"value": None if None in values else values, "returned": f"a list of {len(value)}"}
        value, kind = _number(value), type(value).__name__
        return {"value": value, "returned": kind if value is None else str(value)}
    except BaseException as error:  # the user's code may raise anything, SystemExit too
        return {"value": None, "failure": f"raised {type(error).__name__}: {' '.join(str(error).split())}"}


def _number(value: Any) -> float | None:
    """Returns a bool or a real number, of Python, numpy or torch, as a float; None for anything else."""
    if getattr(value, "ndim", None) == 0:  # of an array or a tensor without axes, and of numpy's scalars
        value = value.item()
    if not isinstance(value, numbers.Real):
        return None
    try:
        return float(value)
    except OverflowError:  # an int beyond all floats
        return None


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
