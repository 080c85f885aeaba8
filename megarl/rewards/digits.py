"""A rule that rewards images of digits."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megarl.rewards.image import checked
from megarl.rewards.options import checks_rows

HEIGHT, WIDTH = 16, 12
"""Size in pixels to which each digit's part of the image is scaled before it is compared."""

FONT_SIZES = (14, 15)
SHIFTS = (-1, 0, 1)
"""Font sizes, and shifts in pixels, of the renderings that the image is compared with."""

MARGIN = 0.2
"""The score rises linearly while the difference between two digits' correlations grows from −MARGIN/2 to MARGIN/2."""


@functools.cache
def glyph(digit: int, size: int) -> NDArray[np.float32]:
    """Return a white digit on a black background in Pillow's default font, float32 [HEIGHT, WIDTH] in [0, 1]."""
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("L", (WIDTH, HEIGHT))
    center = (WIDTH / 2, HEIGHT / 2)
    ImageDraw.Draw(image).text(center, str(digit), fill=255, font=ImageFont.load_default(size), anchor="mm")
    return np.asarray(image, np.float32) / np.float32(255)


def _digits(answer: Any) -> list[int]:
    text = str(answer)
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"rendered_digits: the answer {answer!r} is not a number. Fix: use digits such as 47")
    return list(map(int, text))


@checks_rows(_digits)
def rendered_digits(prompt: str, response: NDArray[np.uint8], answer: Any) -> float:
    """Return how well the image shows the digits of the answer, from 0 to 1. The digits must be white on black, side by
    side, and as high as the image.

    A digit's score is c · clip(1/2 + (c − c')/MARGIN, 0, 1), where c is the normalized correlation between its cell and
    the most similar rendering of the digit, and c' is the highest correlation with any other digit. The result is the
    mean over digits.

    Raises:
        ValueError: the answer is not a number.
    """
    from PIL import Image

    digits = _digits(answer)
    gray = Image.fromarray(checked(response)).convert("L").resize((WIDTH * len(digits), HEIGHT), Image.Resampling.BOX)
    cells = np.split(np.asarray(gray, np.float32), len(digits), axis=1)
    return float(np.mean([_score(cell, digit) for cell, digit in zip(cells, digits, strict=True)]))


def _score(cell: NDArray[np.float32], digit: int) -> float:
    similarities = (_templates() @ _normalized(cell.reshape(1, -1))[0]).max(1)
    own, other = similarities[digit], np.delete(similarities, digit).max()
    return float(max(0.0, own) * np.clip(0.5 + (own - other) / MARGIN, 0, 1))


@functools.cache
def _templates() -> NDArray[np.float32]:
    """Return each digit in all sizes and shifts, float32 [10, renderings, pixels], with mean 0 and norm 1."""
    shifts = [(row, column) for row in SHIFTS for column in SHIFTS]
    rendered = [
        [np.roll(glyph(digit, size), shift, (0, 1)).ravel() for size in FONT_SIZES for shift in shifts]
        for digit in range(10)
    ]
    return _normalized(np.array(rendered))


def _normalized(pixels: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return rows of pixels [..., P] with mean 0 and norm 1, or zeros for a flat image."""
    centered = pixels - pixels.mean(-1, keepdims=True)
    return centered / np.maximum(np.linalg.norm(centered, axis=-1, keepdims=True), 1e-6)
