"""Prompts and messages with images in the report: the texts between the images, and thumbnails as data URIs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from megarl.core.files import is_plain
from megarl.core.text import counted
from megarl.report.images import IS_SMALL, MAX_BYTES, URI, read_image
from megarl.rewards.prompt_thumbnails import OBSERVATION_IMAGES, PROMPT_IMAGES, thumbnail_path

PARTS = "content_parts"
"""Field with the contents of a prompt or message with images: strings, and objects for the images. An object has
`num_tokens`, and `thumbnail` if the thumbnail is stored."""

MAX_IMAGES = 32
"""Maximum number of images to show per prompt."""


def select_prompt(record: Mapping[str, Any], max_characters: int) -> dict[str, Any]:
    """Return the fields of a line's prompt: `prompt`, its text without the placeholders of images, shortened to
    `max_characters`; and PARTS, if it has images. Images within the omitted middle are shown where the text was cut."""
    text, images = str(record.get("prompt")), _images(record)
    bounds = [0, *(index for image in images for index in (image["start"], image["stop"])), len(text)]
    texts = [text[start:stop] for start, stop in zip(bounds[::2], bounds[1::2], strict=True)]
    parts = _parts(texts, images, max_characters)
    return {"prompt": _text_in(parts), **({PARTS: parts} if images else {})}


def select_turns(record: Mapping[str, Any], max_characters: int) -> list[dict[str, Any]]:
    """Return the fields to show for each message in a line, with its text shortened to `max_characters`."""
    # Messages cover the whole rollout, but the line has only the images of its own sample. Messages from environments
    # refer to images by digest.
    images = iter([] if record.get("first_turn") else _images(record))
    by_digest = {i["digest"]: i for key in (PROMPT_IMAGES, OBSERVATION_IMAGES) for i in _with_digest(record, key)}
    messages = record.get("turns") or record.get("messages") or ()
    return [_select_turn(message, max_characters, images, by_digest) for message in messages]


def _select_turn(
    message: Mapping[str, Any],
    max_characters: int,
    images: Iterator[Mapping[str, Any]],
    by_digest: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    content = message.get("content")
    fields = {
        "role": str(message.get("role")),
        "content": shorten(content, max_characters) if isinstance(content, str) else content,
    }
    if isinstance(content, list) and any(map(_is_image, content)):
        texts, shown = [""], []
        for part in content:
            if _is_image(part):
                digest = part.get("image")
                shown.append(next(images, {}) if digest is None else by_digest.get(str(digest), {}))
                texts.append("")
            else:
                texts[-1] += _text_of(part)
        parts = _parts(texts, shown, max_characters)
        fields |= {PARTS: parts, "content": _text_in(parts)}
    return fields | ({"tool_calls": message["tool_calls"]} if message.get("tool_calls") else {})


def _parts(texts: Sequence[str], images: Sequence[Mapping[str, Any]], max_characters: int) -> list[Any]:
    """Return PARTS with at most `max_characters` of text and MAX_IMAGES images. texts: the texts before, between and
    after the images."""
    first, *others = _shorten_all(texts, max_characters)
    parts: list[Any] = [first]
    for image, following in zip(images[:MAX_IMAGES], others, strict=False):
        parts += _selected(image), following
    if len(images) > MAX_IMAGES:
        parts += f"\n… {len(images) - MAX_IMAGES} more images …\n", *others[MAX_IMAGES:]
    return parts


def _text_in(parts: Sequence[Any]) -> str:
    return "".join(part for part in parts if isinstance(part, str))


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "image"


def _text_of(part: Any) -> str:
    return str(part.get("text", "")) if isinstance(part, dict) else str(part)


def _selected(image: Mapping[str, Any]) -> dict[str, Any]:
    return {name: image[name] for name in ("num_tokens", "thumbnail") if name in image}


def _images(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the images in a line's prompt, in order, or [] if the list is malformed."""
    images, done, length = record.get(PROMPT_IMAGES), 0, len(str(record.get("prompt")))
    if not isinstance(images, list):
        return []
    for image in images:
        if not isinstance(image, dict) or not all(is_plain(image.get(name), int) for name in ("start", "stop")):
            return []
        if not is_plain(image.get("num_tokens"), int) or not done <= image["start"] <= image["stop"] <= length:
            return []
        done = image["stop"]
    return images


def _with_digest(record: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """Return the well-formed images under this key of a line. Their positions may be unknown."""
    images = record.get(key)
    images = [image for image in images if isinstance(image, dict)] if isinstance(images, list) else []
    return [image for image in images if is_plain(image.get("num_tokens"), int) and is_plain(image.get("digest"), str)]


def shorten(text: str, max_characters: int) -> str:
    """Remove the middle part of a long text, because the start and the end are more informative."""
    [shortened] = _shorten_all([text], max_characters)
    return shortened


def _shorten_all(texts: Sequence[str], max_characters: int) -> Iterator[str]:
    """Yield the texts with the middle of their concatenation removed if it exceeds `max_characters`."""
    total = sum(map(len, texts))
    if total <= max_characters:
        yield from texts
        return
    half, begin = max_characters // 2, 0
    marker = f"\n… {total - max_characters} characters omitted …\n"
    for text in texts:
        end = begin + len(text)
        is_first_cut = begin <= half < end
        yield text[: max(0, half - begin)] + marker * is_first_cut + text[max(0, total - half - begin) :]
        begin = end


def images_in(samples: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the image objects in the samples' prompts and turns."""
    for sample in samples:
        for holder in (sample, *sample.get("turns", ())):
            yield from (part for part in holder.get(PARTS, ()) if isinstance(part, dict))


def embed_thumbnails(rollouts: Path, samples: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Read each thumbnail of the samples once, up to MAX_BYTES in total. Remove names that megarl does not write.

    Args:
        rollouts: the samples' JSONL file.

    Returns:
        The fields of each thumbnail, URI and IS_SMALL, by name. They are empty if it exceeds the limit or was removed.
    """
    thumbnails: dict[str, dict[str, Any]] = {}
    num_bytes = 0
    for image in images_in(samples):
        name = image.get("thumbnail")
        path = thumbnail_path(rollouts, name)
        if path is None:
            image.pop("thumbnail", None)
        elif (name := str(name)) not in thumbnails:
            thumbnails[name], size = read_image(path, MAX_BYTES - num_bytes)
            num_bytes += size
    return thumbnails


def embed_in_place(rollouts: Path, samples: Sequence[Mapping[str, Any]]) -> None:
    """Add URI and IS_SMALL to the samples' images, up to about MAX_BYTES in total. Every occurrence counts, because a
    page without scripts repeats the data."""
    thumbnails = embed_thumbnails(rollouts, samples)
    num_characters = 0
    for image in images_in(samples):
        fields = thumbnails.get(image.get("thumbnail", ""), {})
        num_characters += len(fields.get(URI, ""))
        if fields and num_characters <= 4 * MAX_BYTES // 3:
            image |= fields


def render_parts(parts: Iterable[Any]) -> str:
    """Return a text with images as HTML. The images have the fields of `embed_in_place`."""
    return "".join(_picture(part) if isinstance(part, dict) else escape(part) for part in parts)


def _picture(image: Mapping[str, Any]) -> str:
    label = counted(image["num_tokens"], "token") if "num_tokens" in image else "image"
    if URI not in image:
        state = "not shown" if "thumbnail" in image else "not stored"
        return f'<span class="prompt-image"><span>image {state} · {label}</span></span>'
    size = ' class="small"' if image[IS_SMALL] else ""
    return f'<span class="prompt-image"><img{size} src="{image[URI]}" alt="image"><span>{label}</span></span>'
