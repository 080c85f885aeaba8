"""A process that calls functions of the user, for a `FunctionPool`, which may kill it at any time.

It first says which function it imports, in a line of JSON each, and then which columns of the data they ask for, and
which take whole batches. Then it reads pickled calls from stdin, (name, arguments, columns), and answers each with such
a line. The functions' own stdin is empty, and what they print goes to stderr.
"""

from __future__ import annotations

import asyncio
import faulthandler
import inspect
import json
import numbers
import os
import pickle
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, BinaryIO

from megarl.config import schema
from megarl.core import stacks
from megarl.core.errors import UserError
from megarl.data.files import ALL_COLUMNS
from megarl.rewards import judge as comparisons
from megarl.rewards.options import NUM_TOKENS
from megarl.rewards.registry import asked_columns, from_file, resolve, takes_batches
from megarl.sandbox.choice import find_provider
from megarl.sandbox.provider import Provider

NUM_ARGUMENTS = 3
JUDGE_ARGUMENTS = ("prompt", "first", "second", "answer")

SANDBOX = "sandbox"
"""The name of the parameter that gets the provider of sandboxes, and no column."""


def main(
    functions: Sequence[tuple[str, str, Mapping[str, Any]]],
    judge: str | None,
    memory_mib: int | None,
    sandbox: Mapping[str, Any] | None,
    sandbox_s: float,
) -> None:
    """Answers calls until there are no more.

    functions    label, name and options of each
    memory_mib   address space that calls may take beside what the process has when it has found its functions
    sandbox      section `sandbox` of the config; None: no function may ask for sandboxes
    sandbox_s    how long a sandbox may live
    """
    calls, answers = take_pipes()
    faulthandler.enable()
    stacks.write_on_request()
    try:
        known = {}
        for label, name, options in functions:
            _write(answers, {"importing": f"rewards.functions: {name}"})
            known[label] = resolve(name, options)
        if judge is not None:
            _write(answers, {"importing": f"rewards.judge: {judge}"})
            known[comparisons.NAME] = from_file("rewards.judge", judge, JUDGE_ARGUMENTS)
        asked = {
            name: asked_columns(function, len(JUDGE_ARGUMENTS) if name == comparisons.NAME else NUM_ARGUMENTS)
            for name, function in known.items()
        }
        confined = [name for name, parameters in asked.items() if parameters.pop(SANDBOX, None) is not None]
        if confined:
            _write(answers, {"importing": f"sandbox, for {', '.join(confined)}"})
            provider = _provider(sandbox, sandbox_s)
            known |= {name: partial(known[name], **{SANDBOX: provider}) for name in confined}
    except UserError as error:
        _write(answers, {"refused": str(error)})
        return
    batch_functions = [label for label, _, _ in functions if takes_batches(known[label])]
    _write(answers, {"ready": True, "columns": _needed_by(asked), "batch_functions": batch_functions})
    if memory_mib is not None:
        _limit_memory(memory_mib)
    while True:
        try:
            name, arguments, columns = pickle.load(calls)
        except EOFError:  # the pool is closed, or its process has ended
            return
        if name in batch_functions:
            _write(answers, answer_batch(known[name], arguments, _given_to_batch(asked[name], columns)))
        else:
            _write(answers, answer(known[name], arguments, _given(asked[name], columns)))


def _provider(sandbox: Mapping[str, Any] | None, sandbox_s: float) -> Provider:
    assert sandbox is not None, "only pools of runs have functions that ask for sandboxes"
    return asyncio.run(find_provider(schema.Sandbox(**sandbox), sandbox_s))


def _limit_memory(mib: int) -> None:
    """Lets the process and those that it starts have so much more address space each than it has now."""
    with open("/proc/self/statm") as statm:
        now = int(statm.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = now + mib * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _needed_by(asked: Mapping[str, Mapping[str, bool]]) -> dict[str, str | None]:
    """Returns all columns that functions ask for, each with one that cannot do without it, or None."""
    needed: dict[str, str | None] = {}
    for function, columns in asked.items():
        for column, required in columns.items():
            needed[column] = function if required else needed.get(column)
    needed.pop(NUM_TOKENS, None)  # the run says it
    return needed


def _given(asked: Mapping[str, bool], columns: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the further arguments of a call, by name."""
    named = {name: columns[name] for name in asked if name in columns}
    return named | ({ALL_COLUMNS: _row(columns)} if ALL_COLUMNS in asked else {})


def _row(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the columns of the data's row alone."""
    return {name: value for name, value in columns.items() if name != NUM_TOKENS}


def _given_to_batch(asked: Mapping[str, bool], columns: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Returns the further arguments of a batch, by name. A column that some rows lack is None there. columns: those of
    each sample's row."""
    names = [name for name in asked if any(name in row for row in columns)]
    lists = {name: [row.get(name) for row in columns] for name in names}
    return lists | ({ALL_COLUMNS: [_row(row) for row in columns]} if ALL_COLUMNS in asked else {})


def take_pipes() -> tuple[BinaryIO, BinaryIO]:
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
    """Calls the function. Returns the fields of a Result."""
    try:
        return _result(_returned(function, arguments, further or {}))
    except BaseException as error:  # the user's code may raise anything, SystemExit too
        return _failure(error)


def answer_batch(
    function: Callable[..., Any], arguments: Sequence[Sequence[Any]], further: Mapping[str, Any]
) -> dict[str, Any]:
    """Calls the function with lists. Returns the fields of a Result for each sample, as `results`, where an exception
    in the place of a reward is the failure of its sample; or those of one that is the failure of all samples."""
    num_samples = len(arguments[0])
    try:
        values = _returned(function, arguments, further)
        if getattr(values, "ndim", None) == 1:  # of an array or a tensor
            values = values.tolist()
        if not isinstance(values, list | tuple) or len(values) != num_samples:
            found = f"a list of {len(values)}" if isinstance(values, list | tuple) else type(values).__name__
            return {"value": None, "failure": f"returned {found} for {num_samples} samples, not one score for each,"}
        return {"results": [_failure(v) if isinstance(v, BaseException) else _result(v) for v in values]}
    except BaseException as error:
        return _failure(error)


def _returned(function: Callable[..., Any], arguments: Sequence[Any], further: Mapping[str, Any]) -> Any:
    """Returns what the function returns; of one that is async, when it is done."""
    value = function(*arguments, **further)
    return asyncio.run(value) if inspect.iscoroutine(value) else value


def _result(value: Any) -> dict[str, Any]:
    """Returns the fields of the Result of one sample."""
    if isinstance(value, list | tuple):
        values = [_number(item) for item in value]
        return {"value": None if None in values else values, "returned": f"a list of {len(value)}"}
    value, kind = _number(value), type(value).__name__
    return {"value": value, "returned": kind if value is None else str(value)}


def _failure(error: BaseException) -> dict[str, Any]:
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
