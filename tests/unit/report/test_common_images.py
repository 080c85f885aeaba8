"""The evaluation images in a comparison: which samples are compared, and the notes about omitted ones."""

from __future__ import annotations

import base64
import html
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.core.errors import UserError
from megarl.report import comparison, images
from megarl.report.evaluations import MAX_SAMPLES
from megarl.rewards.rollout_images import GRID
from tests.image_run import write_run
from tests.unit.report.test_images import ATTACK, write_lines

NAMES = ["digits.7.0", "digits.7.1", "digits.8.0", "digits.8.1"]
SHARED = "Images that some runs lack for the same step and prompt are omitted"


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs that evaluate after steps 0, 2, 4 and 0, 2."""
    folder = tmp_path_factory.mktemp("runs")
    return [write_run(folder / "long", 4), write_run(folder / "short", 3, first_noise=60)]


@pytest.fixture
def runs(originals: list[Path], tmp_path: Path) -> list[Path]:
    """Copies of the runs, which a test may change."""
    return [Path(shutil.copytree(run, tmp_path / run.name, symlinks=True)) for run in originals]


def compare(runs: list[Path]) -> str:
    """Return the section with the images, or "" if the page has none."""
    text = comparison.write(runs).read_text()
    section = re.search(r'<section id="common-images">.*(?=<h2>Curves)', text, re.DOTALL)
    return section[0] if section else ""


def notes(section: str) -> list[str]:
    return [html.unescape(note) for note in re.findall(r'<p class="note">(?!not shown)(.*?)</p>', section)]


def strips(section: str) -> list[tuple[str, str, list[str], list[bytes]]]:
    """Return the sample, time, labels and images of each strip."""
    found = re.findall(
        r'<div class="strip" title="(.*?)"><h4 class="when">(.*?)</h4>(.*?)(?=<div class="strip"|</section>)', section
    )
    return [
        (
            name,
            when,
            re.findall("<span>(.*?)</span>", row),
            [base64.b64decode(data) for data in re.findall('base64,(.*?)"', row)],
        )
        for name, when, row in found
    ]


def stored(run: Path, step: int, name: str) -> bytes:
    return (run / "evaluations" / "digits" / f"step_{step:06d}" / f"{name}.png").read_bytes()


def edit(run: Path, step: int, change: Callable[[dict], object]) -> None:
    """Change the lines of an evaluation."""
    file = run / "evaluations" / "digits" / f"step_{step:06d}.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows:
        change(row)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_rows_have_an_image_per_run_before_and_after(runs: list[Path]) -> None:
    """The last evaluation that both runs have is the one after step 2."""
    section = compare(runs)
    expected = [
        (name, when, ["long", "short"], [stored(run, step, name) for run in runs])
        for name in NAMES
        for step, when in ((0, "before step 1"), (2, "after step 2"))
    ]
    assert strips(section) == expected
    after = section.split('title="digits.8.0"')[2].partition('title="digits.8.1"')[0]
    assert re.findall(r'reward">([0-9.]*)</b>', after) == ["0.6", "0.8"]
    assert section.count('reward"><span class="failed">f</span>') == 2  # the last sample before step 1
    assert re.findall(r'alt="(.*?)"', section)[:4] == [
        *("long, before step 1", "short, before step 1", "long, after step 2", "short, after step 2"),
    ]
    assert "Images from digits, one column per run, each row from the same noise<" in section
    assert section.count('class="prompt"') == 2 and notes(section) == []


def test_single_common_evaluation_is_shown_once(runs: list[Path]) -> None:
    (runs[1] / "evaluations" / "digits" / "step_000000.jsonl").unlink()
    assert [(name, when) for name, when, _, _ in strips(compare(runs))] == [(name, "after step 2") for name in NAMES]


def test_sets_that_runs_do_not_share_are_named(runs: list[Path]) -> None:
    """One set is in one run only. The runs evaluate another set after different steps. Text sets are not mentioned."""
    for run, name, step in ((0, "only", 0), (0, "apart", 0), (1, "apart", 2), (0, "text", 0)):
        folder = runs[run] / "evaluations" / name
        shutil.copytree(runs[run] / "evaluations" / "digits", folder)
        for file in folder.glob("*.jsonl"):
            if file.stem != f"step_{step:06d}":
                file.unlink()
        if name == "text":
            file = folder / "step_000000.jsonl"
            file.write_text(file.read_text().replace('"image"', '"text"'))
    section = compare(runs)
    assert notes(section) == [f"{SHARED}: set apart, set only."] and len(strips(section)) == 8
    assert "apart" not in section.split("</p>", 1)[1]


def test_runs_without_a_common_set_have_only_a_note(runs: list[Path]) -> None:
    (runs[0] / "evaluations" / "digits").rename(runs[0] / "evaluations" / "figures")
    section = compare(runs)
    assert notes(section) == [f"{SHARED}: set figures, set digits."] and "<details" not in section


def test_runs_without_images_have_no_section(runs: list[Path]) -> None:
    for run in runs:
        for step in (0, 2):
            edit(run, step, lambda row: row.pop("image"))
    assert compare(runs) == ""


def test_samples_with_different_captions_are_counted(runs: list[Path]) -> None:
    def other_caption(row: dict) -> None:
        if row["prompt_id"] == "digits-8":
            row["prompt"] = "another caption"

    for step in (0, 2):
        edit(runs[1], step, other_caption)
    section = compare(runs)
    assert [name for name, *_ in strips(section)] == [name for name in NAMES[:2] for _ in range(2)]
    assert notes(section) == [f"{SHARED}: 2 samples of digits."] and "another caption" not in section


def test_sample_shared_in_one_evaluation_has_one_strip(runs: list[Path]) -> None:
    """An image was not stored in the first evaluation, for example because the disk was full."""
    edit(runs[0], 0, lambda row: row.pop("image") if row["sample_id"] == NAMES[0] else None)
    section = compare(runs)
    assert [when for name, when, *_ in strips(section) if name == NAMES[0]] == ["after step 2"]
    assert len(strips(section)) == 7 and notes(section) == []


def test_different_noise_is_stated(tmp_path: Path) -> None:
    section = compare([write_run(tmp_path / "a", 2), write_run(tmp_path / "b", 2, seed=1)])
    assert notes(section) == ["The images of a row start from different noise, because the runs differ in run.seed."]
    assert "same noise" not in section and len(strips(section)) == 8


def test_each_evaluation_is_limited_in_samples_and_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, size = [tmp_path / "a", tmp_path / "b"], 100
    monkeypatch.setattr(images, "MAX_BYTES", 3 * (len(images.PNG) + 20 + size))
    for run in runs:
        (run / "evaluations").mkdir(parents=True)
        (run / "manifest.json").write_text("{}")
        for step in (0, 5):
            write_lines(run / "evaluations" / "digits" / f"step_{step:06d}.jsonl", 2 * MAX_SAMPLES, size)
            edit(run, step, lambda row: row.update(prompt_id=str(int(row["sample_id"].split(".")[-1]) // 4)))
    section = compare(runs)
    shown = strips(section)
    # The order is the first sample of each of the 12 prompts, followed by the second samples.
    order = [f"1.0.{4 * i + k}" for k in (0, 1) for i in range(MAX_SAMPLES // 2)]
    assert [name for name, *_ in shown] == [name for name in order for _ in range(2)]
    assert [len(each[3]) for each in shown] == [2] * 6 + [0] * (2 * MAX_SAMPLES - 6)
    assert f"{MAX_SAMPLES} of {2 * MAX_SAMPLES} samples<" in section
    assert notes(section) == ["84 images are missing or omitted to limit the page's size."]
    assert section.count('<p class="note">not shown: 1.0.') == 84


@pytest.mark.parametrize("name", ["../step_000000/digits.7.0.png", "step_000000/digits.7.0.png", "/etc/passwd", 3])
def test_names_outside_the_folder_are_not_compared(runs: list[Path], name: object) -> None:
    edit(runs[1], 2, lambda row: row.update(image=name) if row["sample_id"] == NAMES[0] else None)
    section = compare(runs)
    assert [when for sample, when, *_ in strips(section) if sample == NAMES[0]] == ["before step 1"]
    assert len(strips(section)) == 7


def test_damaged_images_are_named(runs: list[Path]) -> None:
    """One file was removed, one is a link, and one is not an image."""
    folder = runs[1] / "evaluations" / "digits" / "step_000002"
    (folder / f"{NAMES[0]}.png").unlink()
    (folder / f"{NAMES[1]}.png").unlink()
    (folder / f"{NAMES[1]}.png").symlink_to(folder / GRID)
    (folder / f"{NAMES[2]}.png").write_text("secret")
    section = compare(runs)
    assert re.findall("not shown: (.*?)<", section) == [f"{name}.png" for name in NAMES[:3]]
    assert [len(each[3]) for each in strips(section)] == [2, 1, 2, 1, 2, 1, 2, 2]
    assert notes(section) == ["3 images are missing or omitted to limit the page's size."]


def test_linked_folder_is_not_compared(runs: list[Path]) -> None:
    folder = runs[1] / "evaluations" / "digits" / "step_000002"
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to(folder.with_name("elsewhere"))
    assert {when for _, when, *_ in strips(compare(runs))} == {"before step 1"}


def test_evaluation_that_is_a_link_is_an_error(runs: list[Path]) -> None:
    file = runs[1] / "evaluations" / "digits" / "step_000002.jsonl"
    file.rename(file.with_name("elsewhere"))
    file.symlink_to(file.with_name("elsewhere"))
    with pytest.raises(UserError, match=r"step_000002\.jsonl: a symbolic link"):
        comparison.write(runs)


def test_markup_in_compared_runs_is_escaped(runs: list[Path]) -> None:
    for run in runs:
        (run / "manifest.json").write_text(json.dumps({"name": f"{run.name} {ATTACK}"}))
        for step in (0, 2):
            edit(
                run,
                step,
                lambda row: row.update(prompt=ATTACK, sample_id=f"{row['sample_id']}{ATTACK}", failure=ATTACK),
            )
    section = re.sub('data:[^"]*', "", compare(runs))
    assert "<script" not in section and 'onerror="' not in section and section.count("<img") == 16
