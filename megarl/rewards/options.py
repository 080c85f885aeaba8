"""Options of reward functions: the keyword arguments that an entry of rewards.functions gives its function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from megarl.core.errors import UserError

NO_OPTIONS: Mapping[str, Any] = {}

SINGLE, BATCH = ("prompt", "response", "answer"), ("prompts", "responses", "answers")
"""The names of a function's first arguments, which are no options: those of one sample, or lists of them."""

NUM_ARGUMENTS = len(SINGLE)

NUM_TOKENS = "num_response_tokens"
"""The name of a parameter that gets the number of the response's tokens, in place of a column of the data."""


class WithOptions:
    """A function with its options, which are no parameters of it any more."""

    def __init__(self, function: Callable[..., Any], options: Mapping[str, Any]):
        self._function, self._options = function, dict(options)
        signature = inspect.signature(function)
        remaining = [p for p in signature.parameters.values() if p.name not in options]
        self.__signature__ = signature.replace(parameters=remaining)

    def __call__(self, *arguments: Any, **columns: Any) -> Any:
        return self._function(*arguments, **columns, **self._options)


def give_options(name: str, function: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Returns a user's function with these options. Those that it is not given stay parameters, which ask for columns
    of the data. Raises UserError for an option that it does not have."""
    if not options:
        return function
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        raise UserError(
            f"rewards.functions: {name} is compiled and does not tell its parameters; drop options"
        ) from None
    _require_known(name, [p for p in parameters[NUM_ARGUMENTS:] if p.kind is not p.VAR_POSITIONAL], options)
    return WithOptions(function, options)


def configure(name: str, function: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Returns one of megarl's own functions with these options: a class is made with them, once; of a function, a
    parameter with a default is an option only, and never a column of the data.

    Raises UserError for an option that it does not have, one that it needs and is not given, and a value that it
    refuses.
    """
    parameters = list(inspect.signature(function).parameters.values())
    if not inspect.isclass(function):
        known = parameters[NUM_ARGUMENTS:]
        _require_known(name, known, options)
        defaults = {p.name: p.default for p in known if p.default is not p.empty}
        return WithOptions(function, {**defaults, **options}) if known else function
    _require_known(name, parameters, options)
    missing = [p.name for p in parameters if p.default is p.empty and p.name not in options]
    if missing:
        raise UserError(f"rewards.functions: {name} needs options: {{{missing[0]}: …}}")
    try:
        return function(**options)
    except UserError:
        raise
    except (TypeError, ValueError) as error:
        raise UserError(f"rewards.functions: {name}: {error}") from None
    except ImportError as error:
        raise UserError(
            f"rewards.functions: {name} needs the package {error.name}; install it: pip install 'megarl[rewards]'"
        ) from None


def _require_known(name: str, known: list[inspect.Parameter], options: Mapping[str, Any]) -> None:
    if any(p.kind is p.VAR_KEYWORD for p in known):
        return
    names = [p.name for p in known if p.kind is not p.POSITIONAL_ONLY]
    unknown = next((option for option in options if option not in names), None)
    if unknown is not None:
        raise UserError(f"rewards.functions: {name} has no option {unknown!r}; known: {', '.join(names) or 'none'}")
