"""Images in the messages that environments return, as data: URLs."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from megarl.data.image_parts import texts_in
from megarl.data.images import MAX_IMAGE_PIXELS, data_url

MAX_IMAGES_PER_RESPONSE, MAX_URL_CHARACTERS = 64, 2**27
"""Limits per response of an environment: number of images, and total length of their data: URLs."""

FORMS = "a Pillow image, the bytes of an encoded image, or a data: URL"

_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA")


def is_pillow_image(value: Any) -> bool:
    from PIL import Image

    return isinstance(value, Image.Image)


def with_data_urls(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with each image in the form {"type": "image_url", "image_url": {"url": "data:…"}}. A list of
    parts without images becomes one text. Raise TypeError for a malformed part, and ValueError for too many or too
    large images."""
    number, left = 0, MAX_URL_CHARACTERS

    def content_of(parts: Sequence[Any]) -> str | list[dict[str, Any]]:
        nonlocal number, left
        converted: list[dict[str, Any]] = []
        for part in map(_plain, parts):
            converted.append(part)
            if part["type"] == "image_url":
                number, left = number + 1, left - len(part["image_url"]["url"])
            if number > MAX_IMAGES_PER_RESPONSE:
                raise ValueError(
                    f"the messages have more than {MAX_IMAGES_PER_RESPONSE} images. Fix: return fewer images"
                )
            if left < 0:
                raise ValueError(f"the images exceed {MAX_URL_CHARACTERS * 3 // 4} bytes. Fix: return smaller images")
        return converted if any(part["type"] == "image_url" for part in converted) else "".join(texts_in(converted))

    return [
        {**message, "content": content_of(message["content"])}
        if isinstance(message["content"], list | tuple)
        else dict(message)
        for message in messages
    ]


def _plain(part: Any) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind not in ("image", "image_url"):
        raise TypeError(f"{repr(part)[:80]} is not a message part. Fix: use a part of type text, image or image_url")
    value = part.get(kind)
    if kind == "image_url" and isinstance(value, Mapping):
        value = value.get("url")
    return {"type": "image_url", "image_url": {"url": _url(value)}}


def _url(value: Any) -> str:
    if isinstance(value, str) and value[:5].lower() == "data:":
        return value
    if isinstance(value, bytes):
        return data_url(value)
    if is_pillow_image(value):
        return data_url(_png(value), "image/png")
    description = repr(value[:80]) if isinstance(value, str) else type(value).__name__
    raise TypeError(f"{description} is not an image. Fix: return {FORMS}. Paths and other URLs are not read")


def _png(image: Any) -> bytes:
    if image.width * image.height > MAX_IMAGE_PIXELS:
        raise ValueError(f"an image has more than {MAX_IMAGE_PIXELS} pixels. Fix: return a smaller image")
    stream = io.BytesIO()
    converted = image if image.mode in _PNG_MODES else image.convert("RGB")
    converted.save(stream, "PNG", compress_level=1)
    return stream.getvalue()
