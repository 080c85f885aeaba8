"""The images in the report: which are selected, their size limit, and files that megarl does not write."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

import pytest

from megarl import report
from megarl.report import images
from megarl.report.evaluations import MAX_SAMPLES, MAX_STEPS, read_evaluations, render_samples
from megarl.report.images import IS_SMALL, URI, embed_images
from megarl.report.page import rollout_note
from megarl.report.viewer import MAX_IMAGES, read_rollouts
from megarl.run.folder import RunFolder
from tests.image_run import NUM_DIGITS, SAMPLES_PER_PROMPT, evaluate, write_run

PNG = b"\x89PNG\r\n\x1a\n" + bytes(20)
ATTACK = '<script>alert(1)</script><img src=x onerror="alert(1)">'


def contents(uri: str) -> bytes:
    return base64.b64decode(uri.partition(",")[2])


def write_lines(file: Path, count: int, size: int = 0, **fields) -> None:
    """Write lines with images of `size` bytes after the header, and their files."""
    folder = file.with_suffix("")
    folder.mkdir(parents=True)
    rows = [{"sample_id": f"1.0.{k}", "reward": k, "prompt": "p", "num_denoising_steps": 3} for k in range(count)]
    for row in rows:
        row |= {"image": f"{folder.name}/{row['sample_id']}.png", **fields}
        (folder / f"{row['sample_id']}.png").write_bytes(PNG + bytes(size))
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_report_embeds_the_stored_images(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 2)
    [_, step] = read_rollouts(RunFolder(run).rollout_files()).steps
    assert len(step.samples) == NUM_DIGITS * SAMPLES_PER_PROMPT and step.num_omitted_images == 0
    for sample in step.samples:
        assert contents(sample[URI]) == (run / "rollouts" / sample["image"]).read_bytes()
        assert sample[URI].startswith("data:image/png;base64,") and sample[IS_SMALL]
    text = report.write(run).read_text()
    assert text.count('"image_uri":"data:image/png;base64,') == 2 * len(step.samples)
    assert not re.search(r'(src|href)="(?!data:)', text)  # the page is one file


def test_preview_stands_for_a_large_image(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 1, side=320)
    [step] = read_rollouts(RunFolder(run).rollout_files()).steps
    for sample in step.samples:
        preview = (run / "rollouts" / sample["image"]).with_suffix(".jpg")
        assert contents(sample[URI]) == preview.read_bytes() and sample[URI].startswith("data:image/jpeg;base64,")
        assert not sample[IS_SMALL] and "preview" not in sample


@pytest.mark.parametrize(("side", "is_small"), [(images.SMALL_SIDE - 16, True), (images.SMALL_SIDE, False)])
def test_only_small_images_are_enlarged_sharply(tmp_path: Path, side: int, is_small: bool) -> None:
    run = write_run(tmp_path / "run", 1, side=side)
    [step] = read_rollouts(RunFolder(run).rollout_files()).steps
    assert {sample[IS_SMALL] for sample in step.samples} == {is_small}


def test_images_are_embedded_in_order_up_to_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MAX_BYTES", 3 * (len(PNG) + 100) + 50)
    file = tmp_path / "step_000001.jsonl"
    write_lines(file, 5, 100)
    rollouts = read_rollouts({1: file})
    [step] = rollouts.steps
    assert [(sample["sample_id"], URI in sample) for sample in step.samples] == [
        *(("1.0.4", False), ("1.0.3", False)),
        *(("1.0.2", True), ("1.0.1", True), ("1.0.0", True)),
    ]
    assert step.num_omitted_images == 2 and rollout_note(rollouts).endswith(
        "2 of their images are missing or omitted to limit the page's size."
    )


def test_samples_with_images_are_selected_first(tmp_path: Path) -> None:
    """A step stores the images of its first groups. The others are shown without images."""
    file = tmp_path / "step_000001.jsonl"
    write_lines(file, 2 * MAX_IMAGES)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows[MAX_IMAGES:]:
        del row["image"]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    [step] = read_rollouts({1: file}).steps
    shown = [sample["sample_id"] for sample in step.samples if URI in sample]
    assert sorted(shown) == sorted(row["sample_id"] for row in rows[:MAX_IMAGES])
    assert step.samples[0]["reward"] == 2 * MAX_IMAGES - 1 and step.samples[0]["response"] == ""
    assert step.num_omitted_images == 0 and "images" not in rollout_note(read_rollouts({1: file}))


@pytest.mark.parametrize(
    "name",
    ["../secret.png", "step_000001/../secret.png", "step_000001/link.png", "step_000001/text.png", "/etc/passwd", 3],
)
def test_foreign_files_are_not_embedded(tmp_path: Path, name: object) -> None:
    file, folder = tmp_path / "rollouts" / "step_000001.jsonl", tmp_path / "rollouts" / "step_000001"
    folder.mkdir(parents=True)
    for secret in (tmp_path / "secret.png", tmp_path / "rollouts" / "secret.png"):
        secret.write_bytes(PNG)
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    (folder / "text.png").write_text("secret")
    for field in ("image", "preview"):
        sample = {"image": "step_000001/absent.png"} | {field: name}
        embed_images(file, [sample])
        assert URI not in sample and "preview" not in sample


def test_linked_folder_is_not_read(tmp_path: Path) -> None:
    write_lines(tmp_path / "step_000001.jsonl", 1)
    (tmp_path / "step_000002").symlink_to(tmp_path / "step_000001")
    sample = {"image": "step_000002/1.0.0.png"}
    assert embed_images(tmp_path / "step_000002.jsonl", [sample]) == 0 and sample == {}


def test_evaluation_has_a_row_per_sample_over_steps(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 4)
    html = render_samples(read_evaluations(RunFolder(run).evaluation_files()))
    assert "Images from digits, each row from the same noise (all samples: evaluations/digits/)" in html
    names = ["digits.7.0", "digits.7.1", "digits.8.0", "digits.8.1"]
    assert re.findall(r'class="strip" title="([^"]*)"', html) == names
    rows = html.split('class="strip"')[1:]
    for name, row in zip(names, rows, strict=True):
        files = [run / "evaluations" / "digits" / f"step_{step:06d}" / f"{name}.png" for step in (0, 2, 4)]
        assert list(map(contents, re.findall(r'src="([^"]*)"', row))) == [file.read_bytes() for file in files]
        assert re.findall(r"<span>((?:before|after)[^<]*)</span>", row) == [
            "before step 1",
            "after step 2",
            "after step 4",
        ]
    assert re.findall(r'reward">(.*?)</b>', rows[3]) == ['<span class="failed">f</span>', "0.6", "0.8"]
    assert html.count('class="prompt"') == 2


def test_evaluation_shows_the_same_rows_at_each_step(tmp_path: Path) -> None:
    """The rows cover as many prompts as possible, regardless of the rewards."""
    for step in range(2 * MAX_STEPS):
        file = tmp_path / "a" / f"step_{step:06d}.jsonl"
        write_lines(file, 2 * MAX_SAMPLES)
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        for i, row in enumerate(rows):
            row |= {"reward": (i * (step + 3)) % 7, "prompt_id": f"p{i // 4}"}
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    [item] = read_evaluations({"a": {step: tmp_path / "a" / f"step_{step:06d}.jsonl" for step in range(2 * MAX_STEPS)}})
    assert 1 < len(item.steps) <= MAX_STEPS
    expected = [f"1.0.{4 * i + k}" for k in (0, 1) for i in range(MAX_SAMPLES // 2)]
    for samples in item.steps.values():
        assert [sample["sample_id"] for sample in samples] == expected
    assert f"{len(item.steps)} of {2 * MAX_STEPS} steps" in render_samples([item])


def test_missing_evaluation_image_is_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 1)
    (run / "evaluations" / "digits" / "step_000000" / "digits.7.0.png").unlink()
    html = render_samples(read_evaluations(RunFolder(run).evaluation_files()))
    assert "not shown: digits.7.0.png" in html and html.count("<img") == 3


def test_markup_in_evaluations_is_escaped(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    evaluate(tmp_path, 0, 1.0, 32, caption=ATTACK)
    file = tmp_path / "evaluations" / "digits" / "step_000000.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows = [row | {"sample_id": ATTACK, "failure": ATTACK} for row in rows]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    html = re.sub('data:[^"]*', "", render_samples(read_evaluations({ATTACK: {0: file}})))
    assert "<script" not in html and 'onerror="' not in html and "&lt;script" in html
    assert html.count("<img") == 2  # one per prompt
