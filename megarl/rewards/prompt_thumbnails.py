"""Thumbnails of the images in prompts and observations, for reports and trackers.

Thumbnails are stored in THUMBNAILS next to the JSONL files. Each is named after the image's digest, so an image is
stored once for all samples and steps. Images with both sides below SMALL_SIDE are PNG files; all others are JPEG files.
"""

from __future__ import annotations

import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice, repeat
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from megarl.core.errors import UserError
from megarl.core.files import open_regular
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

if TYPE_CHECKING:
    from PIL.Image import Image

THUMBNAILS = "prompt_images"

PROMPT_IMAGES = "prompt_images"
"""Key of the images in a line's prompt."""

OBSERVATION_IMAGES = "observation_images"
"""Key of the images in the observations of a line's sample."""

MAX_THUMBNAILS = 32
"""Maximum number of thumbnails to write per step."""

MAX_SECONDS = 5.0
"""Seconds after which a step starts no further thumbnail. The step's scores wait for its thumbnails, and an image may
have 89 million pixels."""

MAX_THUMBNAIL_BYTES = 2**20
"""Maximum size of a thumbnail's file."""

MAX_KNOWN = 2**14
"""Maximum number of thumbnails to remember."""

SMALL_SIDE = 128
"""Images whose width and height are below this many pixels are stored losslessly."""

SUFFIXES = (".jpg", ".png")

_FILE_NAME = re.compile(r"[0-9a-f]{64}\.(jpg|png)")

_KNOWN: dict[Path, None] = {}
"""Thumbnails that this process has found or written, oldest first. This cache saves calls to shared file systems."""

Fetch = Callable[[Sequence[PromptImage]], Iterable[tuple[PromptImage, bytes]]]
"""Yields images with their encoded files. Images that are unavailable are skipped."""

Decode = Callable[[tuple[int, ...]], str]
"""Returns the text of token ids, including special tokens."""


def available_files(images: Sequence[PromptImage]) -> Iterator[tuple[PromptImage, bytes]]:
    """Yield the images whose encoded files are in this process."""
    yield from ((image, image.file) for image in images if isinstance(image.file, bytes))


def thumbnail_path(rollouts: Path, name: Any) -> Path | None:
    """Return the path of a thumbnail that a line names, or None if megarl does not write such names: a line from
    another source could name a path outside the folder."""
    folder = rollouts.parent / THUMBNAILS
    if not isinstance(name, str) or not name.startswith(f"{THUMBNAILS}/"):
        return None
    file_name = name.removeprefix(f"{THUMBNAILS}/")
    return folder / file_name if _FILE_NAME.fullmatch(file_name) and not folder.is_symlink() else None


def write_thumbnails(rollouts: Path, scored: Sequence[tuple[Any, Score]], fetch: Fetch) -> dict[str, str]:
    """Write thumbnails of the samples' images and, for trackers, a grid of them, unless the disk is full. Existing
    thumbnails are kept. If a step samples in several rounds, only its first round with images writes thumbnails, which
    limits their number.

    Returns:
        The names of the existing thumbnails relative to the JSONL file, by digest.
    """
    pairs = [(sample, score) for sample, score in scored if isinstance(sample, Sample) and sample.images]
    images = {image.digest: image for sample, _ in pairs for image in sample.prompt.images}
    images |= {i.digest: i for sample, _ in pairs for i in sample.response_images if i.digest not in images}
    paths = {digest: path for digest in images if (path := _existing(rollouts, digest)) is not None}
    grid = image_folder(rollouts) / GRID
    if images and not grid.exists():
        missing = [image for digest, image in images.items() if digest not in paths][:MAX_THUMBNAILS]
        IMAGES.attempt(rollouts, lambda: _write(rollouts, missing, fetch, paths), len(missing))
        IMAGES.attempt(rollouts, lambda: _write_grid(pairs, paths, grid))
    return {digest: f"{THUMBNAILS}/{path.name}" for digest, path in paths.items()}


def _existing(rollouts: Path, digest: str) -> Path | None:
    paths = (thumbnail_path(rollouts, f"{THUMBNAILS}/{digest}{suffix}") for suffix in SUFFIXES)
    path = next((path for path in paths if path is not None and (path in _KNOWN or _is_regular(path))), None)
    if path is not None:
        _remember(path)
    return path


def _is_regular(path: Path) -> bool:
    with suppress(OSError):
        return stat.S_ISREG(path.lstat().st_mode)
    return False


def _remember(path: Path) -> None:
    _KNOWN[path] = None
    for oldest in list(islice(_KNOWN, max(0, len(_KNOWN) - MAX_KNOWN))):
        _KNOWN.pop(oldest, None)


