"""Decode images and split them into patches for a vision tower."""

from __future__ import annotations

import base64
import io
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megarl.core.errors import UserError
from megarl.core.files import read_foreign_object, shown
from megarl.core.prompt_images import PromptImage

if TYPE_CHECKING:
    from PIL import Image
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""Pillow's names of the supported formats. EPS is excluded because it starts an external program; AVIF and JPEG 2000,
because even small files can take very long to decode."""

MAX_IMAGE_PIXELS = 89_478_485
"""Maximum area of an image. It is the limit above which Pillow warns of decompression bombs."""

MAX_SCANS = 100
"""Maximum number of scans in a JPEG file, as in libtiff. Each scan of a progressive file takes a pass over the whole
image, about 0.05 s for 89 million pixels, but may be as small as 150 bytes. Without the limit, a file of 64 MiB could
have 450,000 scans, which take 6 hours. The other formats decode each pixel only once."""

_SEGMENT = re.compile(rb"\xff([\x02-\xcf\xd8-\xfe])")
"""Matches a JPEG marker before a segment. Markers within a scan, 0 and 0xd0 to 0xd7, do not begin a segment."""

_END_OF_IMAGE, _START_OF_SCAN = b"\xd9", b"\xda"

LARGE_PIXELS = 2**24
"""Area above which images are decoded one at a time, because decoding can take 9 bytes per pixel."""

MAX_ASPECT_RATIO = 200
"""Maximum aspect ratio that transformers' processor accepts."""

PROCESSOR = "Qwen2VLImageProcessor"
"""Image processor class of Qwen2.5-VL, Qwen3-VL and Qwen3.5. A suffix such as Fast selects an implementation."""

WHITE = (255, 255, 255)

LOSSLESS = ("BMP", "GIF", "PNG", "PPM", "TIFF")
"""Formats whose images `shrunk_url` writes as PNG files. Other images are usually photos, whose JPEG files are much
smaller."""

JPEG_QUALITY = 95

_large_image = Lock()


class ImageError(ValueError):
    """Raised for an unusable image. The message states the reason; callers prefix the image's description.

    Attributes:
        fix: what the sender of the image can do.
    """

    def __init__(self, reason: str, fix: str = "replace the image") -> None:
        super().__init__(reason)
        self.fix = fix


def decode(file: bytes) -> Image.Image:
    """Return the first frame of an encoded image as RGB, rotated according to its EXIF orientation, and composited onto
    white if transparent, as in vLLM. Raise ImageError if it is damaged or too large, or its format is not one of
    FORMATS."""
    from PIL import Image, ImageOps

    try:
        image: Image.Image = Image.open(io.BytesIO(file), formats=FORMATS)
        _require_size(image)
        if image.format in ("JPEG", "MPO") and _num_scans(file) > MAX_SCANS:
            raise ImageError(f"it is a JPEG file with more than {MAX_SCANS} scans", "save it again")
        with _large_image if image.width * image.height > LARGE_PIXELS else nullcontext():
            with suppress(Exception):  # as in vLLM, an image with damaged EXIF data is not rotated
                image = ImageOps.exif_transpose(image)
            image.load()
            _require_size(image)  # some formats choose one of several sizes only on load
            return _to_rgb(image)
    except (ImageError, MemoryError):
        raise
    except Image.UnidentifiedImageError:
        raise ImageError(f"it is not an image in a supported format ({', '.join(FORMATS)})") from None
    except Image.DecompressionBombError:
        raise ImageError(f"it has more than {MAX_IMAGE_PIXELS} pixels") from None
    except Exception as error:  # a damaged file can raise almost any exception
        raise ImageError(f"it cannot be decoded ({' '.join(str(error).split()) or type(error).__name__})") from error


def size_of(file: bytes) -> tuple[int, int]:
    """Return the width and height of an image in pixels. Decode the whole image, to detect damage. Raise the errors of
    `decode`."""
    return decode(file).size


def data_url(file: bytes, media_type: str = "application/octet-stream") -> str:
    """Return a data: URL with this content."""
    return f"data:{media_type};base64,{base64.b64encode(file).decode()}"


def shrunk_url(file: bytes, max_pixels: int) -> str:
    """Return an encoded image as a data: URL for a server. The image is decoded as in `decode`, shrunk to at most
    `max_pixels` pixels, and encoded as a PNG or JPEG file without metadata. Raise the errors of `decode`."""
    from PIL import Image

    image = decode(file)
    with Image.open(io.BytesIO(file), formats=FORMATS) as original:
        kind = "PNG" if original.format in LOSSLESS else "JPEG"
    if (factor := math.sqrt(max_pixels / (image.width * image.height))) < 1:
        width, height = (max(1, int(side * factor)) for side in image.size)
        image = image.resize((min(width, max_pixels), min(height, max_pixels)))
    image.info.clear()  # Pillow would write the original file's transparency, color profile and comments
    stream = io.BytesIO()
    image.save(stream, kind, quality=JPEG_QUALITY)
    return data_url(stream.getvalue(), f"image/{kind.lower()}")


