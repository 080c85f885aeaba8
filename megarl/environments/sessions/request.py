"""Requests to the endpoint, and which of their parameters it heeds.

The policy samples as the run says: what is trained on has to come from the distribution that its log-probs are of. A
parameter that asks for another one, such as a temperature that is written into an agent's program, is ignored, and
counted. A parameter without which the program could not read its answer is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.environments.sessions.errors import invalid
from megarl.environments.sessions.messages import Message, read_messages

HEEDED = {
    *("messages", "model", "tools", "tool_choice", "max_tokens", "max_completion_tokens", "stop", "n", "stream"),
    *("stream_options", "logprobs"),
}
WITHOUT_EFFECT = {"user", "metadata", "store", "service_tier", "parallel_tool_calls", "safety_identifier"}
"""Parameters that say nothing of what is sampled."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request for the policy's next turn.

    max_tokens   the program's own limit of the turn; None: it has none
    reads_calls  whether calls of tools are read from the turn
    ignored      the parameters that have no effect
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]]
    max_tokens: int | None
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    logprobs: bool
    reads_calls: bool
    ignored: tuple[str, ...]


def read_request(body: Any, sampling: Mapping[str, Any]) -> ChatRequest:
    """Return what a request's body asks for. Raises ApiError. sampling: the run's parameters, by the names of the API,
    which a program may give without being ignored."""
    if not isinstance(body, dict):
        raise invalid("body", "the request is no JSON object")
    given = {name: value for name, value in body.items() if value is not None}
    if given.get("n", 1) != 1:
        raise invalid("n", "a request is answered with one choice; send it again for another one")
    if "functions" in given:
        raise invalid("functions", "functions is the old name of tools; give tools")
    choice = given.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise invalid(
            "tool_choice", "the policy chooses whether it calls a tool, as it is trained to; give auto or none"
        )
    options = given.get("stream_options", {})
    others = set(given) - HEEDED - WITHOUT_EFFECT
    return ChatRequest(
        messages=read_messages(given.get("messages")),
        tools=_tools(given.get("tools", [])),
        max_tokens=_limit(given),
        stop=_stop(given.get("stop", [])),
        stream=bool(given.get("stream", False)),
        include_usage=isinstance(options, dict) and bool(options.get("include_usage")),
        logprobs=bool(given.get("logprobs", False)),
        reads_calls=choice == "auto",
        ignored=tuple(sorted(name for name in others if given[name] != sampling.get(name))),
    )


def _limit(given: Mapping[str, Any]) -> int | None:
    name = "max_completion_tokens" if "max_completion_tokens" in given else "max_tokens"
    limit = given.get(name)
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise invalid(name, f"{name} is a number of tokens, at least 1, not {limit!r}")
    return limit


def _stop(stop: Any) -> tuple[str, ...]:
    texts = [stop] if isinstance(stop, str) else stop
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise invalid("stop", f"stop is a text or a list of texts, not {stop!r}")
    return tuple(texts)


def _tools(tools: Any) -> list[Mapping[str, Any]]:
    if not isinstance(tools, list):
        raise invalid("tools", "tools is a list")
    described: list[Mapping[str, Any]] = []
    for place, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise invalid(f"tools[{place}]", f"tools[{place}] is no object with type function, and a function's name")
        parts = {"name": function["name"], "description": function.get("description") or ""}
        parts["parameters"] = function.get("parameters") or {"type": "object", "properties": {}}
        described.append({"type": "function", "function": parts})
    return described


def tools_key(tools: Sequence[Mapping[str, Any]]) -> str:
    return json.dumps(list(tools), sort_keys=True)
