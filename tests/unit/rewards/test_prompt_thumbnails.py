"""Images of prompts in a step's files: thumbnails, their limits, and the fields in each line."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from megarl.core.prompt import Prompt
from megarl.core.score import Score
from megarl.rewards import prompt_thumbnails
from megarl.rewards.prompt_thumbnails import THUMBNAILS, thumbnail_path, write_thumbnails
from megarl.rewards.rollout_file import append_rollouts
from megarl.rewards.rollout_images import GRID, image_folder
from tests.prompt_image_run import PLACEHOLDER_TEXT, decode, encoded, prompt, sample

RED, GREEN, BLUE = (200, 10, 30), (10, 180, 40), (20, 30, 190)


@pytest.fixture(autouse=True)
def unlimited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine would omit thumbnails."""
    monkeypatch.setattr(prompt_thumbnails, "MAX_SECONDS", math.inf)


def rows(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_bytes().splitlines()]


def scored(step: int, *prompts: Prompt, first: int = 0) -> list[tuple]:
    return [(sample(f"{step}.{first + i}.{k}", item), Score(k, {})) for i, item in enumerate(prompts) for k in (0, 1)]


def names_in(folder: Path) -> set[str]:
    return {path.name for path in (folder / THUMBNAILS).glob("*")}


def test_lines_have_one_placeholder_per_image(tmp_path: Path) -> None:
    file = tmp_path / "step_000001.jsonl"
    item = prompt("p", "The first 雪: ", encoded(RED), "\nand\n", encoded(GREEN), " differ. How?")
    append_rollouts(file, 1, scored(1, item), decode=decode)
    for row in rows(file):
        assert row["prompt"] == item.text
        assert [row["prompt"][image["start"] : image["stop"]] for image in row["prompt_images"]] == [
            PLACEHOLDER_TEXT
        ] * 2
        assert [image["num_tokens"] for image in row["prompt_images"]] == [30, 31]
        assert [image["digest"] for image in row["prompt_images"]] == [image.digest for image in item.images]
    first, second = rows(file)[0]["prompt_images"]
    colors = [np.asarray(Image.open(tmp_path / image["thumbnail"]))[-1, -1].tolist() for image in (first, second)]
    assert colors == [list(RED), list(GREEN)]


def test_placeholder_in_the_text_is_not_an_image(tmp_path: Path) -> None:
    """The images' positions are omitted if the text differs from the decoded tokens."""
    item = prompt("p", f"{PLACEHOLDER_TEXT} is ", encoded(RED), "?")
    changed = replace(prompt("q", encoded(RED), "?"), text="other")
    file = tmp_path / "step_000001.jsonl"
    append_rollouts(file, 1, scored(1, item, changed), decode=decode)
    first, _, second, _ = rows(file)
    [image], [other] = first["prompt_images"], second["prompt_images"]
    assert (image["start"], image["stop"]) == (len(f"{PLACEHOLDER_TEXT} is "), len(item.text) - 1)
    assert other == {name: value for name, value in image.items() if name not in ("start", "stop")}


def test_images_in_observations_have_thumbnails(tmp_path: Path) -> None:
    item, observed = prompt("p", encoded(RED), "?"), prompt("q", encoded(GREEN), encoded(RED)).images
    [(first, score), *others] = scored(1, item)
    played = replace(first, response_images=tuple(replace(image, start=100) for image in observed))
    file = tmp_path / "step_000001.jsonl"
    append_rollouts(file, 1, [(played, score), *others], decode=decode)
    row, other = rows(file)
    assert [image["digest"] for image in row["observation_images"]] == [image.digest for image in observed]
    assert [image["num_tokens"] for image in row["observation_images"]] == [30, 31]
    assert all((tmp_path / image["thumbnail"]).is_file() for image in row["observation_images"])
    assert "observation_images" not in other


def test_thumbnail_is_stored_once_for_all_steps(tmp_path: Path) -> None:
    """The second step does not fetch an image that already has a thumbnail."""
    fetched: list[str] = []

    def fetch(images):
        fetched.extend(image.digest for image in images)
        return ((image, image.file) for image in images)

    item, other = prompt("p", encoded(RED), "?"), prompt("q", encoded(RED), "!", encoded(GREEN))
    for step in (1, 2):
        append_rollouts(
            tmp_path / f"step_{step:06d}.jsonl", step, scored(step, item, other), decode=decode, fetch=fetch
        )
    digests = [image.digest for image in other.images]
    assert fetched == digests and names_in(tmp_path) == {f"{digest}.png" for digest in digests}
    lines = [row["prompt_images"] for step in (1, 2) for row in rows(tmp_path / f"step_{step:06d}.jsonl")]
    assert all(image["thumbnail"] == f"{THUMBNAILS}/{image['digest']}.png" for images in lines for image in images)
    assert [len(images) for images in lines] == [1, 1, 2, 2] * 2


def test_large_image_is_a_small_jpeg_without_metadata(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x010E] = "secret"
    data = encoded(BLUE, 1200, 600, "JPEG", exif=exif, comment=b"secret", icc_profile=b"secret" * 30)
    item = prompt("p", data, "?")
    [name] = write_thumbnails(
        tmp_path / "step_000001.jsonl", scored(1, item), prompt_thumbnails.available_files
    ).values()
    image = Image.open(tmp_path / name)
    assert image.format == "JPEG" and image.size == (256, 128)
    assert np.abs(np.asarray(image)[-1, -1].astype(int) - BLUE).max() <= 6
    assert b"secret" in data and b"secret" not in (tmp_path / name).read_bytes()


