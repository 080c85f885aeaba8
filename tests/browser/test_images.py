"""The images of a run in the report and on the live page, in Chromium."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl import report
from megarl.report import comparison, images
from tests.browser.chromium import Tab, browse_with
from tests.image_run import NUM_DIGITS, SAMPLES_PER_PROMPT, write_run, write_step
from tests.live_report import serving

NUM_STEPS = 4
CAPTION = 'a <img src=x onerror=alert(1)> "digit" </script><b>bold</b>'

SECTIONS = """[...document.querySelectorAll('#samples .group')].map((group) => ({
  prompt: group.querySelector('pre').textContent,
  title: group.querySelector('h3').textContent,
  steps: [...group.querySelectorAll('.when')].map((node) => node.textContent),
  pictures: [...group.querySelectorAll('.picture')].map((node) => ({
    width: node.querySelector('img') && node.querySelector('img').naturalWidth,
    texts: [...node.children].slice(1).map((child) => child.textContent),
    note: node.querySelector('.note') && node.querySelector('.note').textContent,
    title: node.title,
  })),
}))"""
EVALUATION = """[...document.querySelectorAll('#evaluation-samples .strip')].map((strip) =>
  [...strip.querySelectorAll('.picture')].map((node) => [node.querySelector('img').naturalWidth, node.innerText]))"""

COMPARISON = """[...document.querySelectorAll('#common-images .strip')].map((strip) => ({
  when: strip.querySelector('.when').textContent,
  pictures: [...strip.querySelectorAll('.picture')].map((node) => ({
    width: node.querySelector('img').naturalWidth,
    left: node.getBoundingClientRect().left,
    top: node.getBoundingClientRect().top,
    alt: node.querySelector('img').alt,
    texts: node.innerText.split('\\n'),
  })),
}))"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_run(tmp_path_factory.mktemp("images") / "digits", NUM_STEPS)
    report.write(folder)
    return folder


@pytest.fixture
def tab(run: Path, tmp_path: Path) -> Iterator[Tab]:
    with browse_with(tmp_path, (run / "report.html").as_uri()) as opened:
        yield opened
        assert opened.problems == []


def choose(tab: Tab, control: str, value: str) -> None:
    tab.eval(
        f"{{const node = document.getElementById('{control}'); node.value = '{value}'; "
        "node.dispatchEvent(new Event('input'))}"
    )


def take_pictures(tab: Tab, name: str, place: str) -> None:
    for scheme in ("light", "dark"):
        tab.prefer(scheme)
        tab.eval(f"document.querySelector('{place}').scrollIntoView()")
        tab.take_picture(f"{name}_{scheme}")


def test_groups_are_grids_with_rewards_and_advantages(tab: Tab) -> None:
    """Groups are the initial view of a run with images."""
    take_pictures(tab, "image_groups", "#viewer")
    sections = tab.eval(SECTIONS)
    assert [section["prompt"] for section in sections] == [
        f"a photo of the digit {digit}, blue ink on paper" for digit in range(NUM_DIGITS)
    ]
    first, second = (section["pictures"] for section in sections[:2])
    assert [picture["width"] for picture in first] == [32] * SAMPLES_PER_PROMPT
    rewards = [0.9, 0.85, 0.8, 0.75, 0.7]
    advantages = ["1", "0.5", "0", "-0.5", "-1"]
    assert [picture["texts"] for picture in first] == [
        [str(reward), f"advantage {advantage}"] for reward, advantage in zip(rewards, advantages, strict=True)
    ]
    assert second[-1]["texts"] == ["no reward"] and "ocr timed out" in second[-1]["title"]
    choose(tab, "order", "worst")
    assert [picture["texts"][0] for picture in tab.eval(SECTIONS)[0]["pictures"]] == [*map(str, reversed(rewards))]
    assert tab.eval("getComputedStyle(document.querySelector('.picture img')).imageRendering") == "pixelated"


