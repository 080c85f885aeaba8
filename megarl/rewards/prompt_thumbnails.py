"""Thumbnails of the images in prompts, for reports and trackers.

They are in the folder THUMBNAILS next to the JSONL files and are named after the digest of the image, so that an image
is stored once for all samples and steps. They are JPEG files, or PNG files for images with sides below SMALL_SIDE.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

from megarl.core.prompt import Prompt
from megarl.core.prompt_images import PromptImage
from megarl.core.sample import Sample
from megarl.core.score import Score
from megarl.data.images import ImageError
from megarl.data.images import decode as decode_image
from megarl.rewards.rollout_images import (
    GRID,
    GRID_GROUPS,
    GRID_SAMPLES,
    IMAGES,
    PREVIEW_QUALITY,
    PREVIEW_SIDE,
    GridRow,
    draw_rows,
    groups_of,
    image_folder,
    save_image,
)

THUMBNAILS = "prompt_images"

MAX_THUMBNAILS = 32
"""Maximum number of thumbnails to write per step."""

SMALL_SIDE = 128
"""Width and height in pixels below which an image is stored without loss."""

SUFFIXES = (".jpg", ".png")

_FILE_NAME = re.compile(r"[0-9a-f]{64}\.(jpg|png)")

Fetch = Callable[[Sequence[PromptImage]], Mapping[str, bytes]]
"""Returns the encoded images by digest. Images that are unavailable may be missing."""

Decode = Callable[[tuple[int, ...]], str]
"""Returns the text of token ids, including special tokens."""


def available_files(images: Sequence[PromptImage]) -> dict[str, bytes]:
    """Return the encoded images that are in this process, by digest."""
    return {image.digest: image.file for image in images if isinstance(image.file, bytes)}


def thumbnail_path(rollouts: Path, name: Any) -> Path | None:
    """Return the path of a thumbnail that a line of the JSONL file names. Return None for any name that megarl does not
    write, because a file from another source could name a path outside its folder."""
    folder = rollouts.parent / THUMBNAILS
    if not isinstance(name, str) or not name.startswith(f"{THUMBNAILS}/"):
        return None
    file_name = name.removeprefix(f"{THUMBNAILS}/")
    return folder / file_name if _FILE_NAME.fullmatch(file_name) and not folder.is_symlink() else None


def write_thumbnails(rollouts: Path, scored: Sequence[tuple[Any, Score]], fetch: Fetch) -> dict[str, str]:
    """Write thumbnails of the images in the samples' prompts, and a grid of them for trackers, unless the disk is full.
    Existing thumbnails are kept. A step that samples in several rounds writes thumbnails only in the first of them that
    has images, so that their number is limited.

    Returns:
        The names of the existing thumbnails relative to the JSONL file, by digest.
    """
    pairs = [(sample, score) for sample, score in scored if isinstance(sample, Sample) and sample.prompt.images]
    images = {image.digest: image for sample, _ in pairs for image in sample.prompt.images}
    grid = image_folder(rollouts) / GRID
    if images and not grid.exists():
        missing = [image for image in images.values() if _existing(rollouts, image.digest) is None][:MAX_THUMBNAILS]
        IMAGES.attempt(rollouts, lambda: _write(rollouts, missing, fetch), len(missing))
        IMAGES.attempt(rollouts, lambda: _write_grid(rollouts, pairs, grid))
    paths = {digest: _existing(rollouts, digest) for digest in images}
    return {digest: f"{THUMBNAILS}/{path.name}" for digest, path in paths.items() if path is not None}


def _existing(rollouts: Path, digest: str) -> Path | None:
    paths = (thumbnail_path(rollouts, f"{THUMBNAILS}/{digest}{suffix}") for suffix in SUFFIXES)
    return next((path for path in paths if path is not None and path.is_file()), None)


def _write(rollouts: Path, images: Sequence[PromptImage], fetch: Fetch) -> None:
    files = fetch(images) if images else {}
    for image in images:
        try:
            thumbnail = decode_image(files[image.digest])
        except (KeyError, ImageError):
            continue
        is_small = max(thumbnail.size) < SMALL_SIDE
        path = thumbnail_path(rollouts, f"{THUMBNAILS}/{image.digest}{'.png' if is_small else '.jpg'}")
        if path is None:
            continue
        thumbnail.thumbnail((PREVIEW_SIDE, PREVIEW_SIDE))
        thumbnail.info.clear()  # Pillow writes some of the original file's metadata
        options = {"format": "PNG"} if is_small else {"format": "JPEG", "quality": PREVIEW_QUALITY}
        save_image(thumbnail, path, **options)


def _write_grid(rollouts: Path, scored: Sequence[tuple[Sample, Score]], grid: Path) -> None:
    rows = list(islice(_grid_rows(rollouts, scored), GRID_GROUPS))
    if rows:
        save_image(draw_rows(rows), grid, format="PNG")


def _grid_rows(rollouts: Path, scored: Sequence[tuple[Sample, Score]]) -> Iterator[GridRow]:
    """Yield a row per group: the thumbnails of its prompt, with the group's mean reward below the first."""
    from PIL import Image

    for group in groups_of(scored).values():
        prompt = group[0][0].prompt
        paths = (_existing(rollouts, image.digest) for image in prompt.images)
        thumbnails = [Image.open(path) for path in islice(filter(None, paths), GRID_SAMPLES)]
        if not thumbnails:
            continue
        rewards = [score.value for _, score in group if score.value is not None]
        label = f"mean reward {fmean(rewards):.4g}" if rewards else "no reward"
        yield GridRow(_caption(prompt), [(image, "" if i else label) for i, image in enumerate(thumbnails)])


