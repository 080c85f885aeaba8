from __future__ import annotations

import base64
import importlib.util
import io
import json
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageCms

from megarl.core.errors import UserError
from megarl.core.prompt_images import PromptImage
from megarl.data import images
from megarl.data.images import (
    JPEG_QUALITY,
    MAX_IMAGE_PIXELS,
    MAX_SCANS,
    ImageError,
    ImageProcessor,
    decode,
    shrunk_url,
    size_of,
)
from tests import tiny_vision
from tests.closeness import FACTOR
from tests.unit.data.image_data import encoded, picture, png


@pytest.fixture(scope="module")
def vllm_images() -> ModuleType:
    """vLLM's functions for images, without the rest of vLLM, which needs torchvision."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations is not None
    path = Path(spec.submodule_search_locations[0]) / "multimodal" / "image.py"
    module_spec = importlib.util.spec_from_file_location("vllm_images", path)
    assert module_spec is not None and module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Model folders by kind."""
    kinds: tuple[tiny_vision.Kind, ...] = ("qwen2_5_vl", "qwen3_vl")
    return {kind: tiny_vision.build(tmp_path_factory.mktemp(kind), kind) for kind in kinds}


def rotated(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[Image.ExifTags.Base.Orientation] = orientation
    return encoded(picture(20, 10), "JPEG", exif=exif)


def animated() -> bytes:
    return encoded(picture(12, 8), "GIF", save_all=True, append_images=[picture(12, 8, 1)])


FILES = {
    "rgb": png(20, 10),
    "jpeg": encoded(picture(20, 10), "JPEG"),
    "webp": encoded(picture(20, 10, mode="RGBA"), "WEBP", lossless=True),
    "rgba": encoded(picture(20, 10, mode="RGBA")),
    "grey": encoded(picture(20, 10, mode="L")),
    "grey and alpha": encoded(picture(20, 10, mode="LA")),
    "black and white": encoded(picture(20, 10, mode="L").convert("1")),
    "16 bits": encoded(Image.fromarray(np.arange(0, 65536, 331, np.uint16)[:180].reshape(12, 15))),
    "palette": encoded(picture(20, 10).convert("P")),
    "transparent palette": encoded(picture(20, 10).convert("P"), transparency=3),
    "transparent color": encoded(picture(20, 10), transparency=(1, 2, 3)),
    "cmyk": encoded(picture(20, 10, mode="CMYK"), "JPEG"),
    "rotated": rotated(6),
    "mirrored": rotated(2),
    "animated": animated(),
}


@pytest.mark.parametrize("name", FILES)
def test_images_are_decoded_as_in_vllm(vllm_images: ModuleType, name: str) -> None:
    image = vllm_images.normalize_image(vllm_images.open_image(io.BytesIO(FILES[name])))
    image.load()
    reference = image if image.mode == "RGB" else vllm_images.convert_image_mode(image, "RGB")
    decoded = decode(FILES[name])
    assert (decoded.mode, decoded.size) == ("RGB", reference.size)
    assert np.array_equal(np.asarray(decoded), np.asarray(reference))


@pytest.mark.parametrize("name", FILES)
def test_data_urls_show_the_decoded_pixels(name: str) -> None:
    """A program that ignores orientation, transparency and animation sees the same pixels."""
    header, _, content = shrunk_url(FILES[name], 200).partition(",")
    shown, expected = Image.open(io.BytesIO(base64.b64decode(content))), decode(FILES[name])
    is_photo = Image.open(io.BytesIO(FILES[name])).format in ("JPEG", "WEBP")
    assert header == f"data:image/{'jpeg' if is_photo else 'png'};base64" and shown.format == header[11:-7].upper()
    assert (shown.mode, getattr(shown, "n_frames", 1)) == ("RGB", 1)
    if shown.width * shown.height < 200 or is_photo:  # compressed again
        reference = encoded(expected.resize(shown.size), "JPEG" if is_photo else "PNG", quality=JPEG_QUALITY)
        expected = Image.open(io.BytesIO(reference))
    np.testing.assert_array_equal(np.asarray(shown), np.asarray(expected))


@pytest.mark.parametrize(
    ("size", "max_pixels", "expected"),
    [((40, 20), 800, (40, 20)), ((40, 20), 799, (39, 19)), ((40, 20), 200, (20, 10)), ((300, 2), 60, (60, 1))],
)
def test_data_urls_shrink_large_images(size: tuple, max_pixels: int, expected: tuple) -> None:
    content = shrunk_url(png(*size), max_pixels).partition(",")[2]
    shown = decode(base64.b64decode(content))
    assert shown.size == expected and shown.width * shown.height <= max_pixels


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_data_urls_have_no_metadata(kind: str) -> None:
    exif = Image.Exif()
    exif[Image.ExifTags.Base.Artist] = "metadata"
    exif.get_ifd(Image.ExifTags.IFD.GPSInfo)[Image.ExifTags.GPS.GPSLatitudeRef] = "N"
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    options: dict[str, Any] = {"comment": b"metadata"} if kind == "JPEG" else {}
    file = encoded(picture(20, 10), kind, exif=exif, icc_profile=profile, **options)
    assert b"metadata" in file and Image.open(io.BytesIO(file)).getexif()
    sent = base64.b64decode(shrunk_url(file, 200).partition(",")[2])
    image = Image.open(io.BytesIO(sent))
    assert b"metadata" not in sent and not image.getexif() and not {"comment", "icc_profile"} & image.info.keys()


def test_exif_orientation_swaps_the_sides() -> None:
    assert decode(rotated(6)).size == size_of(rotated(6)) == (10, 20)


def test_large_images_are_decoded_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.data.images.LARGE_PIXELS", 10 * 20)
    with ThreadPoolExecutor(1) as pool, images._large_image:
        assert pool.submit(size_of, png(20, 10)).result() == (20, 10)
        large = pool.submit(size_of, png(20, 11))
        with pytest.raises(TimeoutError):
            large.result(0.2)
        images._large_image.release()
        assert large.result() == (20, 11)
        images._large_image.acquire()


def with_scans(count: int) -> bytes:
    """Return a progressive JPEG file whose last scan is repeated. Its metadata and trailer contain scans as well."""
    file = encoded(picture(64, 64), "JPEG", progressive=True, comment=200 * b"\xff\xda\0\x02")
    last = file.rindex(b"\xff\xda")
    num_earlier = file.count(b"\xff\xda") - 200 - 1
    return file[:last] + file[last:-2] * (count - num_earlier) + file[-2:] + 200 * b"\xff\xda\0\x02"


def test_jpeg_files_with_many_scans_are_errors() -> None:
    assert size_of(with_scans(MAX_SCANS)) == (64, 64)
    with pytest.raises(ImageError, match="it is a JPEG file with more than 100 scans"):
        decode(with_scans(MAX_SCANS + 1))


def test_exhausted_memory_is_not_a_damaged_image(monkeypatch: pytest.MonkeyPatch) -> None:
    def exhaust(image: Image.Image) -> None:
        raise MemoryError

    file = png(20, 10)
    monkeypatch.setattr(Image.Image, "load", exhaust)
    with pytest.raises(MemoryError):
        size_of(file)


def png_of_size(width: int, height: int) -> bytes:
    """Return a PNG file of this size with the pixels of a small one."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(
    ("file", "reason"),
    [
        (b"", "it is not an image in a supported format"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "it is not an image in a supported format"),
        (png(40, 40)[:900], "it cannot be decoded"),
        (FILES["jpeg"][:400], "it cannot be decoded"),
        (png_of_size(0, 9), "it is not an image in a supported format"),
        (png_of_size(MAX_IMAGE_PIXELS // 2, 3), "it has .* more than the maximum of 89478485"),
        (png_of_size(60_000, 60_000), "it has more than 89478485 pixels"),
    ],
    ids=["empty", "eps", "truncated png", "truncated jpeg", "no width", "large", "bomb"],
)
def test_unusable_images_are_rejected(file: bytes, reason: str) -> None:
    with pytest.raises(ImageError, match=reason):
        decode(file)


def test_patches_are_normalized_blocks_of_pixels(folders: dict[str, Path]) -> None:
    processor = ImageProcessor.of(folders["qwen3_vl"])
    image = picture(64, 32)  # the size of whole patches, so the image is not resized
    patches = processor.patches([encoded(image)])
    assert processor.grid(64, 32) == (1, 2, 4) and processor.num_tokens((1, 2, 4)) == 2
    pixels = (np.asarray(image, np.float64) / 255 - 0.5) / 0.5
    places = [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3)]  # blocks of 2 × 2 patches
    expected = []
    for row, column in places:
        block = pixels[16 * row : 16 * row + 16, 16 * column : 16 * column + 16].transpose(2, 0, 1)
        expected.append(np.stack((block, block), axis=1).ravel())  # two equal frames
    assert patches.dtype == np.float32 and patches.shape == (8, 3 * 2 * 16 * 16)
    np.testing.assert_allclose(patches, expected, rtol=0, atol=FACTOR * np.finfo(np.float32).eps)


def test_pixel_limits_override_the_models(folders: dict[str, Path]) -> None:
    folder = folders["qwen2_5_vl"]
    assert ImageProcessor.of(folder).grid(560, 280) == (1, 2, 4)
    assert ImageProcessor.of(folder, max_pixels=14**2 * 128).grid(560, 280) == (1, 8, 16)
    assert ImageProcessor.of(folder).grid(28, 28) == (1, 2, 2)
    assert ImageProcessor.of(folder, min_pixels=56**2).grid(28, 28) == (1, 4, 4)
    with pytest.raises(UserError, match=r"data.min_pixels=4000: the minimum image area 4000 exceeds the maximum 3136"):
        ImageProcessor.of(folder, min_pixels=4000)


def test_extreme_aspect_ratios_are_rejected(folders: dict[str, Path]) -> None:
    processor = ImageProcessor.of(folders["qwen3_vl"])
    assert processor.num_tokens(processor.grid(200, 1)) > 0
    with pytest.raises(ImageError, match=r"its size is 201 × 1 pixels, but the model supports aspect ratios"):
        processor.grid(201, 1)


def test_nested_processor_config_takes_precedence(folders: dict[str, Path], tmp_path: Path) -> None:
    settings = (folders["qwen3_vl"] / "preprocessor_config.json").read_text()
    (tmp_path / "preprocessor_config.json").write_text(settings)
    nested = {"image_processor": json.loads(settings) | {"merge_size": 1}, "processor_class": "Qwen3VLProcessor"}
    (tmp_path / "processor_config.json").write_text(json.dumps(nested))
    assert ImageProcessor.of(tmp_path).patch_sizes == (16, 2, 1)
    (tmp_path / "processor_config.json").write_text("{}")
    assert ImageProcessor.of(tmp_path).patch_sizes == (16, 2, 2)


def test_models_without_a_known_processor_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no preprocessor_config.json. Fix: copy the file"):
        ImageProcessor.of(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text('{"image_processor_type": "SiglipImageProcessor"}')
    with pytest.raises(UserError, match=r"SiglipImageProcessor, is not supported. Fix: use Qwen2.5-VL"):
        ImageProcessor.of(tmp_path)


@pytest.mark.parametrize(
    ("file", "settings", "reason"),
    [
        ("preprocessor_config.json", {"size": {"height": 1}}, r"size must have one of"),
        ("preprocessor_config.json", {"size": {"height": 1, "width": 1}}, r"size.shortest_edge=None is not a positive"),
        ("preprocessor_config.json", {"patch_size": "14"}, r"patch_size='14' is not a positive integer"),
        ("processor_config.json", {"image_processor": "x"}, r"image_processor='x' is not an object"),
    ],
)
def test_invalid_processor_settings_are_rejected(tmp_path: Path, file: str, settings: dict, reason: str) -> None:
    (tmp_path / file).write_text(json.dumps(settings))
    with pytest.raises(UserError, match=rf"invalid image processor settings \({reason}.*Fix: copy prep"):
        ImageProcessor.of(tmp_path)


def test_patches_of_another_grid_or_file_are_rejected(folders: dict[str, Path]) -> None:
    """Another library version on a node may resize images differently, or fail to read a file."""
    file = png(64, 64)
    processor = ImageProcessor.of(folders["qwen3_vl"])
    image = PromptImage(0, 4, processor.grid(64, 64), "digest", file)
    np.testing.assert_array_equal(processor.patches_in(image), processor.patches([file]))
    transposed = replace(image, grid=(1, 2, 8))  # as many patches
    with pytest.raises(UserError, match=r"image digest: this node .* \(1, 4, 4\), .* \(1, 2, 8\)\. Fix: install"):
        processor.patches_in(transposed)
    with pytest.raises(UserError, match=r"image digest: it is not an image .*\. Fix: install"):
        processor.patches_in(replace(image, file=b"damaged"))