def _write(rollouts: Path, images: Sequence[PromptImage], fetch: Fetch, paths: dict[str, Path]) -> None:
    """Write thumbnails and add their paths to `paths`, by digest. Images that remain after MAX_SECONDS are
    left to later steps."""
    deadline = time.monotonic() + MAX_SECONDS
    for image, file in fetch(images):
        with suppress(ImageError):
            if (path := _write_thumbnail(rollouts, image.digest, decode_image(file))) is not None:
                paths[image.digest] = path
                _remember(path)
        if time.monotonic() >= deadline:
            break


def _write_thumbnail(rollouts: Path, digest: str, image: Image) -> Path | None:
    is_small = max(image.size) < SMALL_SIDE
    path = thumbnail_path(rollouts, f"{THUMBNAILS}/{digest}{'.png' if is_small else '.jpg'}")
    if path is not None:
        image.thumbnail((PREVIEW_SIDE, PREVIEW_SIDE))
        image.info.clear()  # Pillow writes some of the original file's metadata
        options = {"format": "PNG"} if is_small else {"format": "JPEG", "quality": PREVIEW_QUALITY}
        save_image(image, path, **options)
    return path


def _write_grid(scored: Sequence[tuple[Sample, Score]], paths: Mapping[str, Path], grid: Path) -> None:
    rows = list(islice(_grid_rows(scored, paths), GRID_GROUPS))
    if rows:
        save_image(draw_rows(rows), grid, format="PNG")


def _grid_rows(scored: Sequence[tuple[Sample, Score]], paths: Mapping[str, Path]) -> Iterator[GridRow]:
    """Yield one row per group: thumbnails of the prompt's images and then of those in observations, with the group's
    mean reward below the first one."""
    for group in groups_of(scored).values():
        prompt = group[0][0].prompt
        images = [*prompt.images, *(image for sample, _ in group for image in sample.response_images)]
        digests = dict.fromkeys(image.digest for image in images)
        stored = (_read(paths[digest]) for digest in digests if digest in paths)
        thumbnails = list(islice((thumbnail for thumbnail in stored if thumbnail is not None), GRID_SAMPLES))
        if not thumbnails:
            continue
        rewards = [score.value for _, score in group if score.value is not None]
        label = f"mean reward {fmean(rewards):.4g}" if rewards else "no reward"
        yield GridRow(_caption(prompt), [(image, "" if i else label) for i, image in enumerate(thumbnails)])


def _read(path: Path) -> Image | None:
    """Return a thumbnail, or None if its file is damaged or was replaced."""
    with suppress(ImageError, UserError, FileNotFoundError), open_regular(path) as file:
        return decode_image(file.read(MAX_THUMBNAIL_BYTES))
    return None


def _caption(prompt: Prompt) -> str:
    """Return the text of the last message."""
    content: Any = prompt.messages[-1].get("content") if prompt.messages else prompt.text
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list | tuple) else ()
    return " ".join(str(part["text"]) for part in parts if isinstance(part, Mapping) and "text" in part)


def prompt_fields(prompt: Prompt, decode: Decode | None, thumbnails: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of a line that describe the prompt: `prompt`, its text with one placeholder per image, and
    `prompt_images`, the images in order, if there are any. Each image has `start` and `stop`, the placeholder's offsets
    in the text, if they are known; its number of tokens and its digest; and the name of its thumbnail, if one is
    stored.

    Args:
        decode: returns the text of token ids; without it, `prompt_images` is omitted.
        thumbnails: names of thumbnails by digest.
    """
    if decode is None or not prompt.images:
        return {"prompt": prompt.text}
    places = _places(prompt, decode)
    images = [
        place | _image_fields(image, thumbnails)
        for image, place in zip(prompt.images, places or repeat({}), strict=False)
    ]
    return {"prompt": prompt.text, PROMPT_IMAGES: images}


def observation_fields(sample: Sample, thumbnails: Mapping[str, str]) -> dict[str, Any]:
    """Return the field of a line with the images in observations: their numbers of tokens, digests, and names of
    thumbnails. Empty if there are none."""
    images = {image.digest: _image_fields(image, thumbnails) for image in sample.response_images}
    return {OBSERVATION_IMAGES: list(images.values())} if images else {}


def _image_fields(image: PromptImage, thumbnails: Mapping[str, str]) -> dict[str, Any]:
    name = thumbnails.get(image.digest)
    return {"num_tokens": image.num_tokens, "digest": image.digest} | ({} if name is None else {"thumbnail": name})


def _places(prompt: Prompt, decode: Decode) -> list[dict[str, int]]:
    """Return the span of each image's placeholder in the prompt's text. The text may also contain the placeholder
    literally. Empty if the tokenizer decodes the parts of the prompt differently."""
    ids, text, first, places = prompt.token_ids.tolist(), "", 0, []
    for image in prompt.images:
        text += decode(tuple(ids[first : image.start]))
        places.append({"start": len(text)})
        text += decode((ids[image.start],))
        places[-1]["stop"] = len(text)
        first = image.stop
    return places if text + decode(tuple(ids[first:])) == prompt.text else []