@pytest.mark.parametrize(
    "data",
    [b"", b"\x89PNG\r\n\x1a\n" + bytes(40), b"<svg xmlns='http://www.w3.org/2000/svg'/>", encoded(RED)[:-30], None],
)
def test_undecodable_image_has_no_thumbnail(tmp_path: Path, data: bytes | None) -> None:
    item = prompt("p", encoded(GREEN), "a", b"x", "b")
    images = (item.images[0], replace(item.images[1], file=data))
    item = Prompt("p", item.text, item.token_ids, images=images)
    file = tmp_path / "step_000001.jsonl"
    append_rollouts(file, 1, scored(1, item), decode=decode)
    assert ["thumbnail" in image for image in rows(file)[0]["prompt_images"]] == [True, False]
    assert names_in(tmp_path) == {f"{images[0].digest}.png"}


def test_observation_thumbnails_are_limited_per_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The grid of the first round, which stops later ones, also shows images in observations."""
    monkeypatch.setattr(prompt_thumbnails, "MAX_THUMBNAILS", 1)
    file = tmp_path / "step_000001.jsonl"
    for first, color in enumerate((RED, GREEN)):
        observed = prompt("o", "see", encoded(color)).images
        item = replace(sample(f"1.{first}.0", prompt("p", "go")), response_images=observed)
        append_rollouts(file, 1, [(item, Score(1, {}))], decode=decode)
    assert names_in(tmp_path) == {f"{prompt('o', encoded(RED)).images[0].digest}.png"}
    assert (image_folder(file) / GRID).is_file()


def test_number_of_thumbnails_per_step_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit covers all rounds of a step, since only the first round writes thumbnails."""
    monkeypatch.setattr(prompt_thumbnails, "MAX_THUMBNAILS", 2)
    items = [prompt(f"p{i}", encoded((10 * i, 0, 0)), "?") for i in range(5)]
    file = tmp_path / "step_000001.jsonl"
    append_rollouts(file, 1, scored(1, *items[:3]), decode=decode)
    append_rollouts(file, 1, scored(1, items[1], *items[3:], first=3), decode=decode)
    assert names_in(tmp_path) == {f"{item.images[0].digest}.png" for item in items[:2]}
    stored = ["thumbnail" in row["prompt_images"][0] for row in rows(file)[::2]]
    assert stored == [True, True, False, True, False, False]


def test_time_for_thumbnails_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step writes at least one thumbnail, and later steps write the others."""
    monkeypatch.setattr(prompt_thumbnails, "MAX_SECONDS", 0.0)
    item = prompt("p", *(encoded((10 * i, 0, 0)) for i in range(3)))
    for step in (1, 2):
        append_rollouts(tmp_path / f"step_{step:06d}.jsonl", step, scored(step, item), decode=decode)
        assert names_in(tmp_path) == {f"{image.digest}.png" for image in item.images[:step]}


def test_links_and_damaged_thumbnails_are_not_in_the_grid(tmp_path: Path) -> None:
    """Links are replaced by thumbnails. Damaged files are omitted."""
    item = prompt("p", encoded(RED, 40, 40), encoded(GREEN, 40, 40), encoded(BLUE, 40, 40))
    paths = [tmp_path / THUMBNAILS / f"{image.digest}.png" for image in item.images]
    paths[0].parent.mkdir()
    (tmp_path / "secret.png").write_bytes(encoded((250, 240, 10)))
    paths[0].symlink_to(tmp_path / "secret.png")
    paths[1].write_bytes(encoded(GREEN, 40, 40)[:-30])
    append_rollouts(tmp_path / "step_000001.jsonl", 1, scored(1, item), decode=decode)
    grid = np.asarray(Image.open(tmp_path / "step_000001" / "grid.png"))
    shown = [(grid == color).all(-1).any() for color in (RED, GREEN, BLUE, (250, 240, 10))]
    assert shown == [True, False, True, False] and not paths[0].is_symlink()
    for path in paths:  # a thumbnail that this process remembers
        path.unlink()
    paths[2].symlink_to(tmp_path / "secret.png")
    append_rollouts(tmp_path / "step_000002.jsonl", 2, scored(2, item), decode=decode)
    assert not (tmp_path / "step_000002").exists()


def test_grid_has_a_row_per_prompt_with_images(tmp_path: Path) -> None:
    items = [prompt("p", "a", encoded(RED, 40, 40), "b", encoded(GREEN, 40, 40)), prompt("q", "no image")]
    file = tmp_path / "step_000001.jsonl"
    append_rollouts(file, 1, scored(1, *items), decode=decode)
    grid = np.asarray(Image.open(tmp_path / "step_000001" / "grid.png")).astype(int)
    lefts = [np.nonzero((grid == color).all(-1))[1].min() for color in (RED, GREEN)]
    assert lefts[0] < lefts[1] and grid.shape[0] < 2 * prompt_thumbnails.PREVIEW_SIDE
    assert ["prompt_images" in row for row in rows(file)] == [True, True, False, False]


@pytest.mark.parametrize("name", ["../a.png", f"{'0' * 64}.svg", f"{'0' * 64}.png/", f"../{'0' * 64}.png", "", None, 3])
def test_foreign_thumbnail_names_have_no_path(tmp_path: Path, name: object) -> None:
    file = tmp_path / "step_000001.jsonl"
    assert thumbnail_path(file, f"{THUMBNAILS}/{name}" if isinstance(name, str) else name) is None
    assert thumbnail_path(file, f"{THUMBNAILS}/{'0' * 64}.png") == tmp_path / THUMBNAILS / f"{'0' * 64}.png"
    (tmp_path / THUMBNAILS).symlink_to(tmp_path)
    assert thumbnail_path(file, f"{THUMBNAILS}/{'0' * 64}.png") is None
