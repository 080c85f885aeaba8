"""A step's images: PNG files in a folder next to the step's JSONL file, and a grid of some of them for trackers.

The folder is named after the JSONL file without its suffix, and each image after its sample's id: the images of
step_000001.jsonl are step_000001/1.0.3.png and so on. An image larger than PREVIEW_SIDE also has a small copy,
1.0.3.jpg, for reports.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from megarl.core.files import replacement
from megarl.core.latents import LatentSample
from megarl.core.optional_logs import OptionalLog
from megarl.core.sample import Sample
from megarl.core.score import Score

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_PIXELS = 2**24
"""Maximum number of pixels to store per step, in whole groups. The first group is always stored."""

PREVIEW_SIDE = 256
"""Maximum width and height of a preview in pixels."""

PREVIEW_QUALITY = 85
"""JPEG quality of a preview."""

GRID = "grid.png"
GRID_GROUPS, GRID_SAMPLES = 8, 8
"""Maximum number of groups in a grid, and of samples per group."""

GRID_SIDE = 128
"""Width and height of a grid's cells in pixels."""

GRID_TEXT = 14
"""Size of a grid's texts in pixels."""

GRID_GAP = 6

MAX_CAPTION = 300
"""Maximum number of characters of a caption to draw."""

IMAGES = OptionalLog("images")

SampleT = TypeVar("SampleT", Sample, LatentSample)

_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\.(png|jpg)")


def image_folder(rollouts: Path) -> Path:
    """Return the folder for the images of a JSONL file."""
    return rollouts.with_suffix("")


def image_path(rollouts: Path, name: Any) -> Path | None:
    """Return the path of an image that a line of the JSONL file names. Return None for a name that megarl would not
    choose, because a file from another source could name a path outside its folder."""
    folder = image_folder(rollouts)
    if not isinstance(name, str) or not name.startswith(f"{folder.name}/"):
        return None
    file_name = name.removeprefix(f"{folder.name}/")
    is_valid = _FILE_NAME.fullmatch(file_name) and not folder.is_symlink()
    return folder / file_name if is_valid else None


def write_images(rollouts: Path, scored: Sequence[tuple[Any, Score]]) -> dict[str, dict[str, str]]:
    """Write images of the JSONL file's samples, unless the disk is full. Whole groups are stored, in order, as long as
    the step has at most MAX_PIXELS. Samples without an image are ignored.

    Returns:
        The fields of each stored image's line: `image`, the name of its file relative to the JSONL file, and `preview`
        if it has one. Keyed by sample id.
    """
    pictured = [item for item in scored if isinstance(item[0], LatentSample) and item[0].image is not None]
    if not pictured:
        return {}
    folder = image_folder(rollouts)
    stored = _within_limit(folder, pictured)
    fields: dict[str, dict[str, str]] = {}

    def write() -> None:
        for sample, _ in stored:
            fields[sample.id] = _write_image(folder, sample.id, sample.response)
        if stored and not (folder / GRID).exists():  # a step may sample in several rounds
            save_image(draw_grid(stored), folder / GRID, format="PNG")

    IMAGES.attempt(rollouts, write, len(stored))
    return fields


def _within_limit(folder: Path, scored: Sequence[tuple[LatentSample, Score]]) -> list[tuple[LatentSample, Score]]:
    """Return the samples of the first groups whose images, with those already in the folder, fit into MAX_PIXELS."""
    num_pixels = max(math.prod(sample.response.shape[:2]) for sample, _ in scored)
    num_stored = sum(path.suffix == ".png" and path.name != GRID for path in folder.glob("*"))
    num_left = MAX_PIXELS // num_pixels - num_stored
    chosen: list[tuple[LatentSample, Score]] = []
    for group in groups_of(scored).values():
        if len(chosen) + len(group) > num_left and (chosen or num_stored):
            break
        chosen += group
    return chosen


def groups_of(scored: Sequence[tuple[SampleT, Score]]) -> Mapping[str, list[tuple[SampleT, Score]]]:
    """Return the samples by group. Ids are STEP.GROUP.NUMBER, or SET.ROW.NUMBER in an evaluation."""
    groups: dict[str, list[tuple[SampleT, Score]]] = {}
    for sample, score in scored:
        groups.setdefault(sample.id.rpartition(".")[0], []).append((sample, score))
    return groups


def _write_image(folder: Path, name: str, pixels: NDArray[np.uint8]) -> dict[str, str]:
    """Write an image, uint8 [H, W, 3], and its preview. Return the fields of its line."""
    from PIL import Image

    image, file = Image.fromarray(pixels), folder / f"{name}.png"
    save_image(image, file, format="PNG")
    fields = {"image": f"{folder.name}/{file.name}"}
    if max(image.size) > PREVIEW_SIDE:
        file = folder / f"{name}.jpg"
        image.thumbnail((PREVIEW_SIDE, PREVIEW_SIDE))
        save_image(image, file, format="JPEG", quality=PREVIEW_QUALITY)
        fields["preview"] = f"{folder.name}/{file.name}"
    return fields


def save_image(image: Image, path: Path, **options: Any) -> None:
    """Write an image with Pillow's options. The file becomes visible only when it is complete."""
    path.parent.mkdir(exist_ok=True)
    with replacement(path) as file:
        image.save(file, **options)


@dataclass(frozen=True, slots=True)
class GridRow:
    """A row of a grid: a caption, and images with the texts below them."""

    caption: str
    cells: Sequence[tuple[Image, str]]


def draw_grid(scored: Sequence[tuple[LatentSample, Score]]) -> Image:
    """Draw the first groups, one per row, below their captions. The reward is below each image."""
    from PIL import Image

    groups = [group[:GRID_SAMPLES] for group in list(groups_of(scored).values())[:GRID_GROUPS]]
    cells = [[(Image.fromarray(sample.response), _reward(score)) for sample, score in group] for group in groups]
    return draw_rows([GridRow(group[0][0].prompt.text, row) for group, row in zip(groups, cells, strict=True)])


def _reward(score: Score) -> str:
    return "no reward" if score.value is None else f"{score.value:.4g}"


def draw_rows(rows: Sequence[GridRow]) -> Image:
    """Draw the rows of a grid. Long captions are cut."""
    from PIL import Image, ImageDraw, ImageFont

    cell, line = GRID_SIDE + GRID_GAP, GRID_TEXT + GRID_GAP
    width, height = max(len(row.cells) for row in rows) * cell + GRID_GAP, cell + 2 * line
    grid = Image.new("RGB", (width, len(rows) * height), "white")
    draw, font = ImageDraw.Draw(grid), ImageFont.load_default(GRID_TEXT)
    for number, row in enumerate(rows):
        top = number * height + GRID_GAP
        caption = " ".join(row.caption[:MAX_CAPTION].split())
        while draw.textlength(caption, font) > width - 2 * GRID_GAP:
            caption = f"{caption.removesuffix('…')[:-1]}…"
        draw.text((GRID_GAP, top), caption, "black", font)
        for column, (image, text) in enumerate(row.cells):
            left = column * cell + GRID_GAP
            grid.paste(_fitted(image), (left, top + line))
            draw.text((left, top + line + cell), text, "black", font)
    return grid


def _fitted(image: Image) -> Image:
    """Scale an image to a cell of the grid. The pixels of a small image stay sharp."""
    from PIL.Image import Resampling

    longest = max(image.size)
    size = [max(1, round(side * GRID_SIDE / longest)) for side in image.size]
    return image.resize((size[0], size[1]), Resampling.NEAREST if longest < GRID_SIDE else Resampling.LANCZOS)
