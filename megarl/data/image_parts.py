"""Images in messages, as content parts or as markers in text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from megarl.core.errors import UserError
from megarl.data.row import Content, as_messages

MARKER = "<image>"
"""Text that stands for an image in a text prompt, or in a message whose content is text. In an assistant's message, it
is ordinary text."""

PLACEHOLDER = re.compile(r"(?:<\|vision_start\|>)?<\|image_pad\|>(?:<\|vision_end\|>)?")
"""An image's placeholder in the text of a prompt, in the chat templates of all supported models."""

FOREIGN_PLACEHOLDER = re.compile(
    PLACEHOLDER.pattern + r"|<\|?\w{0,20}(?:image|img|video|vision|audio)\w{0,20}\|?>|\[IMG(?:_BREAK|_END)?\]",
    re.IGNORECASE,
)
"""A placeholder of an image, a video or audio in the chat templates of common model families, such as Qwen-VL, Gemma,
InternVL, Llama, Phi and Pixtral."""


def is_image(value: Any) -> bool:
    """Return whether a value has the form of an image: a path, a data: URL, bytes or {bytes, path}."""
    if isinstance(value, Mapping):
        fields = _filled(value)
        return (
            bool(fields)
            and fields.keys() <= {"bytes", "path"}
            and isinstance(fields.get("bytes", b""), bytes | str)  # text is rejected later, with a remedy
            and isinstance(fields.get("path", ""), str)
        )
    return isinstance(value, str | bytes)


def is_content(value: Any) -> bool:
    """Return whether a value is valid content of a message: text or a list of parts."""
    return isinstance(value, str) or (isinstance(value, list) and bool(value) and all(map(_is_part, value)))


def has_own_images(prompt: Content) -> bool:
    """Return whether any part of the prompt contains its own image instead of referring to data.image_column."""
    return any(_own_image(part) is not None for part in _parts(prompt))


def without_images(prompt: Content) -> Content:
    """Return the prompt without the images in its image parts."""
    if isinstance(prompt, str):
        return prompt
    return [
        message
        if isinstance(message["content"], str)
        else {**message, "content": [_plain(part) for part in message["content"]]}
        for message in prompt
    ]


def images_in(content: Any) -> list[Mapping[str, Any]]:
    """Return the image parts of a message's content. Accepts any value."""
    return list(filter(_has_image_type, content)) if isinstance(content, list | tuple) else []


def texts_in(content: Any) -> list[str]:
    """Return the texts in a message's content; [] if it is neither text nor a list of parts."""
    if isinstance(content, str):
        return [content]
    parts = content if isinstance(content, list | tuple) else ()
    return [part["text"] for part in parts if isinstance(part, Mapping) and isinstance(part.get("text"), str)]


def map_texts(content: Any, change: Callable[[str], str]) -> Any:
    """Return the content with `change` applied to each text in it, in order."""
    if isinstance(content, str):
        return change(content)
    if not isinstance(content, list | tuple):
        return content
    return [
        {**part, "text": change(part["text"])}
        if isinstance(part, Mapping) and isinstance(part.get("text"), str)
        else part
        for part in content
    ]


