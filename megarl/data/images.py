"""Encoded images as patches for a vision tower."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megarl.core.errors import UserError
from megarl.core.files import read_foreign_object
from megarl.core.prompt_images import PromptImage

if TYPE_CHECKING:
    from PIL import Image
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
"""Pillow's names of the supported formats. Others, such as EPS, start external programs."""

MAX_IMAGE_PIXELS = 89_478_485
"""Maximum area of an image. It is the limit above which Pillow warns of decompression bombs."""

MAX_ASPECT_RATIO = 200
"""Maximum ratio of an image's sides in transformers' processor."""

PROCESSOR = "Qwen2VLImageProcessor"
"""Class of the image processor of Qwen2.5-VL, Qwen3-VL and Qwen3.5. Suffixes, such as Fast, name implementations."""

WHITE = (255, 255, 255)


class ImageError(ValueError):
    """An image that cannot be used. The message is the reason, to follow a description of the image.

    Attributes:
        fix: what the user can do.
    """

    def __init__(self, reason: str, fix: str = "replace the image, or drop the row") -> None:
        super().__init__(reason)
        self.fix = fix


def decode(file: bytes) -> Image.Image:
    """Return the first frame of an encoded image as RGB, rotated according to its EXIF orientation, with transparent
    areas in front of white, as vLLM decodes images. Raise ImageError if it is damaged or too large, or its format is
    not one of FORMATS."""
    from PIL import Image, ImageOps

    try:
        image: Image.Image = Image.open(io.BytesIO(file), formats=FORMATS)
        _require_size(image)
        with suppress(Exception):  # as in vLLM, an image with damaged EXIF data is not rotated
            image = ImageOps.exif_transpose(image)
        image.load()
        _require_size(image)  # some formats contain several sizes and select one while loading
        return _to_rgb(image)
    except ImageError:
        raise
    except Image.UnidentifiedImageError:
        raise ImageError(f"it is not an image in a supported format ({', '.join(FORMATS)})") from None
    except Image.DecompressionBombError:
        raise ImageError(f"it has more than {MAX_IMAGE_PIXELS} pixels") from None
    except Exception as error:  # a damaged file can raise almost any exception
        raise ImageError(f"it cannot be decoded ({' '.join(str(error).split()) or type(error).__name__})") from error


def _require_size(image: Image.Image) -> None:
    if image.width * image.height > MAX_IMAGE_PIXELS:
        raise ImageError(f"it has {image.width} × {image.height} pixels, more than the maximum of {MAX_IMAGE_PIXELS}")


def _to_rgb(image: Image.Image) -> Image.Image:
    from PIL import Image

    if image.mode == "RGB":
        return image
    if image.mode not in ("RGBA", "LA", "PA") and "transparency" not in image.info:
        return image.convert("RGB")
    image = image.convert("RGBA")
    background = Image.new("RGB", image.size, WHITE)
    background.paste(image, mask=image.getchannel("A"))
    return background


@dataclass(frozen=True, slots=True)
class ImageProcessor:
    """Resizes images, normalizes them and splits them into patches, with transformers' processor."""

    processor: Qwen2VLImageProcessorPil

    @classmethod
    def of(cls, folder: Path, min_pixels: int | None = None, max_pixels: int | None = None) -> ImageProcessor:
        """Return the processor of a model. Raise a UserError if the folder has no settings of a supported processor, or
        if the limits contradict each other.

        Args:
            folder: the model's Hugging Face folder, with preprocessor_config.json or processor_config.json.
            min_pixels, max_pixels: limits of the area of resized images; None: as in the folder.
        """
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        settings = _settings(folder)
        overrides = {"min_pixels": min_pixels, "max_pixels": max_pixels}
        settings |= {name: value for name, value in overrides.items() if value is not None}
        processor = Qwen2VLImageProcessorPil(**settings)
        smallest, largest = processor.size["shortest_edge"], processor.size["longest_edge"]
        if smallest > largest:
            key = "data.min_pixels" if min_pixels is not None else "data.max_pixels"
            raise UserError(
                f"{key}={smallest if min_pixels is not None else largest}: images would have at least {smallest} and "
                f"at most {largest} pixels. Fix: set data.min_pixels <= data.max_pixels"
            )
        return cls(processor)

    @property
    def patch_sizes(self) -> tuple[int, int, int]:
        """Height and width of a patch in pixels, number of its frames, and number of patches in height and width that
        are merged into one feature."""
        return self.processor.patch_size, self.processor.temporal_patch_size, self.processor.merge_size

    def grid(self, width: int, height: int) -> tuple[int, int, int]:
        """Return the numbers of patches in time, height and width of an image with this size in pixels. Raise
        ImageError if one side is more than MAX_ASPECT_RATIO times as long as the other."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
            raise ImageError(
                f"its size is {width} × {height} pixels, but the model supports aspect ratios of at most "
                f"{MAX_ASPECT_RATIO}",
                "crop the image, or drop the row",
            )
        patch, size = self.processor.patch_size, self.processor.size
        rows, columns = smart_resize(
            height, width, patch * self.processor.merge_size, size["shortest_edge"], size["longest_edge"]
        )
        return 1, rows // patch, columns // patch

    def num_tokens(self, grid: Sequence[int]) -> int:
        """Return the number of features, and so of placeholders, of an image."""
        return math.prod(grid) // self.processor.merge_size**2

    def patches(self, files: Sequence[bytes]) -> NDArray[np.float32]:
        """Return the patches of encoded images, one image after the other, float32
        [P, channels · time · height · width of a patch]."""
        return self._process(files)["pixel_values"]

    def patches_in(self, image: PromptImage) -> NDArray[np.float32]:
        """Return the patches of an image in a prompt, whose file is here as bytes; see `patches`. Raise a UserError
        unless they have the grid in the prompt."""
        try:
            processed = self._process([image.file])
            grid = tuple(processed["image_grid_thw"][0].tolist())
            if grid != tuple(image.grid):
                raise ValueError(f"this node produces grid {grid}, but the driver computed {image.grid}")
        except ValueError as error:  # ImageError is one
            raise UserError(
                f"image {image.digest}: {error}. Fix: install the same Pillow and transformers versions, and use the "
                "same model folder, on all nodes"
            ) from None
        return processed["pixel_values"]

    def _process(self, files: Sequence[bytes]) -> Mapping[str, Any]:
        return self.processor([decode(file) for file in files], return_tensors="np")


def _settings(folder: Path) -> dict[str, Any]:
    """Return the settings of a model's image processor. transformers 5 writes them into processor_config.json, and
    ignores the other file if they are there."""
    for name in ("processor_config.json", "preprocessor_config.json"):
        if not (folder / name).is_file():
            continue
        settings = read_foreign_object(folder / name, "model.path: ", "copy the file from the original model again")
        if name == "processor_config.json":
            settings = settings.get("image_processor")
        if settings is None:
            continue
        kind = str(settings.get("image_processor_type", PROCESSOR))
        if not kind.startswith(PROCESSOR):
            raise UserError(
                f"model.vision=true: the image processor of {folder}, {kind}, is not supported. Fix: use Qwen2.5-VL, "
                "Qwen3-VL or Qwen3.5, or set model.vision=false"
            )
        return dict(settings)
    raise UserError(
        f"model.vision=true: {folder} has no preprocessor_config.json. Fix: copy the file from the original model into "
        "the folder, or set model.vision=false"
    )
