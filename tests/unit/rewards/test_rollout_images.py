"""The images of a step: their files, the fields of their lines, and the grid."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from megarl.cluster.groups.evaluation import write_samples
from megarl.core.completion import VersionRun
from megarl.core.latents import Conditioning, LatentSample
from megarl.core.optional_logs import RESERVED_BYTES, OptionalLog
from megarl.core.prompt import Prompt
from megarl.core.sample import Sample
from megarl.core.score import Score
from megarl.rewards import rollout_images
from megarl.rewards.rollout_file import append_rollouts, write_advantages
from megarl.rewards.rollout_images import GRID_SIDE, draw_grid, image_path, write_images

LOGPROBS = np.array([-1.23456789, 0.5], np.float32)
COLOR = (10, 200, 30)


def sample(name: str, image: np.ndarray | None, caption: str = 'a "cat"') -> LatentSample:
    return LatentSample(
        name,
        Prompt(f"p{name}", caption, (), answer={"text": "9"}),
        sigmas=[1, 0.8, 0.5, 0],
        steps=[0, 1],
        latents=np.zeros((3, 1, 2, 2)),
        logprobs=LOGPROBS,
        versions=(VersionRun(3, 1), VersionRun(4, 2)),
        embedding=Conditioning(np.zeros((1, 2))),
        empty_embedding=None,
        num_tokens=64,
        image=image,
    )


def pixels(seed: int, height: int = 5, width: int = 7) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def step(num_groups: int, num_samples: int = 2, first: int = 0) -> list[tuple[LatentSample, Score]]:
    names = [(group, k) for group in range(first, first + num_groups) for k in range(num_samples)]
    return [(sample(f"1.{group}.{k}", pixels(9 * group + k)), Score(group + k / 10, {})) for group, k in names]


def rows(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_bytes().splitlines()]


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*"))


def test_line_of_an_image_names_its_lossless_file(tmp_path: Path) -> None:
    file = tmp_path / "step_000001.jsonl"
    score = Score(0.75, {"ocr": 0.75}, issues={"ocr_unread": None, "ocr_dark": "dark"})
    append_rollouts(file, 1, [(sample("1.0.0", pixels(1)), score)], lambda _: pytest.fail("an image has no tokens"))
    [row] = rows(file)
    assert row == {
        "sample_id": "1.0.0",
        "step": 1,
        "prompt_id": "p1.0.0",
        "prompt": 'a "cat"',
        "image": "step_000001/1.0.0.png",
        "answer": {"text": "9"},
        "reward": 0.75,
        "parts": {"ocr": 0.75},
        "failure": None,
        "issues": {"ocr_dark": "dark"},
        "version": [{"version": 3, "count": 1}, {"version": 4, "count": 2}],
        "num_denoising_steps": 3,
        "trained_denoising_steps": [0, 1],
        "rollout_logprobs": row["rollout_logprobs"],
        "advantage": None,
    }
    assert (*row,)[0] == "sample_id" and (*row,)[-1] == "advantage"
    assert np.array_equal(np.array(row["rollout_logprobs"], np.float32), LOGPROBS)
    assert np.array_equal(np.asarray(Image.open(tmp_path / row["image"])), pixels(1))


def test_advantages_are_written_into_lines_of_images(tmp_path: Path) -> None:
    file = tmp_path / "step_000001.jsonl"
    append_rollouts(file, 1, step(1))
    before = rows(file)
    write_advantages(file, {"1.0.1": -0.5}, {"1.0.1": {"logprob_differences": [0.0, 1e-6]}})
    assert rows(file) == [before[0], before[1] | {"advantage": -0.5, "logprob_differences": [0.0, 1e-6]}]


def test_large_image_has_a_preview(tmp_path: Path) -> None:
    file = tmp_path / "step_000001.jsonl"
    image = np.full((300, 600, 3), COLOR, np.uint8)
    append_rollouts(file, 1, [(sample("1.0.0", image), Score(1.0, {}))])
    [row] = rows(file)
    assert row["preview"] == "step_000001/1.0.0.jpg"
    preview = Image.open(tmp_path / row["preview"])
    assert preview.format == "JPEG" and preview.size == (256, 128)
    assert np.abs(np.asarray(preview).astype(int) - COLOR).max() <= 3


def test_texts_and_undecoded_images_have_no_files(tmp_path: Path) -> None:
    file = tmp_path / "step_000001.jsonl"
    text = Sample("1.0.0", Prompt("p", "?", [5]), [7], [-1.0], [True], (VersionRun(0, 1),), "stop", "a")
    append_rollouts(file, 1, [(text, Score(1.0, {})), (sample("1.0.1", None), Score(None, {}))])
    assert ["image" in row for row in rows(file)] == [False, False]
    assert names_in(tmp_path) == ["step_000001.jsonl"]


def test_whole_groups_are_stored_up_to_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit covers all rounds of a step. Later groups keep their lines."""
    monkeypatch.setattr(rollout_images, "MAX_PIXELS", 7 * 5 * 5)
    file = tmp_path / "step_000001.jsonl"
    append_rollouts(file, 1, step(1))
    append_rollouts(file, 1, step(3, first=1))
    stored = [row["image"] for row in rows(file) if "image" in row]
    assert stored == [f"step_000001/1.{group}.{k}.png" for group in range(2) for k in range(2)]
    assert len(rows(file)) == 8
    assert names_in(tmp_path / "step_000001") == sorted(["grid.png", *(name.split("/")[1] for name in stored)])


