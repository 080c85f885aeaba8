"""Environments by the names that a config gives them."""

from __future__ import annotations

import difflib
import importlib
import inspect
import types
from collections.abc import Callable, Collection, Mapping
from typing import Any

from megarl.core.errors import UserError
from megarl.core.user_file import defined_in_file
from megarl.environments.agent import Agent
from megarl.environments.protocol import Environment
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
"""The classes that megarl brings. Each is imported when it is asked for: some need a library of their own."""

CLASS, OPTIONS = "environment.class", "environment.options"
SANDBOX = "sandbox"
"""The parameter of a class that gets the provider of sandboxes, and no option."""

METHODS = {"reset": ("task",), "step": ("turn",)}
AGENT_METHODS = {"run": ("task", "base_url", "api_key", "model")}
"""What the methods of the protocols that a user's class may have take."""


def is_agent(kind: type) -> bool:
    """Returns whether a class is an agent, which reaches the policy by HTTP, and no environment."""
    return hasattr(kind, "run") and not hasattr(kind, "step")


def environment_class(name: str) -> type[Environment] | type[Agent]:
    """Returns a class of SHIPPED, or that of `path/to/file.py:Class`; one that is derived from neither Environment nor
    Agent, joined with the one that it is like. Raises UserError if there is none, or it has no step, run or tool."""
    if name in SHIPPED:
        module, _, inner = SHIPPED[name].partition(":")
        return getattr(importlib.import_module(module), inner)
    if ":" in name:
        return _of_file(name)
    if name.endswith(".py"):
        raise UserError(f"{CLASS}: {name} names a file but no class; write {name}:CLASS")
    raise UserError(
        f"{CLASS}: no environment {name!r}; {_hint(name, SHIPPED)}known: {', '.join(SHIPPED)}, or path/to/file.py:CLASS"
    )


def check_environment(name: str, options: Mapping[str, Any]) -> type[Environment] | type[Agent]:
    """Returns the class of this name. Raises UserError for what its rollouts would fail at: options that its
    constructor does not take, methods with other arguments, tools that cannot be described."""
    found = environment_class(name)
    _check_options(name, found, options)
    for method, arguments in (AGENT_METHODS if is_agent(found) else METHODS).items():
        signature = inspect.signature(getattr(found, method))
        try:
            signature.bind(None, *arguments)
        except TypeError as error:
            raise UserError(
                f"{CLASS}: {name}: {method} takes {signature}, {error}; define it as "
                f"{method}({', '.join(('self', *arguments))})"
            ) from None
    for tool, function in tools_of(found).items():
        _check_tool(name, tool, function)
    return found


def _of_file(name: str) -> type[Environment]:
    path, inner, found = defined_in_file(CLASS, name)
    if not inspect.isclass(found):
        raise UserError(f"{CLASS}: {path} has no class {inner!r}; define it as class {inner}(Environment)")
    if not any(hasattr(found, method) for method in ("step", "run")) and not tools_of(found):
        raise UserError(
            f"{CLASS}: {name} has no method `step` that answers a turn, no `run`, and no method marked with "
            "@megarl.environments.tool; give it one of them"
        )
    if issubclass(found, Environment | Agent):
        return found
    base = Agent if is_agent(found) else Environment
    return types.new_class(found.__name__, (found, base), exec_body=lambda body: body.update(_about(found)))


def _about(found: type) -> dict[str, Any]:
    return {"__doc__": found.__doc__, "__module__": found.__module__}


def _check_options(name: str, found: type, options: Mapping[str, Any]) -> None:
    parameters = inspect.signature(found).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    known = {p.name: p for p in parameters if p.kind in kinds and p.name != SANDBOX}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    listed = f"known: {', '.join(known)}" if known else "it takes none"
    for option in options:
        if option not in known and not takes_any:
            raise UserError(f"{OPTIONS}.{option}: {name} has no such option; {_hint(option, known)}{listed}")
    missing = [option for option, p in known.items() if p.default is p.empty and option not in options]
    if missing:
        raise UserError(f"{OPTIONS}.{missing[0]}: {name} cannot do without it; set it ({listed})")


def _check_tool(name: str, tool: str, function: Callable[..., Any]) -> None:
    try:
        described = describe(tool, function)
    except UserError as error:
        raise UserError(f"{CLASS}: {name}: {error}") from None
    except Exception as error:  # annotations are the user's code, and may be anything
        first_line = str(error).partition("\n")[0]
        raise UserError(
            f"{CLASS}: {name}: tool {tool}: its annotations raised {type(error).__name__}: {first_line}; annotate its "
            "arguments with types that JSON has, such as str, list[int]"
        ) from error
    if not described["function"]["description"]:
        raise UserError(f"{CLASS}: {name}: tool {tool} has no docstring; say in it what the tool does, for the model")


def _hint(name: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}? " if close else ""


def wants_sandbox(found: type[Environment]) -> bool:
    """Returns whether the objects of a class get the provider of sandboxes."""
    return SANDBOX in inspect.signature(found).parameters
