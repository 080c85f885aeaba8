"""Messages of the Chat Completions API: as chat templates take them, and in a form in which two that say the same are
the same text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from megarl.environments.sessions.errors import invalid

Message = Mapping[str, Any]

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""The roles of requests, and how chat templates call them."""


def read_messages(given: Any) -> list[Message]:
    """Return a request's messages as chat templates take them: contents as text, arguments of calls as objects, and
    with a tool's answer the name of the tool. Raises ApiError for what no message is, and for images and sound."""
    if not isinstance(given, list) or not given:
        raise invalid("messages", "messages is a list with at least one message")
    names: dict[str, str] = {}
    messages: list[Message] = []
    for place, message in enumerate(given):
        where = f"messages[{place}]"
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise invalid(where, f"{where} is an object with a role, one of {', '.join(ROLES)}")
        read: dict[str, Any] = {"role": ROLES[message["role"]], "content": _text(message.get("content"), where)}
        if read["role"] == "assistant" and message.get("tool_calls"):
            read["tool_calls"] = [_call(call, where) for call in _list(message["tool_calls"], where)]
            names.update((call["id"], call["function"]["name"]) for call in read["tool_calls"])
        if read["role"] == "tool":
            number = str(message.get("tool_call_id") or "")
            name = message.get("name") or names.get(number)
            read |= ({"tool_call_id": number} if number else {}) | ({"name": name} if name else {})
        elif message.get("name") and read["role"] != "assistant":
            read["name"] = message["name"]
        messages.append(read)
    return messages


def canonical(message: Message) -> str:
    """Return a text that is the same for two messages that say the same. Programs that keep a conversation may write
    the JSON of a call in another way, give a call another id, and strip what the assistant said."""
    content = message["content"].strip() if message["role"] == "assistant" else message["content"]
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", ())]
    return json.dumps([message["role"], content, calls], sort_keys=True)


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for part in _list(content, where):
        if not isinstance(part, dict) or part.get("type") not in ("text", "refusal"):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise invalid(where, f"{where} has a part of type {kind!r}; the policy reads text")
        texts.append(str(part.get(part["type"], "")))
    return "".join(texts)


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid(where, f"{where} has a call that is no object with a function and its name")
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        with suppress(ValueError):  # else they stay as the program spells them
            arguments = json.loads(arguments)
    function = {"name": function["name"], "arguments": arguments}
    return {"id": str(call.get("id") or ""), "type": "function", "function": function}


def _list(value: Any, where: str) -> Sequence[Any]:
    if not isinstance(value, list):
        raise invalid(where, f"{where} has a {type(value).__name__} where a text or a list is")
    return value
