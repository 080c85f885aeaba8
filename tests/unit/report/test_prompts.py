"""Prompts with images in the report: their parts, the thumbnails, and malformed lines."""

from __future__ import annotations

import base64
import json
import re
from itertools import pairwise
from pathlib import Path

import pytest

from megarl import report
from megarl.report import prompts
from megarl.report.evaluations import read_evaluations, render_samples
from megarl.report.images import IS_SMALL, URI
from megarl.report.page import rollout_note
from megarl.report.prompts import MAX_IMAGES, PARTS, select_prompt, select_turns
from megarl.report.viewer import MAX_IMAGES as MAX_PICTURED
from megarl.report.viewer import MAX_SAMPLES, page_data, read_rollouts
from megarl.rewards.prompt_thumbnails import THUMBNAILS
from megarl.rewards.rollout_file import append_rollouts
from megarl.run.folder import RunFolder
from tests.prompt_image_run import Score, decode, encoded, prompt, sample, write_step

RED, GREEN = (200, 10, 30), (10, 180, 40)
ATTACK = '<script>alert(1)</script><img src=x onerror="alert(1)">'


def line(*parts: str | int) -> dict:
    """Return a line whose prompt consists of texts and images with these numbers of tokens."""
    text, images = "", []
    for part in parts:
        if isinstance(part, int):
            images.append({"start": len(text), "stop": len(text) + 3, "num_tokens": part, "digest": "d"})
        text += "<p>" if isinstance(part, int) else part
    return {"prompt": text, "prompt_images": images}


def data_in(page: str) -> str:
    return page.partition('id="rollouts">')[2].partition("</script>")[0]


def test_report_has_images_between_the_texts(tmp_path: Path) -> None:
    items = [prompt("p", "first ", encoded(RED), " then ", encoded(GREEN, 300, 300, "JPEG")), prompt("q", "text only")]
    write_step(tmp_path, 1, items)
    [step] = read_rollouts(RunFolder(tmp_path).rollout_files()).steps
    pictured = [item for item in step.samples if PARTS in item]
    assert [item["prompt_id"] for item in pictured] == ["p", "p"]
    names = [f"{THUMBNAILS}/{image.digest}.{end}" for image, end in zip(items[0].images, ("png", "jpg"), strict=True)]
    for item in pictured:
        parts = [{"num_tokens": 30, "thumbnail": names[0]}, {"num_tokens": 31, "thumbnail": names[1]}]
        assert item[PARTS] == ["first ", parts[0], " then ", parts[1], ""]
        assert item["prompt"] == "first  then "
    assert [step.thumbnails[name][IS_SMALL] for name in names] == [True, False]
    for name in names:
        assert (
            base64.b64decode(step.thumbnails[name][URI].partition(",")[2])
            == (tmp_path / "rollouts" / name).read_bytes()
        )
    assert [*RunFolder(tmp_path).image_grids(1)] == ["rollouts/images", "evaluation/digits/images"]
    page = report.write(tmp_path).read_text()
    assert data_in(page).count('"data:image/') == 2  # once per image, not per sample
    assert "image_pad" not in page and not re.search(r'(src|href)="(?!data:)', page)


def test_omitted_middle_keeps_the_images() -> None:
    fields = select_prompt(line("a" * 60, 5, "b" * 60, 6, "c" * 60), 100)
    middle = "\n… 80 characters omitted …\n"
    assert fields[PARTS] == ["a" * 50 + middle, {"num_tokens": 5}, "", {"num_tokens": 6}, "c" * 50]
    assert fields["prompt"] == "a" * 50 + middle + "c" * 50
    fields = select_prompt(line("a" * 10, 5, "b" * 180, 6, "c" * 10), 100)
    assert fields[PARTS] == [
        *("a" * 10, {"num_tokens": 5}, "b" * 40 + "\n… 100 characters omitted …\n" + "b" * 40, {"num_tokens": 6}),
        "c" * 10,
    ]