def _caption(prompt: Prompt) -> str:
    """Return the text of the last message."""
    content: Any = prompt.messages[-1].get("content") if prompt.messages else prompt.text
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list | tuple) else ()
    return " ".join(str(part["text"]) for part in parts if isinstance(part, Mapping) and "text" in part)


def prompt_fields(prompt: Prompt, decode: Decode | None, thumbnails: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of a line that describe the prompt: `prompt`, its text with one placeholder per image, and
    `prompt_images`, the images in order, if there are any. Each has `start` and `stop`, the indices of the placeholder
    in the text; its number of tokens and digest; and the name of its thumbnail, if it is stored.

    Args:
        decode: returns the text of token ids; None if it is unknown, which leaves out `prompt_images`.
        thumbnails: names of thumbnails by digest.
    """
    if not prompt.images or decode is None:
        return {"prompt": prompt.text}
    text, places = _text_and_places(prompt, decode)
    images = [
        {
            **{"start": start, "stop": stop, "num_tokens": image.num_tokens, "digest": image.digest},
            **({"thumbnail": thumbnails[image.digest]} if image.digest in thumbnails else {}),
        }
        for image, (start, stop) in zip(prompt.images, places, strict=True)
    ]
    return {"prompt": text, "prompt_images": images}


def _text_and_places(prompt: Prompt, decode: Decode) -> tuple[str, list[tuple[int, int]]]:
    """Return the prompt's text, and where the placeholder of each image begins and ends in it."""
    ids = prompt.token_ids.tolist()
    placeholder = decode((ids[prompt.images[0].start],))
    places = [match.span() for match in re.finditer(re.escape(placeholder), prompt.text)]
    if len(places) == len(prompt.images):
        return prompt.text, places
    # The text contains a placeholder that is not an image, or an environment has replaced only the tokens.
    text, places, done = "", [], 0
    for image in prompt.images:
        text += decode(tuple(ids[done : image.start]))
        places.append((len(text), len(text) + len(placeholder)))
        text, done = text + placeholder, image.stop
    return text + decode(tuple(ids[done:])), places