def map_images(
    messages: Sequence[Mapping[str, Any]], change: Callable[[Mapping[str, Any]], Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Return the messages with `change` applied to each of their image parts, in order."""
    return [
        {**message, "content": [change(part) if _has_image_type(part) else part for part in message["content"]]}
        if images_in(message["content"])
        else message
        for message in messages
    ]


def join_contents(*contents: Any) -> str | list[Any]:
    """Concatenate contents: text or, if any of them has images, a list of parts."""
    if not any(map(images_in, contents)):
        return "".join("".join(texts_in(c)) if isinstance(c, list | tuple) else str(c) for c in contents)
    joined: list[Any] = []
    for content in contents:
        joined += content if isinstance(content, list | tuple) else [{"type": "text", "text": str(content)}]
    return joined


def is_text_content(value: Any) -> bool:
    """Return whether a value is valid content of a message without images: text or a list of text parts."""
    return is_content(value) and (isinstance(value, str) or not any(map(_is_placeholder, value)))


def joined(content: Content) -> Content:
    """Join the text parts of each message into one text."""
    if isinstance(content, str):
        return content
    return [
        message
        if isinstance(message["content"], str)
        else {**message, "content": "".join(part["text"] for part in message["content"])}
        for message in content
    ]


def place_images(prompt: Content, images: Sequence[Any], column: str, place: str) -> tuple[Content, tuple[Any, ...]]:
    """Replace each placeholder with a part {"type": "image"}. Return the new prompt, and the images in the order of
    these parts. Raise a UserError unless data.image_column has one image for each placeholder that lacks its own.

    Args:
        images: the images in data.image_column.
        column: the name of this column.
        place: the location of the row, for error messages.
    """
    split = [(message, _split(message)) for message in as_messages(prompt, "user")]
    num_open = sum(_is_placeholder(part) and _own_image(part) is None for _, parts in split for part in parts)
    if num_open != len(images):
        remedy = "add the images, or remove placeholders. A part of type text may contain <image> as text"
        if num_open < len(images):
            remedy = f"add {MARKER} where each image belongs, or remove images"
        raise UserError(
            f"{place}: the number of placeholders in the row ({MARKER}, or parts of type image) is {num_open}, but "
            f"the number of images in column {column!r} (data.image_column) is {len(images)}. Fix: {remedy}"
        )
    if isinstance(prompt, str) and not num_open:
        return prompt, ()
    remaining, placed = iter(images), []
    messages = []
    for message, parts in split:
        for part in parts:
            if _is_placeholder(part):
                own = _own_image(part)
                placed.append(next(remaining) if own is None else own)
        is_text = isinstance(message["content"], str) and not any(map(_is_placeholder, parts))
        content = message["content"] if is_text else [_plain(part) for part in parts]
        messages.append({"role": message["role"], "content": content})
    return messages, tuple(placed)


def _plain(part: Mapping[str, Any]) -> dict[str, str]:
    """Return a part with only its type and text. Chat templates treat any part with the key `image` as an image, even
    if it is null."""
    return {"type": "image"} if _is_placeholder(part) else {"type": "text", "text": part["text"]}


def _has_image_type(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in ("image", "image_url")


def _is_placeholder(part: Mapping[str, Any]) -> bool:
    return part["type"] != "text"


def _split(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the parts of a message. Text is split at the markers."""
    content = message["content"]
    if not isinstance(content, str):
        return content
    parts: list[Mapping[str, Any]] = []
    for number, text in enumerate([content] if message["role"] == "assistant" else content.split(MARKER)):
        parts += [{"type": "image"}] if number else []
        parts += [{"type": "text", "text": text}] if text else []
    return parts


def _parts(prompt: Content) -> Iterator[Mapping[str, Any]]:
    for message in as_messages(prompt, "user"):
        if not isinstance(message["content"], str):
            yield from message["content"]


def _own_image(part: Mapping[str, Any]) -> Any:
    """Return the image that the part itself contains, as a path, a URL or data. Return None for a placeholder."""
    fields = _filled(part)
    url = fields.get("image_url")
    return url["url"] if isinstance(url, Mapping) else fields.get("image", url)


def _is_part(part: Any) -> bool:
    if not isinstance(part, Mapping):
        return False
    fields = _filled(part)
    kind = fields.pop("type", None)
    if kind == "text":
        return fields.keys() == {"text"} and isinstance(fields["text"], str)
    if kind == "image":
        return not fields or (fields.keys() == {"image"} and is_image(fields["image"]))
    if kind != "image_url" or fields.keys() != {"image_url"}:
        return False
    url = fields["image_url"]
    return isinstance(url, str) or (isinstance(url, Mapping) and isinstance(url.get("url"), str))


def _filled(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Drop null fields. Parquet adds the fields of other rows as nulls."""
    return {name: value for name, value in fields.items() if not _is_null(value)}


def _is_null(value: Any) -> bool:
    return value is None or (isinstance(value, Mapping) and all(map(_is_null, value.values())))