def test_prompts_have_one_row_of_images_per_step(tab: Tab) -> None:
    choose(tab, "view", "steps")
    take_pictures(tab, "image_steps", "#viewer")
    sections = tab.eval(SECTIONS)
    assert [section["steps"] for section in sections] == [[f"step {step}" for step in range(1, NUM_STEPS + 1)]] * 3
    assert all(len(section["pictures"]) == NUM_STEPS * SAMPLES_PER_PROMPT for section in sections)
    assert tab.eval("document.getElementById('count').textContent") == "3 of 3 prompts"
    assert tab.eval("stepSelect.disabled && previous.disabled && next.disabled")
    choose(tab, "text", "digit 2")
    choose(tab, "least", "0.7")  # matches only the best samples of the last steps
    [section] = tab.eval(SECTIONS)
    assert section["title"] == "Prompt · 3 steps" and section["steps"] == ["step 2", "step 3", "step 4"]
    choose(tab, "least", "0.88")  # matches one sample
    assert [section["title"] for section in tab.eval(SECTIONS)] == ["Prompt · 1 step"]
    assert tab.eval("document.getElementById('count').textContent") == "1 of 1 prompt"
    choose(tab, "view", "groups")
    assert [section["title"] for section in tab.eval(SECTIONS)] == ["Prompt · 1 sample"]
    assert tab.eval("document.getElementById('count').textContent") == "1 of 15 samples"
    assert not tab.eval("stepSelect.disabled || previous.disabled")


def test_samples_view_shows_an_image_as_the_response(tab: Tab) -> None:
    choose(tab, "view", "samples")
    assert tab.eval("[...document.querySelectorAll('.sample img')].map((node) => node.naturalWidth)") == [32] * 15
    facts = tab.eval("document.querySelector('.facts').innerText")
    assert "log-prob -0.875 per denoising step" in facts and "3 denoising steps" in facts


def test_evaluation_shows_the_same_noise_over_steps(tab: Tab) -> None:
    take_pictures(tab, "image_evaluation", "#evaluations")
    rows = tab.eval(EVALUATION)
    assert len(rows) == 4 and all([width for width, _ in row] == [32] * 3 for row in rows)
    assert [text.split("\n") for _, text in rows[0]] == [
        ["before step 1", "0.2"],
        ["after step 2", "0.6"],
        ["after step 4", "0.8"],
    ]
    assert rows[3][0][1].split("\n") == ["before step 1", "f"]


def test_page_fits_a_narrow_window(run: Path, tmp_path: Path) -> None:
    with browse_with(tmp_path, (run / "report.html").as_uri(), 420, 900) as tab:
        for view in ("groups", "steps", "samples"):
            choose(tab, "view", view)
            take_pictures(tab, f"image_{view}_narrow", "#viewer")
            assert tab.eval("document.documentElement.scrollWidth") == 420
        assert tab.problems == []


@pytest.fixture(scope="module")
def compared(run: Path) -> str:
    """The address of a comparison with a run that learns faster and has a different caption for one of two prompts."""
    other = write_run(run.parent / "digits-with-a-larger-learning-rate", NUM_STEPS, first_noise=40)
    for file in (other / "evaluations" / "digits").glob("*.jsonl"):
        file.write_text(file.read_text().replace("photo of the digit 8", "drawing of the digit 8"))
    return comparison.write([run, other]).as_uri()


