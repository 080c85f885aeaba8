"""Tests of the scenes: pictures match the answers, and files depend only on the seed."""

import io
from collections import Counter
from random import Random

import numpy as np
import pyarrow.parquet as pq
from PIL import Image

from tests.scenes import COLORS, INK, SEGMENTS, choices, scene, write_scenes


def areas(picture: Image.Image) -> dict[tuple[int, ...], int]:
    return Counter(map(tuple, np.asarray(picture).reshape(-1, 3).tolist()))


def test_pictures_show_the_colors_and_digit():
    random, ink = Random(0), {digit: set() for digit in SEGMENTS}
    for _ in range(200):
        drawn = scene(random)
        found = areas(drawn.picture)
        assert {color for color, value in COLORS.items() if found[value]} == set(drawn.colored)
        ink[drawn.digit].add(found[INK])
    [one], [two], [zero] = (ink[digit] for digit in "120")
    assert 0 < one < two < zero


def test_kinds_of_shapes_have_their_areas():
    """A shape of height 2r fills about π/4, 1 or 1/2 of its box."""
    random, filled = Random(1), {"circle": [], "square": [], "triangle": []}
    for _ in range(200):
        drawn = scene(random)
        for color, kind in drawn.colored.items():
            is_color = (np.asarray(drawn.picture) == COLORS[color]).all(-1)
            rows, columns = is_color.any(1).sum(), is_color.any(0).sum()
            filled[kind].append(is_color.sum() / (rows * columns))
    means = {kind: np.mean(shares) for kind, shares in filled.items()}
    assert means["square"] == 1 and abs(means["circle"] - np.pi / 4) < 0.05 and abs(means["triangle"] - 0.5) < 0.05


def test_answers_are_uniform_for_each_question():
    """A model that does not see the picture then performs no better than chance."""
    random, answers = Random(2), {}
    for _ in range(6000):
        question, answer = scene(random).question(random)
        answers.setdefault(question, Counter())[answer] += 1
    for question, found in answers.items():
        assert set(found) == set(choices(question))
        expected = found.total() / len(found)
        assert max(abs(count - expected) for count in found.values()) < 4 * expected**0.5


def test_shuffled_rows_have_other_pictures(tmp_path):
    rows, again, shuffled = (
        pq.read_table(write_scenes(tmp_path / f"{name}.parquet", 50, seed=3, shuffled=name == "shuffled")).to_pylist()
        for name in ("rows", "again", "shuffled")
    )
    assert rows == again
    assert [row | {"images": None} for row in rows] == [row | {"images": None} for row in shuffled]
    assert all(row["images"] != other["images"] for row, other in zip(rows, shuffled, strict=True))
    assert Counter(row["images"][0]["bytes"] for row in rows) == Counter(row["images"][0]["bytes"] for row in shuffled)
    assert Image.open(io.BytesIO(rows[0]["images"][0]["bytes"])).size == (64, 64)