def _require_size(image: Image.Image) -> None:
    if not image.width * image.height:
        raise ImageError(f"it is empty ({image.width} × {image.height} pixels)")
    if image.width * image.height > MAX_IMAGE_PIXELS:
        raise ImageError(f"it has {image.width} × {image.height} pixels, more than the maximum of {MAX_IMAGE_PIXELS}")


def _num_scans(file: bytes) -> int:
    """Return the number of scans in a JPEG file, or MAX_SCANS + 1 if there are more."""
    number, position = 0, 2
    while number <= MAX_SCANS and (marker := _SEGMENT.search(file, position)) and marker[1] != _END_OF_IMAGE:
        number += marker[1] == _START_OF_SCAN
        position = marker.end() + max(2, int.from_bytes(file[marker.end() : marker.end() + 2]))
    return number


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
        """Return the processor of a model. Raise a UserError if the folder has no valid settings for a supported
        processor, or if the limits contradict each other.

        Args:
            folder: the model's Hugging Face folder, with preprocessor_config.json or processor_config.json.
            min_pixels, max_pixels: limits of the area of resized images; None: as in the folder.
        """
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        settings = _settings(folder)
        overrides = {"min_pixels": min_pixels, "max_pixels": max_pixels}
        settings |= {name: value for name, value in overrides.items() if value is not None}
        try:
            processor = Qwen2VLImageProcessorPil(**settings)
        except (TypeError, ValueError) as error:
            raise _unusable(folder, str(error)) from None
        smallest, largest = processor.size["shortest_edge"], processor.size["longest_edge"]
        sizes = {
            "size.shortest_edge": smallest,
            "size.longest_edge": largest,
            "patch_size": processor.patch_size,
            "temporal_patch_size": processor.temporal_patch_size,
            "merge_size": processor.merge_size,
        }
        for name, value in sizes.items():
            if type(value) is not int or value < 1:
                raise _unusable(folder, f"{name}={shown(value)} is not a positive integer")
        if smallest > largest:
            key = "data.min_pixels" if min_pixels is not None else "data.max_pixels"
            raise UserError(
                f"{key}={smallest if min_pixels is not None else largest}: the minimum image area {smallest} exceeds "
                f"the maximum {largest} (from the config and the model's preprocessor_config.json). Fix: set "
                f"data.min_pixels to at most {largest}, or raise data.max_pixels"
            )
        return cls(processor)

    @property
    def patch_sizes(self) -> tuple[int, int, int]:
        """(side of a patch in pixels, frames per patch, number of patches per side that are merged into a feature)."""
        return self.processor.patch_size, self.processor.temporal_patch_size, self.processor.merge_size

    def grid(self, width: int, height: int) -> tuple[int, int, int]:
        """Return the numbers of patches in time, height and width of an image with this size in pixels. Raise
        ImageError if one side is more than MAX_ASPECT_RATIO times as long as the other."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
            raise ImageError(
                f"its size is {width} × {height} pixels, but the model supports aspect ratios of at most "
                f"{MAX_ASPECT_RATIO}",
                "crop the image",
            )
        patch, size = self.processor.patch_size, self.processor.size
        rows, columns = smart_resize(
            height, width, patch * self.processor.merge_size, size["shortest_edge"], size["longest_edge"]
        )
        return 1, rows // patch, columns // patch

    def num_tokens(self, grid: Sequence[int]) -> int:
        """Return an image's number of features, which equals its number of placeholders."""
        return math.prod(grid) // self.processor.merge_size**2

    def patches(self, files: Sequence[bytes]) -> NDArray[np.float32]:
        """Return the patches of encoded images, one image after the other, float32
        [P, channels · time · height · width of a patch]."""
        return self._process(files)["pixel_values"]

    def patches_in(self, image: PromptImage) -> NDArray[np.float32]:
        """Return the patches of an image whose `file` contains bytes; see `patches`. Raise a UserError if their grid
        differs from the image's `grid`, which the driver computed."""
        try:
            processed = self._process([image.file])
            grid = tuple(processed["image_grid_thw"][0].tolist())
            if grid != tuple(image.grid):
                raise ValueError(f"this node produces grid {grid}, but the driver computed {image.grid}")
        except ValueError as error:  # ImageError is a ValueError
            raise UserError(
                f"image {image.digest}: {error}. Fix: install the same Pillow and transformers versions, and use the "
                "same model folder, on all nodes"
            ) from None
        return processed["pixel_values"]

    def _process(self, files: Sequence[bytes]) -> Mapping[str, Any]:
        return self.processor([decode(file) for file in files], return_tensors="np")


def _unusable(folder: Path, reason: str) -> UserError:
    return UserError(
        f"model.path: {folder}: invalid image processor settings ({reason}). Fix: copy "
        "preprocessor_config.json from the original model again"
    )


def _settings(folder: Path) -> dict[str, Any]:
    """Return the settings of a model's image processor. transformers 5 stores them in processor_config.json, which
    takes precedence over preprocessor_config.json."""
    for name in ("processor_config.json", "preprocessor_config.json"):
        if not (folder / name).is_file():
            continue
        settings = read_foreign_object(folder / name, "model.path: ", "copy the file from the original model again")
        if name == "processor_config.json":
            settings = settings.get("image_processor")
        if settings is None:
            continue
        if not isinstance(settings, dict):
            raise _unusable(folder, f"image_processor={shown(settings)} is not an object")
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
