"""Load the images of data rows and expand their placeholders in prompts."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from megarl.config.data_schema import Data
from megarl.config.schema import Config
from megarl.core.errors import UserError
from megarl.core.prompt_images import PromptImage, expand
from megarl.data.chat import plain
from megarl.data.image_files import ImageFiles, StoredImage, describe
from megarl.data.image_parts import place_images
from megarl.data.images import ImageError, ImageProcessor
from megarl.data.row import MessageRow, PreferenceRow, Row
from megarl.data.sources import place_of
from megarl.models.folder import read_config
from megarl.models.multimodal import VISION
from megarl.models.vision import add_vision, vision_of

ROWS_AT_ONCE = 64
"""Number of rows whose images are in memory at the same time."""

MAX_THREADS = 16
"""Maximum number of threads that decode images. Together they take up to about 3 GB (see LARGE_PIXELS)."""

PROGRESS_S = 30.0

AnyRow = TypeVar("AnyRow", Row, MessageRow, PreferenceRow)


@dataclass(frozen=True, slots=True)
class LoadedImage:
    """An image of a row, and its number of patches in time, height and width."""

    image: StoredImage
    grid: tuple[int, int, int]

    def prompt_image(self, processor: ImageProcessor) -> PromptImage:
        """Return the image as a PromptImage. Its start is 0 until `expand` places it in a prompt."""
        return PromptImage(0, processor.num_tokens(self.grid), self.grid, self.image.digest)


@dataclass(frozen=True, slots=True)
class ImageRows:
    """Loads the images of a data source.

    Attributes:
        token: id of the model's image placeholder.
    """

    data: Data
    processor: ImageProcessor
    token: int
    files: ImageFiles

    @classmethod
    def of(cls, config: Config, folder: Path) -> ImageRows | None:
        """Return the loader of a data source; None for prompts without images."""
        if config.data.image_column is None:
            return None
        folders = [Path(os.path.abspath(folder)) for folder in config.data.image_folders]
        return cls(config.data, *load_processor(config, folder), ImageFiles(folders))

    def load(self, rows: Iterator[AnyRow]) -> Iterator[AnyRow]:
        """Yield the rows with LoadedImages as `images`, in the order of their placeholders. With a chat template, the
        placeholders become image parts. Raise a UserError that names the row if an image is unusable, or if a row's
        placeholders do not match its images. Print progress every PROGRESS_S seconds."""
        num_loaded, printed = 0, time.monotonic()
        with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), "images") as pool:
            while batch := list(islice(rows, ROWS_AT_ONCE)):
                loaded: Iterator[Any] = pool.map(self._load, batch)
                yield from loaded
                num_loaded += len(batch)
                if time.monotonic() > printed + PROGRESS_S:
                    printed = time.monotonic()
                    print(f"data: checked the images of {num_loaded:,} rows", flush=True)

    def expand(
        self, token_ids: list[int], images: Sequence[LoadedImage], place: str
    ) -> tuple[list[int], tuple[PromptImage, ...]]:
        """Return the token ids of a prompt with one placeholder per feature, and the images in the prompt. Raise a
        UserError unless the prompt has one placeholder per image.

        Args:
            token_ids: ids with one placeholder per image.
            place: the location of the row, for error messages.
        """
        if (num_tokens := token_ids.count(self.token)) != len(images):
            fix = "write the token once for each image, as the model's chat template does"
            if self.data.chat_template:
                fix = "remove the token from the assistant's messages, or use a chat template that supports images"
            raise UserError(
                f"{place}: the number of image tokens in the row is {num_tokens}, but the number of images is "
                f"{len(images)}. Fix: {fix}"
            )
        return expand(token_ids, self.token, [loaded.prompt_image(self.processor) for loaded in images])

    def expand_masked(
        self, token_ids: list[int], mask: list[bool], images: Sequence[LoadedImage], place: str
    ) -> tuple[list[int], list[bool], tuple[PromptImage, ...]]:
        """Like `expand`, for a prompt with responses. Also return the trained-token mask, expanded to match. Raise a
        UserError if a response contains an image."""
        expanded, placed = self.expand(token_ids, images, place)
        mask = list(mask)
        for image in placed:
            if mask[image.start]:
                raise UserError(
                    f"{place}: an assistant message contains an image, but responses must be text. Fix: move the "
                    "image to a message of another role, or drop the row"
                )
            mask[image.start : image.start + 1] = [False] * image.num_tokens
        return expanded, mask, placed

    def _load(self, row: AnyRow) -> AnyRow:
        place = place_of(row, self.data)
        content, values = row.messages if isinstance(row, MessageRow) else row.prompt, row.images
        if self.data.chat_template:
            assert self.data.image_column is not None, "only data with an image column has an image loader"
            content, values = place_images(content, values, self.data.image_column, place)
        else:
            plain(content, place)
        folder = Path(os.path.abspath(Path(row.source).expanduser())).parent
        loaded = tuple(self._loaded(value, folder, f"{place}: image {i}") for i, value in enumerate(values, start=1))
        name = "messages" if isinstance(row, MessageRow) else "prompt"
        return replace(row, **{name: content, "images": loaded})

    def _loaded(self, value: str | bytes | Mapping[str, Any], folder: Path, place: str) -> LoadedImage:
        try:
            image = self.files.add(value, folder)
            return LoadedImage(image, self.processor.grid(image.width, image.height))
        except ImageError as error:
            raise UserError(f"{place} ({describe(value)}): {error}. Fix: {error.fix}, or drop the row") from None


def load_processor(config: Config, folder: Path) -> tuple[ImageProcessor, int]:
    """Return the image processor and the id of the image placeholder of the model in this folder. Raise a UserError if
    the model has no vision tower, or its files disagree."""
    hf_config = read_config(folder)
    if VISION not in hf_config:
        raise UserError(
            f"model.vision=true: model {folder} has no vision tower. Fix: set model.path to a vision-language model, "
            "or set model.vision=false and data.image_column=null"
        )
    shape = vision_of(add_vision(hf_config))
    assert shape is not None, "add_vision enables the vision tower"
    processor = ImageProcessor.of(folder, config.data.min_pixels, config.data.max_pixels)
    if (shape.patch, shape.temporal_patch, shape.merge) != processor.patch_sizes:
        raise UserError(
            f"model.path={folder}: preprocessor_config.json and config.json disagree on patch_size, "
            f"temporal_patch_size and merge_size: {processor.patch_sizes} and "
            f"{(shape.patch, shape.temporal_patch, shape.merge)}. Fix: copy both files from the original model"
        )
    return processor, shape.image_token
