"""The images of a run in the report and on the live page, in Chromium."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl import report
from megarl.report import images
from megarl.report.live import serve
from tests.browser.chromium import Tab, browse_with
from tests.image_run import NUM_DIGITS, SAMPLES_PER_PROMPT, write_run, write_step

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
    choose(tab, "least", "0.7")  # only the best samples of the last steps
    [section] = tab.eval(SECTIONS)
    assert section["title"] == "Prompt · 3 steps" and section["steps"] == ["step 2", "step 3", "step 4"]
    choose(tab, "view", "groups")
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
        assert "of their images are missing or left out" in note
        assert tab.problems == []


def test_live_page_adds_images_of_new_steps(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "watched", 1)
    shutil.rmtree(folder / "evaluations")
    with serve(folder) as (address, answer):
        threading.Thread(target=answer, daemon=True).start()
        with browse_with(tmp_path, address) as tab:
            assert tab.eval(EVALUATION) == []
            write_step(folder, 2)
            tab.until("steps.length === 2 && document.querySelectorAll('#evaluation-samples .picture').length === 4")
            assert all(picture["width"] == 32 for section in tab.eval(SECTIONS) for picture in section["pictures"])
            assert tab.eval("document.querySelector('#evaluation-samples details').open")
            assert tab.eval("stepSelect.value") == "step 2"
            assert tab.problems == []
