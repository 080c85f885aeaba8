"""Looks up environment classes by config name."""

from __future__ import annotations

import difflib
import importlib
import inspect
import types
from collections.abc import Callable, Collection, Mapping
from typing import Any

from megarl.core.errors import UserError
from megarl.core.user_file import defined_in_file
from megarl.environments.protocol import Agent, Environment
from megarl.environments.tools import describe, tools_of

SHIPPED = {
    "calculator": "megarl.environments.shipped.calculator:CalculatorEnvironment",
    "search": "megarl.environments.shipped.search:SearchEnvironment",
    "search_tool": "megarl.environments.shipped.search:SearchToolEnvironment",
    "text_game": "megarl.environments.shipped.text_game:TextGameEnvironment",
    "openenv": "megarl.environments.shipped.openenv:OpenEnvEnvironment",
    "code": "megarl.environments.shipped.code:CodeEnvironment",
    "verifiers": "megarl.environments.sessions.verifiers_agent:VerifiersAgent",
}
"""Built-in classes, keyed by config name. They are imported on demand, because some need optional libraries."""

CLASS, OPTIONS = "environment.class", "environment.options"
SANDBOX = "sandbox"
"""Constructor parameter that receives the sandbox provider. It is not one of environment.options."""

METHODS = {"reset": ("task",), "step": ("turn",)}
AGENT_METHODS = {"run": ("task", "base_url", "api_key", "model")}
"""Arguments of the methods that a user class may define."""


def is_agent(kind: type) -> bool:
    """Return whether the class is an agent rather than an environment."""
    return hasattr(kind, "run") and not hasattr(kind, "step")


def environment_class(name: str) -> type[Environment] | type[Agent]:
    """Return the class in SHIPPED or in `path/to/file.py:Class`, combined with Environment or Agent if it inherits from
    neither. Raise UserError if it does not exist or has no step, run or tool."""
    if name in SHIPPED:
        module, _, class_name = SHIPPED[name].partition(":")
        return getattr(importlib.import_module(module), class_name)
    if ":" in name:
        return _class_from_file(name)
    if name.endswith(".py"):
        raise UserError(f"{CLASS}={name}: the value names a file but no class. Fix: set {CLASS}={name}:CLASS")
    raise UserError(
        f"{CLASS}={name}: unknown environment. {_hint(name, SHIPPED)}Fix: use one of {', '.join(SHIPPED)}, or "
        "path/to/file.py:CLASS"
    )


def answer_check(name: str | None) -> Callable[[Any], object] | None:
    """Return the function with which a built-in class checks answers, or None. The function raises ValueError for an
    answer that the class cannot compare with responses."""
    return None if name is None or name not in SHIPPED else getattr(environment_class(name), "check_answer", None)


def check_environment(name: str, options: Mapping[str, Any]) -> type[Environment] | type[Agent]:
    """Return the class with this name after checking for errors that would make rollouts fail. Raise UserError for
    options that the constructor does not accept, incorrect method signatures, and tools that cannot be described."""
    kind = environment_class(name)
    _check_options(name, kind, options)
    for method, arguments in (AGENT_METHODS if is_agent(kind) else METHODS).items():
        signature = inspect.signature(getattr(kind, method))
        try:
            signature.bind(None, *arguments)
        except TypeError as error:
            raise UserError(
                f"{CLASS}={name}: {method} takes {signature}: {error}. Fix: define it as "
                f"{method}({', '.join(('self', *arguments))})"
            ) from None
    for tool, function in tools_of(kind).items():
        _check_tool(name, tool, function)
    return kind


def _class_from_file(name: str) -> type[Environment] | type[Agent]:
    path, class_name, kind = defined_in_file(CLASS, name)
    if not inspect.isclass(kind):
        raise UserError(
            f"{CLASS}={name}: {path} has no class {class_name!r}. Fix: define it as class {class_name}(Environment)"
        )
    if not any(hasattr(kind, method) for method in ("step", "run")) and not tools_of(kind):
        raise UserError(
            f"{CLASS}={name}: the class has no method `step`, no method `run`, and no method decorated with "
            "@megarl.environments.tool. Fix: add one of them"
        )
    if issubclass(kind, Environment | Agent):
        return kind
    base = Agent if is_agent(kind) else Environment
    attributes = {"__doc__": kind.__doc__, "__module__": kind.__module__}
    return types.new_class(kind.__name__, (kind, base), exec_body=lambda body: body.update(attributes))


def _check_options(name: str, kind: type, options: Mapping[str, Any]) -> None:
    parameters = inspect.signature(kind).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    known = {p.name: p for p in parameters if p.kind in kinds and p.name != SANDBOX}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    remedy = f"use one of {', '.join(known)}" if known else "remove it, because the environment takes no options"
    for option in options:
        if option not in known and not takes_any:
            raise UserError(f"{OPTIONS}.{option}: unknown option of {name}. {_hint(option, known)}Fix: {remedy}")
    missing = [option for option, p in known.items() if p.default is p.empty and option not in options]
    if missing:
        raise UserError(f"{OPTIONS}.{missing[0]}: {name} requires this option. Fix: set {OPTIONS}.{missing[0]}")


def _check_tool(name: str, tool: str, function: Callable[..., Any]) -> None:
    try:
        described = describe(tool, function)
    except UserError as error:
        raise UserError(f"{CLASS}={name}: {error}") from None
    except Exception as error:  # annotations are user code and may raise anything
        first_line = str(error).partition("\n")[0]
        raise UserError(
            f"{CLASS}={name}: tool {tool}: its annotations raised {type(error).__name__}: {first_line}. Fix: annotate "
            "its arguments with JSON types, such as str or list[int]"
        ) from error
    if not described["function"]["description"]:
        raise UserError(
            f"{CLASS}={name}: tool {tool} has no docstring. Fix: add one that describes the tool to the model"
        )


def _hint(name: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"Did you mean {close[0]}? " if close else ""


def takes_sandbox(kind: type) -> bool:
    """Return whether the constructor accepts the sandbox provider."""
    return SANDBOX in inspect.signature(kind).parameters
