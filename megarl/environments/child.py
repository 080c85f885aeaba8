"""A process that calls functions of the user, for a `FunctionPool`, which may kill it at any time.

It first says which function it imports, in a line of JSON each. Then it reads pickled calls from stdin, (name,
arguments), and answers each with such a line. The functions' own stdin is empty, and what they print goes to stderr.
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
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

from megarl.core import stacks
from megarl.core.errors import UserError
from megarl.rewards import judge as comparisons
from megarl.rewards.registry import from_file, resolve

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
    _write(answers, {"ready": True})
    while True:
        try:
            name, arguments = pickle.load(calls)
        except EOFError:  # the pool is closed, or its process has ended
            return
        _write(answers, answer(known[name], arguments))


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


def answer(function: Callable[..., Any], arguments: Sequence[Any]) -> dict[str, Any]:
    """Calls the function, and waits for it if it is async. Returns the fields of a Result."""
    try:
        value = function(*arguments)
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
