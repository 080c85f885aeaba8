"""Tools: methods of an environment that the policy may call, by name and with arguments of declared types."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from megarl.core.errors import UserError
from megarl.data.tool_calls import MalformedCall, ToolCall

Message = Mapping[str, Any]
"""A message of a conversation, as chat templates take it: its role, its content, and for a tool's answer the name of
the tool."""

Status = Literal["ok", "malformed", "unknown_tool", "bad_arguments", "raised", "timed_out"]
"""The end of a call of a tool. All but the first are answers to the model that begin with "error:"."""

F = TypeVar("F", bound=Callable[..., Any])

_MARK = "_is_tool_of_megarl"
_ARGUMENT = re.compile(r"^\s*(?P<name>\w+)\s*(\([^)]*\))?(:|\s{2,})\s*(?P<text>\S.*)$")
_HEADING = re.compile(r"^\s*(Args|Arguments|Parameters|Returns|Raises):\s*$")


def tool(method: F) -> F:
    """Mark a method as a tool, whose description for the model is made of its annotations and its docstring."""
    setattr(method, _MARK, True)
    return method


def tools_of(environment: type) -> dict[str, Callable[..., Any]]:
    """Return the methods of a class that are tools, by name."""
    return {name: method for name, method in inspect.getmembers(environment, callable) if hasattr(method, _MARK)}


def describe(name: str, method: Callable[..., Any]) -> dict[str, Any]:
    """Return the description of a tool, as chat templates and the OpenAI API take it: a JSON schema of its arguments,
    from its annotations and from the lines `argument: text` of its docstring, and the rest of the docstring."""
    about, texts = _read_docstring(inspect.getdoc(method) or "", _parameters(method))
    schema = arguments_model(name, method).model_json_schema()
    schema.pop("title", None)
    for argument, properties in schema["properties"].items():
        properties.pop("title", None)
        if argument in texts:
            properties["description"] = texts[argument]
    return {"type": "function", "function": {"name": name, "description": about, "parameters": schema}}


def arguments_model(name: str, method: Callable[..., Any]) -> type[BaseModel]:
    """Return the model that checks a tool's arguments. Raises UserError for an argument without an annotation."""
    hints, fields = get_type_hints(method), {}
    for argument, parameter in _parameters(method).items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise UserError(
                f"tool {name}: {parameter} has no name that a model could give; list its arguments one by one"
            )
        if argument not in hints:
            raise UserError(
                f"tool {name}: its argument {argument} has no annotation; say its type, such as {argument}: str"
            )
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[argument] = (hints[argument], default)
    return create_model(f"arguments of {name}", __config__=ConfigDict(extra="forbid"), **fields)


def _parameters(method: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    parameters = dict(inspect.signature(method).parameters)
    parameters.pop("self", None)
    return parameters


def _read_docstring(text: str, names: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """Return what a docstring says of the tool, and what of its arguments."""
    about, texts, latest = [], {}, None
    for line in text.splitlines():
        found = _ARGUMENT.match(line)
        if found is not None and found["name"] in names:
            latest = found["name"]
            texts[latest] = found["text"].strip()
        elif latest is not None and line.strip() and line.startswith(" "):
            texts[latest] += f" {line.strip()}"
        elif not _HEADING.match(line):
            latest = None
            about.append(line)
    return "\n".join(about).strip(), texts


class Toolbox:
    """The tools of one environment, and how many calls of them ended in which way."""

    def __init__(self, environment: Any, timeout_s: float = 30.0):
        """timeout_s: the wall-clock time of a call."""
        self._methods = {name: getattr(environment, name) for name in tools_of(type(environment))}
        self._arguments = {name: arguments_model(name, method) for name, method in self._methods.items()}
        self.timeout_s = timeout_s
        self.counts: Counter[Status] = Counter()
        self.has_hung_thread = False
        """Whether a tool that is no coroutine did not return in time: its thread cannot be ended."""

    @property
    def descriptions(self) -> list[dict[str, Any]]:
        return [describe(name, method) for name, method in self._methods.items()]

    async def call_all(self, calls: Sequence[ToolCall | MalformedCall]) -> list[Message]:
        """Call the tools, one after the other. Return a message with each answer. A call that goes wrong is answered
        with what was wrong with it, for the model to read."""
        return [await self._message(call) for call in calls]

    async def _message(self, call: ToolCall | MalformedCall) -> Message:
        name = call.name if isinstance(call, ToolCall) else "unknown"
        status, content = await self.call(call)
        self.counts[status] += 1
        message = {"role": "tool", "name": name, "content": content if status == "ok" else f"error: {content}"}
        return message | ({"tool_call_id": call.id} if isinstance(call, ToolCall) and call.id else {})

    async def call(self, call: ToolCall | MalformedCall) -> tuple[Status, str]:
        """Return how a call ended, and what it gives or what is wrong with it."""
        if isinstance(call, MalformedCall):
            return "malformed", f"this is no call of a tool: {call.reason}"
        if call.name not in self._methods:
            return "unknown_tool", f"there is no tool {call.name!r}; the tools are {', '.join(self._methods)}"
        try:
            arguments = self._arguments[call.name].model_validate(dict(call.arguments))
        except ValidationError as error:
            return "bad_arguments", f"arguments of {call.name}: {_problems(error)}"
        values = {name: getattr(arguments, name) for name in type(arguments).model_fields}
        method = self._methods[call.name]
        try:
            return "ok", _text(await asyncio.wait_for(run(method, **values), self.timeout_s))
        except TimeoutError:
            self.has_hung_thread |= not inspect.iscoroutinefunction(method)
            return "timed_out", f"{call.name} did not return within {self.timeout_s:g} s"
        except Exception as error:  # a tool may raise anything, and the model is told
            return "raised", f"{call.name} raised {type(error).__name__}: {error}"


async def run(method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Return what a method returns: one that is no coroutine runs in a thread of its own."""
    if inspect.iscoroutinefunction(method):
        return await method(*arguments, **named)
    return await asyncio.to_thread(method, *arguments, **named)


def _problems(error: ValidationError) -> str:
    return "; ".join(f"{'.'.join(map(str, found['loc'])) or 'it'}: {found['msg']}" for found in error.errors())


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
