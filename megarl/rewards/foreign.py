"""Reward functions written for other trainers. They are refused with a wrapper to add to the file, because whether their
completions are text or messages, and which column holds an argument, cannot be inferred."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from pathlib import PurePath
from typing import Any

from megarl.core.errors import UserError
from megarl.rewards.options import BATCH, SINGLE

WRAPPER = "megarl_reward"

ROLES: tuple[frozenset[str], ...] = (
    frozenset({"prompt", "question", "query", "prompts", "questions", "queries"}),
    frozenset(
        {"response", "completion", "solution_str", "predict_str", "model_output", "responses", "completions"}
        | {"solution_strs", "predict_strs", "model_outputs"}
    ),
    frozenset({"answer", "ground_truth", "label", "gold", "answers", "ground_truths", "labels", "golds"}),
)
"""Usual parameter names for the prompt, the response and the answer, in the order of megarl's arguments."""

FOREIGN = frozenset({"data_source", "data_sources", "extra_info", "extra_infos", "completion_ids", "reward_inputs"})
"""Parameter names of other trainers for values that megarl passes as columns, if at all."""

UNAVAILABLE = frozenset({"completion_ids", "trainer_state", "log_extra", "log_metric", "environments"})
"""Optional arguments of TRL that megarl does not have."""

_VERL_COLUMNS = {"data_sources": "data_source", "extra_infos": "extra_info"}


def refuse_foreign(name: str, function: Callable[..., Any]) -> None:
    """Raise a UserError with a wrapper if the parameter names show that megarl's positional arguments (prompt, response,
    answer) would be passed to the wrong parameters. name: `path/to/file.py:function`."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a compiled function
        return
    named = [p for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if not _is_misplaced([p.name for p in named[: len(SINGLE)]]):
        return
    file, _, function_name = name.rpartition(":")
    lines = _wrapper(function_name, named, any(p.kind is p.VAR_KEYWORD for p in parameters.values()))
    raise UserError(
        "\n".join(
            (
                f"rewards.functions: {name} has the signature of another trainer, {inspect.signature(function)}, but "
                f"megarl passes ({', '.join(SINGLE)}) in this order. Fix: add these lines to {PurePath(file).name}, "
                f"and use {file}:{WRAPPER}",
                *(f"    {line}" for line in lines),
            )
        )
    )


def _is_misplaced(names: Collection[str]) -> bool:
    """Return whether one of the first parameters is not for the value that megarl passes at its position."""
    roles = [next((role for role, usual in enumerate(ROLES) if name in usual), None) for name in names]
    return any(name in FOREIGN or role not in (None, i) for i, (name, role) in enumerate(zip(names, roles, strict=True)))


def _wrapper(function: str, parameters: list[inspect.Parameter], takes_all_columns: bool) -> tuple[str, str, str]:
    """Return three lines that call the function with megarl's arguments."""
    plural = any(p.name in ROLES[1] and p.name.endswith("s") for p in parameters)
    arguments = BATCH if plural else SINGLE
    columns: list[str] = []
    passed: list[str] = []
    for parameter in parameters:
        role = next((role for role, usual in enumerate(ROLES) if parameter.name in usual), None)
        column = _VERL_COLUMNS.get(parameter.name, parameter.name)
        # TRL's answers are columns, which a parameter names. verl's ground truth is data.answer_column.
        if role == 2 and not parameter.name.startswith("ground_truth") and plural and not parameter.name.endswith("s"):
            role = None
        if role is not None:
            passed.append(f"{parameter.name}={arguments[role]}")
        elif parameter.default is parameter.empty or column in ("data_source", "extra_info"):
            if parameter.name not in UNAVAILABLE:
                default = "" if parameter.default is parameter.empty else "=None"
                columns.append(f"{column}{default}")
                passed.append(f"{parameter.name}={column}")
    columns.sort(key=lambda column: column.endswith("=None"))
    call = f"{function}({', '.join([*passed, *(['**columns'] if takes_all_columns else [])])})"
    signature = f"def {WRAPPER}({', '.join([*arguments, *columns, *(['row'] if takes_all_columns else [])])}):"
    if takes_all_columns:
        taken = [p.name for p in parameters]
        rows = "[values[key] for values in row]" if plural else "row[key]"
        first = "row[0]" if plural else "row"
        return signature, f"    columns = {{key: {rows} for key in {first} if key not in {taken}}}", f"    return {call}"
    if plural:
        return signature, f"    result = {call}", "    return [r['score'] if isinstance(r, dict) else r for r in result]"
    return signature, f"    result = {call}", "    return result['score'] if isinstance(result, dict) else result"