def test_comparison_has_a_column_per_run(compared: str, tmp_path: Path) -> None:
    """The evaluations of a sample are side by side, and each lists the runs in the same order."""
    with browse_with(tmp_path, compared) as tab:
        take_pictures(tab, "image_comparison", "#common-images")
        rows, names = tab.eval(COMPARISON), ["digits", "digits-with-a-larger-learning-rate"]
        assert [row["when"] for row in rows] == ["before step 1", "after step 4"] * 2
        for row, rewards in zip(rows, [("0.2", "0.2"), ("0.8", "0.9333")] * 2, strict=True):
            assert [picture["width"] for picture in row["pictures"]] == [32, 32]
            assert [picture["texts"] for picture in row["pictures"]] == [*map(list, zip(names, rewards, strict=True))]
            assert [picture["alt"] for picture in row["pictures"]] == [f"{name}, {row['when']}" for name in names]
        lefts = [picture["left"] for row in rows for picture in row["pictures"]]
        assert lefts == [*sorted(lefts[:4])] * 2 and len(set(lefts)) == 4
        assert [
            len({picture["top"] for row in pair for picture in row["pictures"]}) for pair in (rows[:2], rows[2:])
        ] == [1, 1]
        assert tab.eval("document.querySelectorAll('#common-images .prompt pre').length") == 1
        note = tab.eval("document.querySelector('#common-images .note').textContent")
        assert note.endswith("are omitted: 2 samples of digits.")
        assert tab.eval("getComputedStyle(document.querySelector('#common-images img')).imageRendering") == "pixelated"
        assert tab.problems == []


def test_comparison_fits_a_narrow_window(compared: str, tmp_path: Path) -> None:
    """The images of two runs fit side by side."""
    with browse_with(tmp_path, compared, 390, 900) as tab:
        take_pictures(tab, "image_comparison_narrow", "#common-images")
        assert tab.eval("document.documentElement.scrollWidth") == 390
        assert tab.eval(
            "[...document.querySelectorAll('.strip')].every((node) => node.scrollWidth === node.clientWidth)"
        )
        assert tab.problems == []


def test_comparison_of_five_runs_scrolls_its_strips(run: Path, tmp_path: Path) -> None:
    """The page itself does not become wider than the window."""
    runs = [run, *(write_run(tmp_path / f"run{number}" / ("name" * 10), 2, side=320) for number in range(4))]
    with browse_with(tmp_path, comparison.write(runs).as_uri(), 390, 900) as tab:
        take_pictures(tab, "image_comparison_five", "#common-images")
        assert tab.eval("document.documentElement.scrollWidth") == 390
        assert tab.eval("[...document.querySelectorAll('.strip')].every((node) => node.scrollWidth > node.clientWidth)")
        assert [len(row["pictures"]) for row in tab.eval(COMPARISON)] == [5] * 8
        assert tab.problems == []


def test_captions_are_escaped_and_omitted_images_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A caption has markup, and the page has room for only a few images."""
    folder = write_run(tmp_path / "hostile", 2, caption=CAPTION)
    monkeypatch.setattr(images, "MAX_BYTES", 10_000)
    report.write(folder)
    with browse_with(tmp_path, (folder / "report.html").as_uri()) as tab:
        take_pictures(tab, "image_omitted", "#viewer")
        sections = tab.eval(SECTIONS)
        assert [section["prompt"] for section in sections] == [CAPTION] * NUM_DIGITS
        notes = [picture["note"] for section in sections for picture in section["pictures"]]
        assert notes[0] is None and notes[-1].startswith("not shown: 2.2.")
        assert not tab.eval("document.querySelector('main b:not(.reward)')")
        note = tab.eval("document.getElementById('rollout-note').textContent")
        assert "of their images are missing or omitted" in note
        assert tab.problems == []


def test_live_page_adds_images_of_new_steps(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "watched", 1)
    shutil.rmtree(folder / "evaluations")
    with serving(folder) as address, browse_with(tmp_path, address) as tab:
        assert tab.eval(EVALUATION) == []
        write_step(folder, 2)
        tab.until("steps.length === 2 && document.querySelectorAll('#evaluation-samples .picture').length === 4")
        assert all(picture["width"] == 32 for section in tab.eval(SECTIONS) for picture in section["pictures"])
        assert tab.eval("document.querySelector('#evaluation-samples details').open")
        assert tab.eval("stepSelect.value") == "step 2"
        assert tab.problems == []