def test_first_group_is_stored_beyond_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_images, "MAX_PIXELS", 1)
    assert list(write_images(tmp_path / "step_000001.jsonl", step(2))) == ["1.0.0", "1.0.1"]


def test_full_disk_drops_images_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(rollout_images, "IMAGES", OptionalLog("images"))
    usage, free = namedtuple("Usage", "total used free"), [0]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(2**40, 0, free[0]))
    for number in (1, 2):
        assert write_images(tmp_path / f"step_{number:06d}.jsonl", step(1)) == {}
    assert names_in(tmp_path) == []
    free[0] = 2 * RESERVED_BYTES
    assert len(write_images(tmp_path / "step_000003.jsonl", step(1))) == 2
    warning, note = capfd.readouterr().err.splitlines()
    assert "continues without the images" in warning and "4 images were dropped" in note


def test_failed_write_keeps_the_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    """The disk becomes full after the first image."""
    monkeypatch.setattr(rollout_images, "IMAGES", OptionalLog("images"))
    file = tmp_path / "step_000001.jsonl"
    (tmp_path / "step_000001").mkdir()
    (tmp_path / "step_000001" / "1.0.1.png").mkdir()  # a file cannot replace this directory
    append_rollouts(file, 1, step(1))
    assert ["image" in row for row in rows(file)] == [True, False]
    assert names_in(tmp_path / "step_000001") == ["1.0.0.png", "1.0.1.png"]
    assert "warning" in capfd.readouterr().err


def test_evaluation_replaces_images_of_a_killed_attempt(tmp_path: Path) -> None:
    file = tmp_path / "evaluations" / "digits.v1" / "step_000002.jsonl"
    for names in (["digits.v1.0.0", "digits.v1.1.0"], ["digits.v1.0.0"]):
        samples = [sample(name, pixels(3)) for name in names]
        write_samples(file, 2, samples, [Score(1.0, {})] * len(samples), append_rollouts)
    assert [row["image"] for row in rows(file)] == ["step_000002/digits.v1.0.0.png"]
    assert names_in(file.with_suffix("")) == ["digits.v1.0.0.png", "grid.png"]


def test_grid_has_one_row_per_group_and_a_reward_below_each_image() -> None:
    """Both images have a single color, which identifies them in the grid."""
    items = [
        (sample("1.0.0", np.full((4, 4, 3), (255, 0, 0), np.uint8)), Score(0.5, {})),
        (sample("1.0.1", np.full((2, 4, 3), (0, 255, 0), np.uint8)), Score(None, {})),
        (sample("1.1.0", np.full((600, 600, 3), (0, 0, 255), np.uint8), "雪 \udfff\n" + "x" * 5000), Score(1.0, {})),
    ]
    drawn = np.asarray(draw_grid(items)).astype(int)
    boxes = []
    for color in ((255, 0, 0), (0, 255, 0), (0, 0, 255)):
        y, x = np.nonzero((drawn == color).all(-1))
        boxes.append((x.min(), y.min(), x.max() + 1, y.max() + 1))
        assert len(x) == (boxes[-1][2] - boxes[-1][0]) * (boxes[-1][3] - boxes[-1][1])
    sizes = [(right - left, bottom - top) for left, top, right, bottom in boxes]
    assert sizes == [(GRID_SIDE, GRID_SIDE), (GRID_SIDE, GRID_SIDE // 2), (GRID_SIDE, GRID_SIDE)]
    assert boxes[0][1] == boxes[1][1] and boxes[0][2] < boxes[1][0]  # each group is a row
    assert boxes[2][0] == boxes[0][0] and boxes[2][1] > boxes[0][3]
    for left, _, right, _ in boxes:
        below = drawn[boxes[0][1] + GRID_SIDE : boxes[0][1] + GRID_SIDE + 25, left:right]
        assert (below.sum(-1) < 300).any()  # text


@pytest.mark.parametrize(
    "name",
    [
        *("step_000001/../secret.png", "step_000001/.hidden.png", "step_000001/a/b.png", "step_000001/a.svg"),
        *("step_000002/a.png", "/etc/passwd", "a.png", "step_000001/a.png\n", "step_000001/", "", None, 3, ["a.png"]),
    ],
)
def test_foreign_names_have_no_path(name: object, tmp_path: Path) -> None:
    assert image_path(tmp_path / "step_000001.jsonl", name) is None


def test_linked_folder_has_no_images(tmp_path: Path) -> None:
    file = tmp_path / "step_000001.jsonl"
    assert image_path(file, "step_000001/a.png") == tmp_path / "step_000001" / "a.png"
    (tmp_path / "step_000001").symlink_to(tmp_path)
    assert image_path(file, "step_000001/a.png") is None
