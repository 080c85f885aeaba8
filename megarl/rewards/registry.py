"""Reward functions by the names that a config gives them."""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from megarl.core.errors import UserError
from megarl.rewards.choice import choice_match
from megarl.rewards.code import code_stdin_stdout, code_tests
from megarl.rewards.exact import exact_match
from megarl.rewards.knights_knaves import knights_knaves
from megarl.rewards.length import CosineLength, SoftOverlong, length_penalty
from megarl.rewards.math_answer import MathMatch
from megarl.rewards.numeric import numeric_match
from megarl.rewards.options import BATCH, NO_OPTIONS, SINGLE, configure, give_options
from megarl.rewards.reasoning import ReasoningGym
from megarl.rewards.regex_answer import RegexMatch
from megarl.rewards.remote_judge import GenerativeJudge
from megarl.rewards.think_answer import think_answer_format

RewardFunction = Callable[..., Any]
"""A function f(prompt, response, answer) that returns a finite number or a bool, or with per_turn a list of them, one
for each turn, and raises where it cannot tell. A further parameter gets the column of the data's row that has its name,
and `row` all columns; one called `sandbox` gets the provider of the run's sandboxes (megarl.sandbox.provider).

A function f(prompts, responses, answers) takes lists instead, of all samples of a scoring pass, also of the columns,
and returns a list with one such result for each sample."""

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "exact_match": exact_match,
    "numeric_match": numeric_match,
    "choice_match": choice_match,
    "regex_match": RegexMatch,
    "math_match": MathMatch,
    "think_answer_format": think_answer_format,
    "knights_knaves": knights_knaves,
    "reasoning_gym": ReasoningGym,
    "code_tests": code_tests,
    "code_stdin_stdout": code_stdin_stdout,
    "length_penalty": length_penalty,
    "soft_overlong": SoftOverlong,
    "cosine_length": CosineLength,
    "generative_judge": GenerativeJudge,
}
"""megarl's own functions, and classes of them, which are made with their options."""


def resolve(name: str, options: Mapping[str, Any] = NO_OPTIONS) -> RewardFunction:
    """Returns a function of FUNCTIONS, or `path/to/file.py:function`, with its options. Raises UserError if there is
    none, or it does not have them."""
    if name in FUNCTIONS:
        if FUNCTIONS[name] is CosineLength and "verifier" in options:
            options = {**options, "verifier": _verifier(name, options["verifier"])}
        return configure(name, FUNCTIONS[name], options)
    if ":" in name:
        function = from_file("rewards.functions", name, SINGLE)
        if _first_parameters(function)[:1] == BATCH[:1] and not takes_batches(function):
            raise UserError(
                f"rewards.functions: {name} takes {_signature(function)}; a function of whole batches takes "
                f"({', '.join(BATCH)}), by these names, and one of single samples ({', '.join(SINGLE)})"
            )
        return give_options(name, function, options)
    if name.endswith(".py"):
        raise UserError(f"rewards.functions: {name} names a file but no function; write {name}:FUNCTION")
    close = difflib.get_close_matches(name, FUNCTIONS, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    raise UserError(
        f"rewards.functions: no function {name!r}; {hint}known: {', '.join(FUNCTIONS)}, or path/to/file.py:function"
    )


def _verifier(name: str, verifier: Any) -> RewardFunction:
    """Returns the function that the option `verifier` names, or {function, options}."""
    given = {"function": verifier} if isinstance(verifier, str) else dict(verifier)
    if "function" not in given or given.keys() - {"function", "options"}:
        raise UserError(
            f"rewards.functions: {name}: options.verifier={verifier!r} is neither a function nor {{function, options}}"
        )
    function = resolve(given["function"], given.get("options", {}))
    if takes_batches(function):
        raise UserError(
            f"rewards.functions: {name}: options.verifier={verifier!r} takes ({', '.join(BATCH)}); give one of single "
            "samples"
        )
    return function


def from_file(key: str, name: str, arguments: Sequence[str]) -> Callable[..., float | bool]:
    """Returns the function of `path/to/file.py:function`, which a key of the config names. Raises UserError if there
    is none, or it cannot be called with these arguments."""
    path, function, found = defined_in_file(key, name)
    definition = f"define it as {function}({', '.join(arguments)})"
    if not callable(found):
        raise UserError(f"{key}: {path} has no function {function!r}; {definition}")
    if (signature := _signature(found)) is not None:
        try:
            columns = asked_columns(found, len(arguments))
            signature.bind(*arguments, **{name: None for name, required in columns.items() if required})
        except TypeError as error:
            raise UserError(f"{key}: {name} takes {signature}, {error}; {definition}") from None
    return found


def defined_in_file(key: str, name: str) -> tuple[Path, str, Any]:
    """Returns the file of `path/to/file.py:name`, the name, and what the file defines by it, or None. Raises UserError
    if there is no such file, or it cannot be imported."""
    file, _, inner = name.rpartition(":")
    path = Path(file).expanduser()
    if path.suffix != ".py" or not path.is_file():
        raise UserError(f"{key}: {path} is not a Python file; check the path (now in {Path.cwd()})")
    return path, inner, getattr(_load(key, path), inner, None)


def takes_batches(function: Callable[..., Any]) -> bool:
    """Returns whether a reward function takes whole batches, which the names of its first parameters say."""
    return _first_parameters(function) == BATCH


def _first_parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    signature = _signature(function)
    return () if signature is None else tuple(signature.parameters)[: len(BATCH)]


def asked_columns(function: Callable[..., Any], num_arguments: int) -> dict[str, bool]:
    """Returns the names of a function's parameters after its first ones, each with whether it has no default."""
    signature = _signature(function)
    parameters = [] if signature is None else list(signature.parameters.values())
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    further = {p.name: p.default is p.empty for p in positional[num_arguments:] if p.kind is not p.POSITIONAL_ONLY}
    return further | {p.name: p.default is p.empty for p in parameters if p.kind is p.KEYWORD_ONLY}


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    """Returns the function's signature, None for one that is compiled and does not tell it."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def _load(key: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"file of {key} {path.resolve()}", path)
    assert spec is not None and spec.loader is not None, f"{path} has a loader by its suffix"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the user's code may raise anything
        raise UserError(f"{key}: importing {path} raised {type(error).__name__}: {error}; fix the file") from error
    return module
