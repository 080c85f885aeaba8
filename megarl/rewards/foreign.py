"""Reject reward functions with another trainer's signature. The error contains a wrapper.

They are not adapted automatically: which column contains the prompt or the reference answer cannot be inferred from a
signature, and a wrong guess would train on wrong rewards.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import PurePath
from typing import Any

from megarl.core.errors import UserError
from megarl.rewards.options import BATCH, NUM_TOKENS, SINGLE

RESPONSES = ("response", "completion", "solution_str", "predict_str", "model_output")
PLURAL_RESPONSES = tuple(f"{name}s" for name in RESPONSES)
ROLES = (
    frozenset({"prompt", "question", "query", "prompts", "questions", "queries"}),
    frozenset({*RESPONSES, *PLURAL_RESPONSES}),
    frozenset({"answer", "ground_truth", "label", "gold", "answers", "ground_truths", "labels", "golds"}),
)
"""Common parameter names for the prompt, the response and the answer, in the order of megarl's arguments."""

COLUMNS = {
    "data_source": "data_source",
    "data_sources": "data_source",
    "extra_info": "extra_info",
    "extra_infos": "extra_info",
}
"""verl's parameter -> the data column that it receives."""

COMPLETIONS, TOKEN_IDS = TRL = ("completions", "completion_ids")
"""Parameters that identify a function for TRL. Its remaining parameters name columns."""

UNAVAILABLE = frozenset({TOKEN_IDS, "trainer_state", "log_extra", "log_metric", "environments"})
"""Arguments that TRL passes to reward functions and megarl does not."""


def refuse_foreign(name: str, function: Callable[..., Any]) -> None:
    """Raise a UserError with a wrapper if the parameter names show that megarl's positional arguments (prompt,
    response, answer) do not match the parameters. name: `path/to/file.py:function`."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a compiled function
        return
    parameters = list(signature.parameters.values())
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if not _is_foreign([p.name for p in named]):
        return
    file, _, function_name = name.rpartition(":")
    new_name = f"megarl_{function_name}"
    if any(parameter.name in TRL for parameter in named):
        _require_available(name, function_name, signature)
        lines = _trl_wrapper(new_name, function_name, named, any(p.kind is p.VAR_KEYWORD for p in parameters))
    else:
        lines = _wrapper(new_name, function_name, named)
    if inspect.iscoroutinefunction(function):
        lines = (
            f"async {lines[0]}",
            *(line.replace(f" {function_name}(", f" await {function_name}(") for line in lines[1:]),
        )
    wrapper = "\n".join(f"    {line}" for line in lines)
    raise UserError(
        f"rewards.functions: {name} has another trainer's signature {signature}, but megarl passes "
        f"({', '.join(SINGLE)}). Fix: add this wrapper to {PurePath(file).name}, and use {file}:{new_name}\n{wrapper}"
    )


def _require_available(name: str, function: str, signature: inspect.Signature) -> None:
    """Raise a UserError if a function for TRL requires arguments that megarl does not have."""
    missing = [p.name for p in signature.parameters.values() if p.name in UNAVAILABLE and p.default is p.empty]
    if not missing:
        return
    remedy = f"remove {' and '.join(missing)} from {function}"
    if TOKEN_IDS in missing:
        remedy = (
            f"define {function}({', '.join(BATCH)}, {NUM_TOKENS}), which receives each response's text and its "
            "number of tokens, and use these instead"
        )
    explanation = " (the token ids of responses)" if TOKEN_IDS in missing else ""
    raise UserError(
        f"rewards.functions: {name} has another trainer's signature {signature} and requires arguments that megarl "
        f"cannot pass: {', '.join(missing)}{explanation}. Fix: {remedy}"
    )


def _is_foreign(names: Sequence[str]) -> bool:
    """Return whether the parameters are TRL's, or the name of one of the first three contradicts the value that megarl
    passes at its position. A response may also be named `answer`."""
    if any(name in TRL for name in names):
        return True
    for i, name in enumerate(names[: len(SINGLE)]):
        roles = [role for role, usual in enumerate(ROLES) if name in usual]
        if name in COLUMNS or (roles and i not in roles and not (i == 1 and name in ("answer", "answers"))):
            return True
    return False


def _wrapper(name: str, function: str, parameters: Sequence[inspect.Parameter]) -> tuple[str, ...]:
    """Return a wrapper that passes megarl's arguments, and data columns for all other required parameters."""
    names = [parameter.name for parameter in parameters]
    plural = any(name in PLURAL_RESPONSES or name == "queries" for name in names)
    arguments = BATCH if plural else SINGLE
    required: list[str] = []
    optional: list[str] = []
    passed: list[str] = []
    for parameter in parameters:
        argument = parameter.name
        column = COLUMNS.get(argument, argument)
        value = next((arguments[role] for role, usual in enumerate(ROLES) if argument in usual), None)
        if argument == "queries" and "prompts" in names:  # OpenRLHF's queries contain the responses
            value = "[p + r for p, r in zip(prompts, responses)]"
        if value is None:
            if parameter.default is parameter.empty:
                required.append(column)
            elif argument in COLUMNS:
                optional.append(f"{column}=None")
            else:
                continue
            value = column
        passed.append(value if parameter.kind is parameter.POSITIONAL_ONLY else f"{argument}={value}")
    signature = ", ".join([*arguments, *required, *optional])
    score = "['score'] if isinstance({0}, dict) else {0}"
    result = f"[r{score.format('r')} for r in result]" if plural else f"result{score.format('result')}"
    return f"def {name}({signature}):", f"    result = {function}({', '.join(passed)})", f"    return {result}"


def _trl_wrapper(
    name: str, function: str, parameters: Sequence[inspect.Parameter], takes_all_columns: bool
) -> tuple[str, ...]:
    """Return a wrapper that passes the arguments that TRL passes: prompts as they are in the data, completions as
    messages if the prompts are messages, and data columns for all other parameters."""
    given = {"prompts": "prompts", COMPLETIONS: "completions"}
    others = [p.name for p in parameters if p.name not in {*given, *UNAVAILABLE} and p.default is p.empty]
    columns = [other for other in others if other == NUM_TOKENS or not takes_all_columns]
    head = (
        f"def {name}({', '.join((*BATCH, *columns, 'row'))}):",
        "    prompts = [values.get('prompt', prompt) for values, prompt in zip(row, prompts)]",
        "    messages = [[{'role': 'assistant', 'content': response}] for response in responses]",
        "    completions = [r if isinstance(p, str) else m for p, r, m in zip(prompts, responses, messages)]",
    )
    if takes_all_columns:
        values = ", ".join(f"'{key}': {key}" for key in (*given, *columns))
        return (
            *head,
            "    columns = {key: [values[key] for values in row] for key in row[0] if key != 'prompt'}",
            f"    return {function}(**{{**columns, {values}}})",
        )
    passed = [f"{p.name}={given.get(p.name, p.name)}" for p in parameters if p.name in {*given, *columns}]
    return *head, f"    return {function}({', '.join(passed)})"