def test_long_list_of_images_is_cut() -> None:
    parts = select_prompt(line(*(["x", 4] * (MAX_IMAGES + 3)), "end"), 1000)[PARTS]
    assert sum(isinstance(part, dict) for part in parts) == MAX_IMAGES
    assert "\n… 3 more images …\n" in parts and parts[-1] == "end"


@pytest.mark.parametrize(
    "images",
    [
        *("text", [3], [{}], [{"start": 0, "stop": 1}], [{"start": 0, "stop": 99, "num_tokens": 1}]),
        *([{"start": 2, "stop": 1, "num_tokens": 1}], [{"start": -1, "stop": 1, "num_tokens": 1}]),
        [{"start": 2, "stop": 3, "num_tokens": 1}, {"start": 0, "stop": 1, "num_tokens": 1}],
    ],
)
def test_malformed_places_are_ignored(images: object) -> None:
    assert select_prompt({"prompt": "some text", "prompt_images": images}, 100) == {"prompt": "some text"}


def test_images_in_messages_are_those_of_the_prompt() -> None:
    content = [{"type": "text", "text": "see "}, {"type": "image"}, {"type": "text", "text": "?"}, {"type": "image"}]
    record = line("see ", 5, "?") | {
        "messages": [{"role": "user", "content": content}, {"role": "tool", "content": [1]}]
    }
    first, second = select_turns(record, 100)
    assert first[PARTS] == ["see ", {"num_tokens": 5}, "?", {}, ""] and first["content"] == "see ?"
    assert second == {"role": "tool", "content": [1]}
    first, _ = select_turns(record | {"first_turn": 2}, 100)  # earlier parts of the rollout had other images
    assert first[PARTS] == ["see ", {}, "?", {}, ""]


def test_images_in_messages_are_found_by_digest() -> None:
    """Environments write the digests. A line has only the images of its own sample."""
    names = ("observed", "d", "unknown", {})
    content = [{"type": "image", "image": name} for name in names]
    malformed = [3, {}, {"num_tokens": 4}, {"num_tokens": "4", "digest": "x"}]
    observed = [{"num_tokens": 4, "digest": "observed", "thumbnail": "t"}, *malformed]
    record = line(5) | {"observation_images": observed, "messages": [{"role": "user", "content": content}]}
    [turn] = select_turns(record, 100)
    assert turn[PARTS][1::2] == [{"num_tokens": 4, "thumbnail": "t"}, {"num_tokens": 5}, {}, {}]
    placeless = [{"num_tokens": 5, "digest": "d"}]
    [turn] = select_turns(record | {"prompt_images": placeless}, 100)
    assert turn[PARTS][1::2] == [{"num_tokens": 4, "thumbnail": "t"}, {"num_tokens": 5}, {}, {}]
    [turn] = select_turns(record | {"observation_images": "text"}, 100)
    assert turn[PARTS][1::2] == [{}, {"num_tokens": 5}, {}, {}]


def test_messages_have_the_limits_of_prompts() -> None:
    content = [{"type": "text", "text": "a" * 60}, {"type": "image"}, {"type": "text", "text": "b" * 60}]
    content += [{"type": "image"}] * (MAX_IMAGES + 1)
    [turn] = select_turns({"messages": [{"role": "user", "content": content}]}, 100)
    assert sum(isinstance(part, dict) for part in turn[PARTS]) == MAX_IMAGES
    texts = ["a" * 50 + "\n… 20 characters omitted …\n", "b" * 50, "\n… 2 more images …\n"]
    assert [part for part in turn[PARTS] if part and isinstance(part, str)] == texts


def test_samples_with_images_are_spread_over_the_rewards(tmp_path: Path) -> None:
    samples = [line("x", 5) | {"reward": float(i)} for i in range(MAX_PICTURED * 2)]
    for item in samples:
        item["prompt_images"][0]["thumbnail"] = f"{THUMBNAILS}/{'0' * 64}.png"
    file = tmp_path / "step_000001.jsonl"
    file.write_text("".join(json.dumps({"response": "r", "sample_id": "1.0.0", **item}) + "\n" for item in samples))
    [step] = read_rollouts({1: file}).steps
    rewards = [item["reward"] for item in step.samples]
    assert (rewards[0], rewards[-1], len(rewards)) == (len(samples) - 1, 0, MAX_SAMPLES)
    assert max(before - after for before, after in pairwise(rewards)) <= 3


