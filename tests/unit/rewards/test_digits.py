"""The rule for rendered digits, against SciPy's correlation of Pillow's own renderings."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

from megarl.rewards.digits import MARGIN, rendered_digits


def drawn(text: str, size: int = 15, shift: tuple[int, int] = (0, 0)) -> np.ndarray:
    """Return white digits on black, uint8 [16, 12 per digit, 3], each shifted from the center of its cell."""
    places = []
    for digit in text:
        image = Image.new("RGB", (12, 16))
        ImageDraw.Draw(image).text((6, 8), digit, fill="white", font=ImageFont.load_default(size), anchor="mm")
        places.append(np.roll(np.asarray(image), shift, (0, 1)))
    return np.concatenate(places, 1)


@pytest.mark.parametrize(("size", "shift"), [(14, (0, 0)), (15, (1, -1)), (15, (-1, 0))])
def test_renderings_of_the_answer_have_the_highest_reward(size, shift):
    answers = ["07", "47", "38", "912", "5"]
    assert [rendered_digits("", drawn(answer, size, shift), answer) for answer in answers] == pytest.approx([1.0] * 5)


def test_only_the_right_digits_are_rewarded():
    image = drawn("47")
    others = [rendered_digits("", image, f"{number:02}") for number in range(100) if number != 47]
    assert rendered_digits("", image, 47) == pytest.approx(1.0)
    assert max(others) <= 0.75 and min(others) == 0
    assert rendered_digits("", image, "42") == pytest.approx(0.5 + rendered_digits("", drawn("77"), "42"), abs=0.1)


def test_score_is_the_correlation_times_the_margin():
    noise = np.random.default_rng(0).normal(0, 90, (16, 12))
    image = np.clip(drawn("8")[..., 0] + noise, 0, 255).astype(np.uint8)
    similarities = [
        max(
            np.corrcoef(image.ravel(), drawn(str(digit), size, (row, column))[..., 0].ravel())[0, 1]
            for size in (14, 15)
            for row in (-1, 0, 1)
            for column in (-1, 0, 1)
        )
        for digit in range(10)
    ]
    for digit in range(10):
        own, other = similarities[digit], max(similarities[:digit] + similarities[digit + 1 :])
        expected = max(0, own) * np.clip(0.5 + (own - other) / MARGIN, 0, 1)
        assert rendered_digits("", np.repeat(image[..., None], 3, 2), digit) == pytest.approx(expected, abs=1e-5)
    assert 0 < expected < 1 or 0 < similarities[8] < 1


def test_larger_images_are_scaled():
    large = np.asarray(Image.fromarray(drawn("63")).resize((240, 160), Image.Resampling.NEAREST))
    assert rendered_digits("", large, "63") == pytest.approx(1.0, abs=1e-3)


def test_flat_and_inverted_images_have_no_reward():
    assert rendered_digits("", np.full((16, 24, 3), 128, np.uint8), "47") == 0
    assert rendered_digits("", 255 - drawn("47"), "47") == pytest.approx(0, abs=0.05)
