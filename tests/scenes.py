"""Small pictures with questions: each picture shows a digit and up to three shapes, one per quarter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from random import Random

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageDraw

SIDE, QUARTER, SHIFT = 64, 32, 3
BACKGROUND, INK = (128, 128, 128), (255, 255, 255)
COLORS = {"red": (220, 40, 40), "green": (30, 150, 60), "blue": (40, 70, 220)}
SHAPES = ("circle", "square", "triangle")
DIGITS, COUNTS = "01234", "0123"

SEGMENTS = {
    "0": "abcdef",
    "1": "bc",
    "2": "abdeg",
    "3": "abcdg",
    "4": "bcfg",
}
"""Lit segments of a seven-segment display: a is the top one, b to f follow clockwise, g is in the middle."""

LINES = {
    "a": (0, 0, 1, 0),
    "b": (1, 0, 1, 1),
    "c": (1, 1, 1, 2),
    "d": (0, 2, 1, 2),
    "e": (0, 1, 0, 2),
    "f": (0, 0, 0, 1),
    "g": (0, 1, 1, 1),
}
"""x and y of both ends of each segment, in units of its length."""


@dataclass(frozen=True, slots=True)
class Scene:
    """A picture and the facts that questions ask about.

    Attributes:
        counts: number of shapes of each kind.
        colored: kind of the shape in each color, for the colors in the picture.
        counted: the kind whose number is uniformly distributed.
    """

    picture: Image.Image
    digit: str
    counts: Mapping[str, int]
    colored: Mapping[str, str]
    counted: str

    def questions(self) -> list[tuple[str, str]]:
        """Return all questions with their answers."""
        counts = [(how_many(shape), str(count)) for shape, count in self.counts.items()]
        return [(WHICH_DIGIT, self.digit), *counts, *((what_is(color), shape) for color, shape in self.colored.items())]

    def question(self, random: Random) -> tuple[str, str]:
        """Return a question and its answer. Over scenes, the answers are nearly uniformly distributed."""
        options = [(WHICH_DIGIT, self.digit), (how_many(self.counted), str(self.counts[self.counted]))]
        if self.colored:
            color = random.choice(list(self.colored))
            options.append((what_is(color), self.colored[color]))
        return random.choice(options)


WHICH_DIGIT = "Which digit?"


def how_many(shape: str) -> str:
    return f"How many {shape}s?"


def what_is(color: str) -> str:
    return f"What is {color}?"


def choices(question: str) -> Sequence[str]:
    """Return the possible answers."""
    if question == WHICH_DIGIT:
        return DIGITS
    return COUNTS if question.startswith("How many") else SHAPES


def scene(random: Random) -> Scene:
    counted, digit = random.choice(SHAPES), random.choice(DIGITS)
    number = random.randrange(len(COUNTS))
    others = (None, *(shape for shape in SHAPES if shape != counted))
    kinds = [counted] * number + [random.choice(others) for _ in range(len(COUNTS) - 1 - number)]
    colored = {color: kind for color, kind in zip(random.sample(list(COLORS), 3), kinds, strict=True) if kind}
    counts = {shape: kinds.count(shape) for shape in SHAPES}
    return Scene(draw(random, digit, colored), digit, counts, colored, counted)


def draw(random: Random, digit: str, colored: Mapping[str, str]) -> Image.Image:
    """Return a picture with the digit and the shapes (color -> kind) in random quarters."""
    image = Image.new("RGB", (SIDE, SIDE), BACKGROUND)
    pen = ImageDraw.Draw(image)
    places = [
        (column + random.randint(-SHIFT, SHIFT), row + random.randint(-SHIFT, SHIFT))
        for column in (QUARTER // 2, SIDE - QUARTER // 2)
        for row in (QUARTER // 2, SIDE - QUARTER // 2)
    ]
    random.shuffle(places)
    _draw_digit(pen, digit, *places[0])
    for (color, kind), place in zip(colored.items(), places[1:], strict=False):
        _draw_shape(pen, kind, COLORS[color], *place, random.randint(8, 11))
    return image


def _draw_digit(pen: ImageDraw.ImageDraw, digit: str, x: int, y: int, length: int = 10) -> None:
    for segment in SEGMENTS[digit]:
        left, top, right, bottom = (length * unit for unit in LINES[segment])
        x0, y0 = x - length // 2, y - length
        pen.line((x0 + left, y0 + top, x0 + right, y0 + bottom), INK, width=4)


def _draw_shape(pen: ImageDraw.ImageDraw, kind: str, color: tuple[int, ...], x: int, y: int, radius: int) -> None:
    left, top, right, bottom = box = (x - radius, y - radius, x + radius, y + radius)
    match kind:
        case "circle":
            pen.ellipse(box, color)
        case "square":
            pen.rectangle(box, color)
        case "triangle":
            pen.polygon([(x, top), (left, bottom), (right, bottom)], color)


def encoded(picture: Image.Image) -> bytes:
    """Return the picture as a PNG file."""
    file = BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def write_scenes(path: Path, size: int, seed: int, shuffled: bool = False) -> Path:
    """Write a question about each of `size` scenes as a parquet file, and return its path.

    Columns are prompt (messages with <image>), images ([{bytes}]) and answer. If `shuffled`, rows have the images of
    other rows.
    """
    random = Random(seed)
    scenes = [scene(random) for _ in range(size)]
    asked = [one.question(random) for one in scenes]
    images = [encoded(one.picture) for one in scenes]
    if shuffled:
        images = images[1:] + images[:1]
    rows = [
        {"prompt": [{"role": "user", "content": f"<image>{question}"}], "images": [{"bytes": image}], "answer": answer}
        for (question, answer), image in zip(asked, images, strict=True)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path
