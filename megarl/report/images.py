"""Embeds the images of samples in the report as data URIs. They are not decoded."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megarl.core.errors import UserError
from megarl.core.files import open_regular
from megarl.rewards.prompt_thumbnails import SMALL_SIDE
from megarl.rewards.rollout_images import image_path

MAX_BYTES = 2**20
"""Maximum total size of a step's image files, in bytes. Base64 in the page adds a third."""

PNG, JPEG = b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"
PNG_SIZE = slice(16, 20), slice(20, 24)
"""Byte ranges of the width and of the height in a PNG file."""

IMAGE, PREVIEW = "image", "preview"
URI, IS_SMALL = "image_uri", "image_is_small"
"""Fields of an embedded image: its data URI, and whether it is a PNG image with both sides below SMALL_SIDE. The page
enlarges such images with sharp pixels."""


def image_fields(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that `embed_images` needs."""
    return {name: record[name] for name in (IMAGE, PREVIEW) if isinstance(record.get(name), str)}


def embed_images(rollouts: Path, samples: Iterable[dict[str, Any]]) -> int:
    """Embed each sample's image, or the preview of a large image, until the total size reaches MAX_BYTES. Return the
    number of omitted images. File names that megarl would not choose are removed from the samples.

    Args:
        rollouts: the samples' JSONL file.
        samples: lines of the file. The fields URI and IS_SMALL are added to them.
    """
    num_bytes = num_omitted = 0
    for sample in samples:
        paths = [image_path(rollouts, sample.pop(name, None)) for name in (PREVIEW, IMAGE)]
        if paths[1] is None:
            continue
        sample[IMAGE] = f"{paths[1].parent.name}/{paths[1].name}"
        fields, size = read_image(paths[0] or paths[1], MAX_BYTES - num_bytes)
        num_bytes, num_omitted = num_bytes + size, num_omitted + (not fields)
        sample |= fields
    return num_omitted


def read_image(path: Path, max_bytes: int) -> tuple[dict[str, Any], int]:
    """Return the fields URI and IS_SMALL for a PNG or JPEG file, and its size in bytes. Return no fields and 0 if the
    file is larger than `max_bytes`, was removed or is a different file."""
    data = _read(path, max_bytes)
    if data is None:
        return {}, 0
    kind = "png" if data.startswith(PNG) else "jpeg"
    is_small = kind == "png" and max(int.from_bytes(data[place]) for place in PNG_SIZE) < SMALL_SIDE
    return {URI: f"data:image/{kind};base64,{base64.b64encode(data).decode()}", IS_SMALL: is_small}, len(data)


def _read(path: Path, max_bytes: int) -> bytes | None:
    try:
        with open_regular(path) as file:
            data = file.read(max_bytes) if os.fstat(file.fileno()).st_size <= max_bytes else b""
    except (UserError, FileNotFoundError):
        return None
    return data if data.startswith((PNG, JPEG)) else None