def test_steps_share_embedded_thumbnails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image that one step omits is shown if another step embeds it."""
    items = [prompt(f"p{i}", encoded((10 * i, 0, 0)), "?") for i in range(3)]
    files = {step: write_step(tmp_path, step, chosen) for step, chosen in ((1, items[:2]), (2, items[1:]), (3, items))}
    size = max(path.stat().st_size for path in (tmp_path / "rollouts" / THUMBNAILS).glob("*"))
    monkeypatch.setattr(prompts, "MAX_BYTES", 2 * size)
    rollouts = read_rollouts(files)
    assert [len([fields for fields in step.thumbnails.values() if fields]) for step in rollouts.steps] == [2, 2, 2]
    assert rollouts.num_omitted_images == 0
    page = report.write(tmp_path).read_text()
    assert data_in(page).count('"data:image/') == 3


def test_thumbnails_are_embedded_up_to_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_step(tmp_path, 1, [prompt(f"p{i}", encoded((10 * i, 0, 0)), "?") for i in range(4)])
    size = max(path.stat().st_size for path in (file.parent / THUMBNAILS).glob("*"))
    monkeypatch.setattr(prompts, "MAX_BYTES", 3 * size)
    rollouts = read_rollouts({1: file})
    [step] = rollouts.steps
    assert sum(map(bool, step.thumbnails.values())) == 3 and rollouts.num_omitted_images == 1
    assert "1 of their images is missing or omitted" in rollout_note(rollouts)


@pytest.mark.parametrize("name", ["../secret.png", f"{THUMBNAILS}/../secret.png", "secret.png", "/etc/passwd", 3, []])
def test_foreign_files_are_not_embedded(tmp_path: Path, name: object) -> None:
    file = write_step(tmp_path, 1, [prompt("p", "a", encoded(RED))])
    (tmp_path / "secret.png").write_bytes(encoded(GREEN))
    [row, *_] = map(json.loads, file.read_text().splitlines())
    row["prompt_images"][0]["thumbnail"] = name
    file.write_text(json.dumps(row) + "\n")
    [step] = read_rollouts({1: file}).steps
    assert step.thumbnails == {} and step.samples[0][PARTS] == ["a", {"num_tokens": 30}, ""]


def test_replaced_thumbnail_is_not_embedded(tmp_path: Path) -> None:
    file = write_step(tmp_path, 1, [prompt("p", "a", encoded(RED)), prompt("q", "b", encoded(GREEN))])
    first, second = sorted((file.parent / THUMBNAILS).glob("*"))
    first.write_text("<svg/>")
    second.unlink()
    second.symlink_to(file)
    rollouts = read_rollouts({1: file})
    assert page_data(rollouts.steps)["thumbnails"] == {} and rollouts.num_omitted_images == 2


def test_evaluation_has_images_in_prompts_and_messages(tmp_path: Path) -> None:
    file = tmp_path / "step_000001.jsonl"
    item = prompt("p", f"{ATTACK} ", encoded(RED), f" {ATTACK}", num_tokens=1)
    messages = [{"role": "user", "content": [{"type": "text", "text": ATTACK}, {"type": "image"}]}]
    scored = [(sample("digits.0.0", item, messages), Score(1.0, {})), (sample("digits.0.1", item), Score(0.0, {}))]
    append_rollouts(file, 1, scored, decode=decode)
    html = render_samples(read_evaluations({"digits": {1: file}}))
    assert html.count('<img class="small" src="data:image/png;base64,') == 3
    assert html.count("<span>1 token</span>") == 3
    assert "<script" not in html and 'onerror="' not in html and html.count("<img") == 3
    before, after = html.split("<img", 2)[:2]
    assert before.count("&lt;script") == 1 and "&lt;script" in after
