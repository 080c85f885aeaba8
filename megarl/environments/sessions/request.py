"""Endpoint requests and the parameters that the endpoint supports.

The policy always samples with the run's parameters, because training needs log-probs under the sampling distribution. A
request parameter that would change the distribution, such as a temperature hard-coded in an agent, is ignored and
counted. A request is rejected if ignoring a parameter would make the response unusable for the client.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.environments.sessions.errors import invalid
from megarl.environments.sessions.messages import Message, read_messages

SUPPORTED = {
    *("messages", "model", "tools", "tool_choice", "max_tokens", "max_completion_tokens", "stop", "n", "stream"),
    *("stream_options", "logprobs"),
}
WITHOUT_EFFECT = {"user", "metadata", "store", "service_tier", "parallel_tool_calls", "safety_identifier"}
"""Parameters that do not affect sampling."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A chat completion request.

    Attributes:
        messages: conversation in the chat template format.
        max_tokens: token limit from the request, or None.
        include_usage: whether the stream ends with a usage chunk.
        parse_tool_calls: whether to parse tool calls (`tool_choice` is not "none").
        ignored: names of the ignored parameters.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]]
    max_tokens: int | None
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    logprobs: bool
    parse_tool_calls: bool
    ignored: tuple[str, ...]


def read_request(body: Any, sampling: Mapping[str, Any]) -> ChatRequest:
    """Parse a request body. Raise ApiError if it is invalid. `sampling` maps API names to the run's sampling
    parameters; a request's parameter with the same value is not counted as ignored."""
    if not isinstance(body, dict):
        raise invalid("body", "the request body must be a JSON object")
    parameters = {name: value for name, value in body.items() if value is not None}
    if parameters.get("n", 1) != 1:
        raise invalid("n", "n must be 1: a response has one choice. Send the request again for another one")
    if "functions" in parameters:
        raise invalid("functions", "functions is not supported. Use tools")
    choice = parameters.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise invalid("tool_choice", "tool_choice must be auto or none: the policy chooses whether to call a tool")
    options = parameters.get("stream_options", {})
    unsupported = set(parameters) - SUPPORTED - WITHOUT_EFFECT
    return ChatRequest(
        messages=read_messages(parameters.get("messages")),
        tools=_tools(parameters.get("tools", [])),
        max_tokens=_max_tokens(parameters),
        stop=_stop(parameters.get("stop", [])),
        stream=bool(parameters.get("stream", False)),
        include_usage=isinstance(options, dict) and bool(options.get("include_usage")),
        logprobs=bool(parameters.get("logprobs", False)),
        parse_tool_calls=choice == "auto",
        ignored=tuple(sorted(name for name in unsupported if parameters[name] != sampling.get(name))),
    )


def _max_tokens(parameters: Mapping[str, Any]) -> int | None:
    name = "max_completion_tokens" if "max_completion_tokens" in parameters else "max_tokens"
    limit = parameters.get(name)
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise invalid(name, f"{name} must be a positive integer, got {limit!r}")
    return limit


def _stop(stop: Any) -> tuple[str, ...]:
    texts = [stop] if isinstance(stop, str) else stop
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise invalid("stop", f"stop must be a non-empty string or a list of them, got {stop!r}")
    return tuple(texts)


def _tools(tools: Any) -> list[Mapping[str, Any]]:
    if not isinstance(tools, list):
        raise invalid("tools", "tools must be a list")
    descriptions: list[Mapping[str, Any]] = []
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise invalid(f"tools[{index}]", f"tools[{index}] must be an object with a function that has a name")
        description = {"name": function["name"], "description": function.get("description") or ""}
        description["parameters"] = function.get("parameters") or {"type": "object", "properties": {}}
        descriptions.append({"type": "function", "function": description})
    return descriptions


def tools_key(tools: Sequence[Mapping[str, Any]]) -> str:
    return json.dumps(list(tools), sort_keys=True)
