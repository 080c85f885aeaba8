"""Encoded images, and data rows with them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image

from megarl.config.schema import Config
from tests.paths import BASE


def picture(width: int, height: int, seed: int = 0, mode: str = "RGB") -> Image.Image:
    channels = {"RGB": 3, "RGBA": 4, "CMYK": 4, "LA": 2, "L": 1}[mode]
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, channels), np.uint8)
    return Image.fromarray(pixels.squeeze(2) if channels == 1 else pixels, mode)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def png(width: int, height: int, seed: int = 0) -> bytes:
    return encoded(picture(width, height, seed))


def jsonl(folder: Path, *rows: dict[str, Any]) -> Path:
    """Write rows with an answer."""
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps({"answer": 0} | row) + "\n" for row in rows))
    return path


def config_of(source: Path, context_length: int = 512, **data: Any) -> Config:
    document = yaml.load(BASE.read_text(), yaml.CSafeLoader)
    document["model"].update(path="unused", vision=True)
    document["rollout"].update(max_new_tokens=16, context_length=context_length)
    document["data"].update({"source": str(source), "image_column": "images"} | data)
    return Config.model_validate(document)
