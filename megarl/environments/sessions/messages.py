"""Convert Chat Completions API messages to the chat template format, and to a canonical form for comparisons."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from megarl.core.files import MAX_DEPTH, is_deeper
from megarl.core.text import encodable
from megarl.data.image_parts import images_in
from megarl.environments.images import MAX_IMAGES_PER_ROLLOUT
from megarl.environments.sessions.errors import invalid

Message = Mapping[str, Any]

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""Chat template role for each API role."""


def read_messages(body: Any) -> list[Message]:
    """Convert a request's messages to the chat template format: content as text or, with images, as parts of the types
    text and image_url; tool arguments as objects; and tool messages with the tool's name. Raise ApiError for malformed
    messages, for other content, and for more than MAX_IMAGES_PER_ROLLOUT images. Agents resend the images of earlier
    turns, so the limit for one request is the limit for the rollout."""
    if not isinstance(body, list) or not body:
        raise invalid("messages", "messages must be a list with at least one message")
    tool_names: dict[str, str] = {}
    num_images = 0
    messages: list[Message] = []
    for index, message in enumerate(body):
        param = f"messages[{index}]"
        if not isinstance(message, dict) or message.get("role") not in list(ROLES):  # the role may be unhashable
            raise invalid(param, f"{param} must be an object with a role, one of {', '.join(ROLES)}")
        if not isinstance(message.get("name") or "", str):
            raise invalid(param, f"{param} has a name that is not a string")
        converted: dict[str, Any] = {"role": ROLES[message["role"]], "content": _content(message.get("content"), param)}
        if images := images_in(converted["content"]):
            num_images += len(images)
            if num_images > MAX_IMAGES_PER_ROLLOUT:
                raise invalid("messages", f"more than {MAX_IMAGES_PER_ROLLOUT} images. Send fewer images")
            if converted["role"] not in ("user", "tool"):
                reason = "only user and tool messages may contain images. Send the image in a user message"
                raise invalid(param, f"{param} has an image, but {reason}")
        if converted["role"] == "assistant" and message.get("tool_calls"):
            calls = _list(message["tool_calls"], f"{param}.tool_calls", "a list")
            converted["tool_calls"] = [_tool_call(call, param) for call in calls]
            tool_names.update((call["id"], call["function"]["name"]) for call in converted["tool_calls"])
        if converted["role"] == "tool":
            call_id = str(message.get("tool_call_id") or "")
            name = message.get("name") or tool_names.get(call_id)
            converted |= ({"tool_call_id": call_id} if call_id else {}) | ({"name": name} if name else {})
        elif message.get("name") and converted["role"] != "assistant":
            converted["name"] = message["name"]
        messages.append(converted)
    return messages


def canonical(message: Message) -> str:
    """Return a string that is equal for equivalent messages. Clients that resend a conversation may format the JSON of
    a tool call differently, change its id, and strip the assistant's text."""
    content = message["content"].strip() if message["role"] == "assistant" else message["content"]
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", ())]
    return json.dumps([message["role"], content, calls], sort_keys=True)


def _content(content: Any, param: str) -> str | list[dict[str, Any]]:
    """Return content as text or, with images, as parts. Adjacent texts are joined."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts: list[dict[str, Any]] = []
    for part in _list(content, f"{param}.content", "a string or a list"):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind == "image_url":
            parts.append({"type": kind, "image_url": {"url": _url(part.get("image_url"), param)}})
            continue
        if kind not in ("text", "refusal"):
            raise invalid(param, f"{param} has a content part of type {kind!r}, but only text and images are supported")
        if not isinstance(text := part.get(kind), str):
            raise invalid(param, f"{param} has a content part of type {kind!r} whose text is not a string")
        if parts and parts[-1]["type"] == "text":
            parts[-1]["text"] += text
        else:
            parts.append({"type": "text", "text": text})
    return parts if images_in(parts) else "".join(part["text"] for part in parts)


def _url(image: Any, param: str) -> str:
    url = image.get("url") if isinstance(image, dict) else image
    if not isinstance(url, str):
        raise invalid(param, f"{param} has an image without a URL. Send {{'url': 'data:image/png;base64,CONTENT'}}")
    if url[:5].lower() != "data:":
        reason = "Images are not downloaded. Send its content as data:image/png;base64,CONTENT"
        raise invalid(param, f"{param} has an image whose URL is not a data: URL. {reason}")
    return url


def _tool_call(call: Any, param: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid(param, f"{param} has a tool call without a function name")
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):  # invalid or deeply nested JSON stays a string
            parsed = encodable(json.loads(arguments))
            arguments = arguments if is_deeper(parsed, MAX_DEPTH) else parsed
    function = {"name": function["name"], "arguments": arguments}
    return {"id": str(call.get("id") or ""), "type": "function", "function": function}


def _list(value: Any, param: str, expected: str) -> Sequence[Any]:
    if not isinstance(value, list):
        raise invalid(param, f"{param}: expected {expected}, got {type(value).__name__}")
    return value
