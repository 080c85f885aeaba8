"""Options of reward functions: keyword arguments from the function's entry in rewards.functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from megarl.core.errors import UserError, extra_of, install_extra

NO_OPTIONS: Mapping[str, Any] = {}

SINGLE, BATCH = ("prompt", "response", "answer"), ("prompts", "responses", "answers")
"""Leading parameters of functions that score single samples, and of those that score batches. They are not options."""

NUM_ARGUMENTS = len(SINGLE)

NUM_TOKENS = "num_response_tokens"
"""Name of the parameter that receives the number of response tokens instead of a data column."""

PROMPT_IMAGES = "prompt_images"
"""Parameter that receives the prompt's images (not a data column): a tuple of RGB PIL images in placeholder order."""

PROMPT_IMAGE_FILES = "prompt_image_files"
"""Parameter that receives the same images as encoded files, a tuple of bytes."""

PROVIDED = (NUM_TOKENS, PROMPT_IMAGES, PROMPT_IMAGE_FILES)
"""Names of parameters whose values come from the run instead of the data."""

CHECK_ROW = "check_row"
"""Name of the attribute of a built-in function, or of the method of a built-in class, that checks a data row before the
run starts. It is called as f(answer), and raises ValueError if the reward function would fail on every response to the
row. Each additional parameter receives the data column with the same name."""

Function = TypeVar("Function", bound=Callable[..., Any])


def checks_rows(check: Callable[..., object]) -> Callable[[Function], Function]:
    """Return a decorator that attaches a check for data rows to a built-in function."""

    def attach(function: Function) -> Function:
        setattr(function, CHECK_ROW, check)
        return function

    return attach


class WithOptions:
    """A function with its options bound and removed from its signature."""

    def __init__(self, function: Callable[..., Any], options: Mapping[str, Any]):
        self._function, self._options = function, dict(options)
        self.check_row = getattr(function, CHECK_ROW, None)
        signature = inspect.signature(function)
        remaining = [p for p in signature.parameters.values() if p.name not in options]
        self.__signature__ = signature.replace(parameters=remaining)

    def __call__(self, *arguments: Any, **columns: Any) -> Any:
        return self._function(*arguments, **columns, **self._options)


def give_options(name: str, function: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Bind options to a user's function; its other parameters name columns. Raise UserError for unknown options."""
    if not options:
        return function
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        raise UserError(
            f"rewards.functions: {name} is a compiled function without a signature. Fix: remove its options"
        ) from None
    _require_known(name, [p for p in parameters[NUM_ARGUMENTS:] if p.kind is not p.VAR_POSITIONAL], options)
    return WithOptions(function, options)


def configure(name: str, function: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Bind options to a built-in function, or instantiate a built-in class with them. A function's parameters with
    defaults are options, never data columns, unless they are keyword-only. Raise UserError if an option is unknown,
    missing or invalid."""
    parameters, is_class = list(inspect.signature(function).parameters.values()), inspect.isclass(function)
    if not is_class:
        known = [p for p in parameters[NUM_ARGUMENTS:] if p.kind is not p.KEYWORD_ONLY]
        _require_known(name, known, options)
        defaults = {p.name: p.default for p in known if p.default is not p.empty}
        return WithOptions(function, {**defaults, **options}) if known else function
    _require_known(name, parameters, options)
    missing = [p.name for p in parameters if p.default is p.empty and p.name not in options]
    if missing:
        raise UserError(
            f"rewards.functions: {name} requires the option {missing[0]}. Fix: add options: {{{missing[0]}: …}}"
        )
    try:
        return function(**options)
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"rewards.functions: {name}: {error}") from None
    except TypeError as error:
        raise UserError(f"rewards.functions: {name}: {error}. Fix: use option values of the documented types") from None
    except ImportError as error:
        raise UserError(
            f"rewards.functions: {name} requires the package {error.name}. Fix: "
            f"{install_extra(extra_of(error.name or '') or 'rewards')}"
        ) from None


def _require_known(name: str, known: list[inspect.Parameter], options: Mapping[str, Any]) -> None:
    if any(p.kind is p.VAR_KEYWORD for p in known):
        return
    names = [p.name for p in known if p.kind is not p.POSITIONAL_ONLY]
    unknown = next((option for option in options if option not in names), None)
    if unknown is not None:
        remedy = f"use one of its options: {', '.join(names)}" if names else "remove its options"
        raise UserError(f"rewards.functions: {name} has no option {unknown!r}. Fix: {remedy}")
