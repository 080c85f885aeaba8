"""Tools: environment methods that the policy may call by name, with typed arguments."""

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
from megarl.data.image_parts import images_in
from megarl.data.tool_calls import MalformedCall, ToolCall
from megarl.environments.sent_images import FORMS, is_pillow_image
from megarl.usercode.failures import ProcessLost, ServiceUnavailable

Message = Mapping[str, Any]
"""A chat message in the chat template format: role, content, and the tool's name in a tool message. With images, the
content is a list of parts: {"type": "text", "text": …} and {"type": "image", "image": …}, where the image is a Pillow
image, the bytes of an encoded image, or a data: URL. {"type": "image_url", "image_url": {"url": "data:…"}} is also
accepted."""

Status = Literal["ok", "malformed", "unknown_tool", "bad_arguments", "raised", "timed_out"]
"""Outcome of a tool call. For all but "ok", the model receives a message that starts with "error:"."""

F = TypeVar("F", bound=Callable[..., Any])

_MARK = "_is_tool_of_megarl"
_ARGUMENT = re.compile(r"^\s*(?P<name>\w+)\s*(\([^)]*\))?(:|\s{2,})\s*(?P<text>\S.*)$")
_HEADING = re.compile(r"^\s*(Args|Arguments|Parameters|Returns|Raises):\s*$")


def tool(method: F) -> F:
    """Mark a method as a tool. Its annotations and docstring become the tool's description for the model."""
    setattr(method, _MARK, True)
    return method


def tools_of(environment: type) -> dict[str, Callable[..., Any]]:
    """Return the tool methods of a class, keyed by name."""
    return {name: method for name, method in inspect.getmembers(environment, callable) if hasattr(method, _MARK)}


def describe(name: str, method: Callable[..., Any]) -> dict[str, Any]:
    """Return a tool's description in the format that the OpenAI API and chat templates share. The JSON schema for the
    arguments comes from the annotations and from docstring lines of the form `argument: text`. The rest of the
    docstring is the description."""
    description, texts = _parse_docstring(inspect.getdoc(method) or "", _parameters(method))
    schema = arguments_model(name, method).model_json_schema()
    schema.pop("title", None)
    for argument, properties in schema["properties"].items():
        properties.pop("title", None)
        if argument in texts:
            properties["description"] = texts[argument]
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def arguments_model(name: str, method: Callable[..., Any]) -> type[BaseModel]:
    """Return the pydantic model that validates a tool's arguments. Raise UserError for an argument that has no
    annotation or is variadic."""
    hints, fields = get_type_hints(method), {}
    for argument, parameter in _parameters(method).items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise UserError(f"tool {name}: a model cannot pass {parameter}. Fix: declare each argument by name")
        if argument not in hints:
            raise UserError(
                f"tool {name}: argument {argument} has no annotation. Fix: declare its type, such as {argument}: str"
            )
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[argument] = (hints[argument], default)
    return create_model(f"arguments of {name}", __config__=ConfigDict(extra="forbid"), **fields)


def _parameters(method: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    parameters = dict(inspect.signature(method).parameters)
    parameters.pop("self", None)
    return parameters


def _parse_docstring(text: str, names: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """Split a docstring into the tool's description and its argument descriptions."""
    description, texts, argument = [], {}, None
    for line in text.splitlines():
        match = _ARGUMENT.match(line)
        if match is not None and match["name"] in names:
            argument = match["name"]
            texts[argument] = match["text"].strip()
        elif argument is not None and line.strip() and line.startswith(" "):
            texts[argument] += f" {line.strip()}"
        elif not _HEADING.match(line):
            argument = None
            description.append(line)
    return "\n".join(description).strip(), texts


class Toolbox:
    """The tools of one environment instance, with the number of calls per status."""

    def __init__(self, environment: Any, timeout_s: float = 30.0):
        """`timeout_s` is the wall-clock limit for one call, in seconds."""
        self._methods = {name: getattr(environment, name) for name in tools_of(type(environment))}
        self._arguments = {name: arguments_model(name, method) for name, method in self._methods.items()}
        self.timeout_s = timeout_s
        self.counts: Counter[Status] = Counter()
        self.has_hung_thread = False
        """Whether a synchronous tool timed out. Its thread cannot be stopped."""

    async def call_all(self, calls: Sequence[ToolCall | MalformedCall]) -> list[Message]:
        """Run the calls sequentially. Return one message per call, with its result or its error."""
        return [await self._message(call) for call in calls]

    async def _message(self, call: ToolCall | MalformedCall) -> Message:
        name = call.name if isinstance(call, ToolCall) else "unknown"
        status, content = await self.call(call)
        self.counts[status] += 1
        message = {"role": "tool", "name": name, "content": content if status == "ok" else f"error: {content}"}
        return message | ({"tool_call_id": call.id} if isinstance(call, ToolCall) and call.id else {})

    async def call(self, call: ToolCall | MalformedCall) -> tuple[Status, Any]:
        """Run a call. Return its status, and its result or error message as message content."""
        if isinstance(call, MalformedCall):
            return "malformed", f"this is not a valid tool call: {call.reason}"
        if call.name not in self._methods:
            return "unknown_tool", f"there is no tool {call.name!r}; the tools are {', '.join(self._methods)}"
        try:
            arguments = self._arguments[call.name].model_validate(dict(call.arguments))
        except ValidationError as error:
            problems = (f"{'.'.join(map(str, item['loc'])) or 'it'}: {item['msg']}" for item in error.errors())
            return "bad_arguments", f"arguments of {call.name}: {'; '.join(problems)}"
        values = {name: getattr(arguments, name) for name in type(arguments).model_fields}
        method = self._methods[call.name]
        try:
            return "ok", as_content(await asyncio.wait_for(run(method, **values), self.timeout_s))
        except TimeoutError:
            self.has_hung_thread |= not inspect.iscoroutinefunction(method)
            return "timed_out", f"{call.name} did not return within {self.timeout_s:g} s"
        except (ProcessLost, ServiceUnavailable):  # not caused by the policy's call, so the rollout starts over
            raise
        except Exception as error:  # user code may raise anything, and the model receives the message
            return "raised", f"{call.name} raised {type(error).__name__}: {error}"


async def run(method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Run a method and return its result. Synchronous methods run in a thread."""
    if inspect.iscoroutinefunction(method):
        return await method(*arguments, **named)
    return await asyncio.to_thread(method, *arguments, **named)


def as_content(value: Any) -> Any:
    """Return a tool's result as the content of a message: parts for a Pillow image or a list of parts with images, text
    for any other value. Raise TypeError for a value that contains images in any other form."""
    if is_pillow_image(value):
        return [{"type": "image", "image": value}]
    if images_in(value) and all(isinstance(part, Mapping) and part.get("type") in part for part in value):
        return value
    return as_text(value)


def as_text(value: Any) -> str:
    """Return a string unchanged, and any other value as JSON. Raise TypeError if it contains images or bytes."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=_other)


def _other(value: Any) -> str:
    if isinstance(value, bytes) or is_pillow_image(value):
        raise TypeError(
            f"the result contains {type(value).__name__}. Fix: return one Pillow image, or a list of parts of the "
            f"types text and image, with each image as {FORMS}"
        )
    return str(value)
