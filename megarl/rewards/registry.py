"""Reward functions by the names that a config gives them."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megarl.core.errors import UserError
from megarl.core.user_file import defined_in_file
from megarl.rewards.choice import choice_match
from megarl.rewards.code import code_stdin_stdout, code_tests
from megarl.rewards.exact import exact_match
from megarl.rewards.knights_knaves import knights_knaves
from megarl.rewards.length import CosineLength, SoftOverlong, length_penalty
from megarl.rewards.math_answer import MathMatch
from megarl.rewards.numeric import numeric_match
from megarl.rewards.options import NO_OPTIONS, configure, give_options
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

SINGLE, BATCH = ("prompt", "response", "answer"), ("prompts", "responses", "answers")

NUM_TOKENS = "num_response_tokens"
"""The name of a parameter that gets the number of the response's tokens, in place of a column of the data."""

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
