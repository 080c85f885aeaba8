"""Prompts with images, compared with transformers' processors."""

from __future__ import annotations

import base64
import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from megarl.config.evaluation import config_of_set
from megarl.config.evaluation_schema import EvaluationSet
from megarl.core.errors import UserError
from megarl.data.image_files import ImageFiles
from megarl.data.images import ImageError, ImageProcessor
from megarl.data.prompts import PromptSet, load_prompts
from tests import tiny_vision
from tests.tiny_vision import IMAGE_ID
from tests.unit.data.image_data import config_of, jsonl, png

TEXT = {"type": "text", "text": "What is it?"}
IMAGE = {"type": "image"}
SIZES = {"a.png": (64, 32), "b.png": (20, 90), "c.png": (300, 170)}


class WithoutVideos:
    """Mixin for processors without their video processor, which needs torchvision."""

    def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
        return None if name == "video_processor" else super().check_argument_for_proper_class(name, argument)


class Reference25(WithoutVideos, Qwen2_5_VLProcessor):
    pass


class Reference3(WithoutVideos, Qwen3VLProcessor):
    pass


REFERENCES = {"qwen2_5_vl": Reference25, "qwen3_vl": Reference3}


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def kind(request: pytest.FixtureRequest) -> tiny_vision.Kind:
    return request.param


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, kind: tiny_vision.Kind) -> Path:
    """A model's folder, which also contains images."""
    folder = tiny_vision.build(tmp_path_factory.mktemp(kind), kind)
    for name, size in SIZES.items():
        (folder / name).write_bytes(png(*size))
    return folder


def load(folder: Path, *rows: dict[str, Any], **options: Any) -> PromptSet:
    return load_prompts(config_of(jsonl(folder, *rows), **options), folder)


def user(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def error(folder: Path, row: dict[str, Any], **options: Any) -> str:
    with pytest.raises(UserError) as raised:
        load(folder, {"prompt": "Hi", "images": None}, row, **options)
    return str(raised.value).removeprefix(f"{folder}/")


CONVERSATIONS = {
    "one": (user(IMAGE, TEXT), ["a.png"]),
    "two": (user(IMAGE, TEXT, IMAGE), ["b.png", "c.png"]),
    "none": (user(TEXT), []),
    "text": ([{"role": "user", "content": "Hi"}], []),
    "turns": (
        [
            {"role": "system", "content": "Be brief."},
            *user(TEXT, IMAGE),
            {"role": "assistant", "content": "A cat."},
            *user(IMAGE, IMAGE, TEXT),
        ],
        ["c.png", "a.png", "b.png"],
    ),
}


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_prompts_equal_those_of_transformers(folder: Path, kind: tiny_vision.Kind, name: str) -> None:
    messages, files = CONVERSATIONS[name]
    [prompt] = load(folder, {"prompt": messages, "images": files}).prompts
    tokenizer = tiny_vision.tokenizer()
    processor = REFERENCES[kind](Qwen2VLImageProcessorPil.from_pretrained(folder), tokenizer, None)
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    images = [Image.open(folder / file) for file in files]
    expected = processor(text=[text], images=images or None, return_tensors="np")
    assert prompt.token_ids.tolist() == expected["input_ids"][0].tolist()
    assert [list(image.grid) for image in prompt.images] == expected.get("image_grid_thw", np.empty((0, 3))).tolist()
    is_placeholder, is_kept = np.zeros(len(prompt.token_ids), bool), np.ones(len(prompt.token_ids), bool)
    for image in prompt.images:
        is_placeholder[image.start : image.stop] = True
        is_kept[image.start + 1 : image.stop] = False
    assert np.array_equal(is_placeholder, prompt.token_ids == IMAGE_ID)
    assert prompt.token_ids[is_kept].tolist() == tokenizer(text)["input_ids"]
    assert prompt.text == text
    if files:
        patches = ImageProcessor.of(folder).patches([(folder / file).read_bytes() for file in files])
        np.testing.assert_array_equal(patches, expected["pixel_values"])


def test_markers_in_text_stand_for_images(folder: Path) -> None:
    files = ["a.png", "b.png"]
    parts = user(IMAGE, {"type": "text", "text": "or "}, IMAGE, {"type": "text", "text": "?"})
    rows = ["<image>or <image>?", [{"role": "user", "content": "<image>or <image>?"}], parts]
    first, *others = load(folder, *({"prompt": prompt, "images": files} for prompt in rows)).prompts
    for other in others:
        assert np.array_equal(first.token_ids, other.token_ids)
        assert (first.messages, first.images) == (other.messages, other.images)
    assert first.messages == tuple(parts)


def test_typed_placeholders_and_markers_stay_text(folder: Path) -> None:
    typed = {"type": "text", "text": "<image><|image_pad|><|vision_start|>"}
    [prompt] = load(folder, {"prompt": user(typed, IMAGE), "images": "a.png"}).prompts
    assert (prompt.token_ids == IMAGE_ID).sum() == prompt.images[0].num_tokens
    assert "<image><|image_pad|><|vision_start|><|vision_start|><|image_pad|>" in prompt.text


def sources_of(folder: Path) -> dict[str, Any]:
    path = folder / "a.png"
    url = "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()
    return {"absolute": str(path), "file url": path.as_uri(), "data url": url, "record": {"path": "a.png"}}


@pytest.mark.parametrize("source", ["absolute", "file url", "data url", "record"])
def test_images_of_all_sources_are_equal(folder: Path, source: str) -> None:
    value = sources_of(folder)[source]
    rows = [{"prompt": "<image>", "images": images} for images in ("a.png", value, [value])]
    data = load(folder, *rows)
    assert len({prompt.images for prompt in data.prompts}) == len(data.images) == 1
    assert data.images.read(data[1].images[0].digest) == (folder / "a.png").read_bytes()


@pytest.mark.parametrize("part", ["image_url", "url", "image"])
def test_parts_may_contain_their_images(folder: Path, part: str) -> None:
    url = sources_of(folder)["data url"]
    own = {
        "image_url": {"type": "image_url", "image_url": {"url": url}},
        "url": {"type": "image_url", "image_url": url},
        "image": {"type": "image", "image": "a.png"},
    }[part]
    rows = [{"prompt": user(own, IMAGE), "images": ["b.png"]}, {"prompt": user(own)}]
    mixed, alone = load(folder, *rows).prompts
    assert [image.grid for image in mixed.images] == [image.grid for image in load(folder, AB).prompts[0].images]
    assert mixed.messages == tuple(user(IMAGE, IMAGE)) and alone.messages == tuple(user(IMAGE))


AB = {"prompt": "<image><image>", "images": ["a.png", "b.png"]}


def test_parquet_rows_of_verl_contain_encoded_images(folder: Path, tmp_path: Path) -> None:
    contents = [png(64, 32, seed) for seed in range(3)]
    rows = [
        {
            "prompt": [{"role": "user", "content": "<image>" * count + "Hi"}],
            "images": [{"bytes": file, "path": None} for file in contents[:count]],
            "reward_model": {"ground_truth": "4", "style": "rule"},
        }
        for count in (1, 0, 3)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    config = config_of(tmp_path / "train.parquet", answer_column="reward_model.ground_truth")
    data = load_prompts(config, folder)
    assert [len(prompt.images) for prompt in data.prompts] == [1, 0, 3]
    assert [data.images.read(image.digest) for image in data[2].images] == contents
    with pytest.raises(UserError, match=r"train.parquet:1: .* contains encoded images, which are not passed to"):
        load_prompts(config, folder, {"images": "f"})
    with_rows = load_prompts(config, folder, {"row": None})
    assert with_rows[0].columns == {name: rows[0][name] for name in ("prompt", "reward_model")}


def test_parquet_parts_ignore_empty_fields(folder: Path, tmp_path: Path) -> None:
    table = pa.Table.from_pylist([{"prompt": user(IMAGE, TEXT), "image": (folder / "a.png").read_bytes(), "answer": 1}])
    pq.write_table(table, tmp_path / "train.parquet")
    [prompt] = load_prompts(config_of(tmp_path / "train.parquet", image_column="image"), folder).prompts
    assert prompt.messages == tuple(user(IMAGE, TEXT)) and len(prompt.images) == 1


@pytest.mark.parametrize("column", ["images", "extra.images"])
def test_rewards_receive_rows_without_their_images(folder: Path, tmp_path: Path, column: str) -> None:
    contents = [png(64, 32, seed) for seed in range(2)]
    own = {"type": "image", "image": {"bytes": contents[0]}}
    images = [{"bytes": contents[1]}]
    row = {"prompt": user(own, IMAGE), "images": images, "extra": {"images": images, "level": 2}, "answer": 1}
    row = row if column == "images" else {name: value for name, value in row.items() if name != "images"}
    row = row | {"extra": {"level": 2}} if column == "images" else row
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "train.parquet")
    [prompt] = load_prompts(config_of(tmp_path / "train.parquet", image_column=column), folder, {"row": None}).prompts
    assert prompt.columns == {"prompt": user(IMAGE, IMAGE), "extra": {"level": 2}, "answer": 1}
    assert len(prompt.images) == 2
    part = {"type": "image_url", "image_url": {"url": sources_of(folder)["data url"]}}
    source = jsonl(folder, {"prompt": user(TEXT, part), "images": None})
    [prompt] = load_prompts(config_of(source), folder, {"row": None}).prompts
    assert prompt.columns["prompt"] == user(TEXT, IMAGE)


def test_listed_folders_may_contain_images(folder: Path, tmp_path: Path) -> None:
    names = ["a#b?c %41.png", "link.png"]
    (tmp_path / names[0]).write_bytes(png(64, 32))
    (tmp_path / names[1]).symlink_to(folder / "a.png")
    rows = [{"prompt": "<image>", "images": str(tmp_path / name)} for name in names]
    rows.append({"prompt": "<image>", "images": f"file://localhost{tmp_path}/a#b?c%20%2541.png"})
    assert "it is outside the folder of the data file" in error(folder, rows[0])
    data = load(folder, *rows, image_folders=[str(tmp_path)])
    assert [prompt.images[0].grid for prompt in data.prompts] == [data[0].images[0].grid] * 3


def test_pipes_and_endless_files_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.data.image_files.MAX_FILE_BYTES", 2**20 - 1)
    os.mkfifo(tmp_path / "pipe")
    files = ImageFiles()
    with pytest.raises(ImageError, match="it is not a regular file"):
        files.add("pipe", tmp_path)
    for value in ("pagemap", bytes(2**20)):
        with pytest.raises(ImageError, match="it has more than 1048575 bytes"):
            files.add(value, Path("/proc/self"))


def test_hash_covers_the_images(folder: Path, tmp_path: Path) -> None:
    def hash_of(seed: int) -> str:
        (folder / "d.png").write_bytes(png(64, 32, seed))
        return load(folder, {"prompt": "<image>", "images": "d.png"}).data_hash

    assert hash_of(5) == hash_of(5) != hash_of(6)


def test_changed_and_missing_files_are_rejected(folder: Path) -> None:
    path = folder / "e.png"
    path.write_bytes(png(64, 32))
    data = load(folder, {"prompt": "<image>", "images": "e.png"})
    digest = data[0].images[0].digest
    path.write_bytes(png(64, 32, 1))
    with pytest.raises(UserError, match=r"e.png: the image has changed since the run started. Fix: restore the file"):
        data.images.read(digest)
    path.unlink()
    with pytest.raises(UserError, match=r"e.png: the image can no longer be used: it cannot be read \(No such file"):
        data.images.read(digest)


PLACE = "train.jsonl:2"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"prompt": "<image><image>", "images": ["a.png"]},
            f"{PLACE}: the number of placeholders in the row (<image>, or parts of type image) is 2, but the number "
            "of images in column 'images' (data.image_column) is 1. Fix: add the images, or remove placeholders.",
        ),
        (
            {"prompt": user(TEXT), "images": ["a.png"]},
            f"{PLACE}: the number of placeholders in the row (<image>, or parts of type image) is 0, but the number "
            "of images in column 'images' (data.image_column) is 1. Fix: add <image> where each image",
        ),
        (
            {"prompt": "<image>", "images": "missing.png"},
            f"{PLACE}: image 1 (missing.png): it cannot be read (No such file or directory). Fix: use the path "
            "of a readable image file",
        ),
        ({"prompt": "<image>", "images": "."}, f"{PLACE}: image 1 (.): it is not a regular file. Fix: use the"),
        (
            {"prompt": "<image>", "images": "train.jsonl"},
            f"{PLACE}: image 1 (train.jsonl): it is not an image in a supported format",
        ),
        (
            {"prompt": "<image>", "images": "https://example.org/a.png"},
            f"{PLACE}: image 1 (https://example.org/a.png): images are not downloaded. Fix: download it",
        ),
        (
            {"prompt": "<image>", "images": "data:image/png;base64,!"},
            f"{PLACE}: image 1 (data:image/png;base64,!…): its data: URL is not valid base64",
        ),
        (
            {"prompt": "<image>", "images": "S3://photos/a.png"},
            f"{PLACE}: image 1 (S3://photos/a.png): images are not downloaded. Fix: download it",
        ),
        (
            {"prompt": "<image>", "images": "file://host/a.png"},
            f"{PLACE}: image 1 (file://host/a.png): it is on another host (host). Fix: copy it",
        ),
        (
            {"prompt": "<image>", "images": "a/../../b.png"},
            f"{PLACE}: image 1 (a/../../b.png): it is outside the folder of the data file. Fix: add its folder to",
        ),
        (
            {"prompt": "<image>", "images": {"bytes": "iVBORw0"}},
            f"{PLACE}: image 1 (iVBORw0): its field bytes is text. Fix: write data:image/png;base64,CONTENT",
        ),
        ({"prompt": "<image>", "images": {"path": ""}}, f"{PLACE}: image 1 (): it is not a regular file"),
        (
            {"prompt": "<image>", "images": "a" * 300},
            f"{PLACE}: image 1 ({'a' * 30}…): it is not readable (File name too",
        ),
        ({"prompt": "<image>", "images": 3}, f"{PLACE}: column 'images': expected null, or one or a list of images"),
        ({"prompt": "Hi"}, f"{PLACE}: missing column 'images' (expected: null, or one or a list of images"),
        (
            {"prompt": user({"type": "video", "video": "a.mp4"}), "images": None},
            f"{PLACE}: column 'prompt': expected text or a list of {{role, content}} messages, whose content is text",
        ),
        (
            {"prompt": [{"role": "assistant", "content": "<|image_pad|>"}, *user(TEXT)], "images": None},
            f"{PLACE}: the number of image tokens in the row is 1, but the number of images is 0. Fix: remove the",
        ),
    ],
    ids=[
        "few",
        "many",
        "missing",
        "folder",
        "text",
        "http",
        "base64",
        "s3",
        "host",
        "outside",
        "text in bytes",
        "empty",
        "long",
        "number",
        "column",
        "video",
        "assistant",
    ],
)
def test_unusable_rows_are_rejected(folder: Path, row: dict[str, Any], message: str) -> None:
    assert error(folder, row).startswith(message)


def test_extreme_images_are_rejected(folder: Path) -> None:
    (folder / "line.png").write_bytes(png(402, 2))
    message = error(folder, {"prompt": "<image>", "images": "line.png"})
    assert message.startswith(f"{PLACE}: image 1 (line.png): its size is 402 × 2 pixels, but the model supports")
    assert message.endswith("Fix: crop the image, or drop the row")


def test_long_prompts_are_refused_or_dropped(folder: Path) -> None:
    row = {"prompt": "<image>" * 3, "images": ["c.png"] * 3}
    [prompt] = load(folder, row).prompts
    length, num_image_tokens = len(prompt.token_ids), sum(image.num_tokens for image in prompt.images)
    message = error(folder, row, context_length=length + 15)
    assert f"the prompt has {length} tokens, {num_image_tokens} of them for images (" in message
    assert "lower data.max_pixels, or set data.overlong=drop" in message
    short = {"prompt": "<image>", "images": "a.png"}
    data = load(folder, short, row, context_length=length + 15, overlong="drop")
    assert (len(data), data.num_dropped) == (1, 1)


def test_rendered_prompts_contain_the_image_token(folder: Path) -> None:
    text = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>"
    row = {"prompt": text, "images": "c.png"}
    [prompt] = load(folder, row, chat_template=False).prompts
    assert prompt.text == text and prompt.images[0].start == prompt.token_ids.tolist().index(IMAGE_ID)
    message = error(folder, row | {"prompt": "<image>"}, chat_template=False)
    assert message.endswith("Fix: write the token once for each image, as the model's chat template does")


def test_given_responses_follow_prompts_with_images(folder: Path) -> None:
    row = {"prompt": "<image>What?", "images": "c.png", "response": "A cat."}
    data = load(folder, row, response_column="response")
    [response] = data.responses.values()
    assert response.text == "A cat." and response.mask.all()


def test_system_prompts_precede_prompts_with_images(folder: Path) -> None:
    [prompt] = load(folder, {"prompt": "<image>", "images": "a.png"}, system_prompt="Look at <image>.").prompts
    assert prompt.messages == ({"role": "system", "content": "Look at <image>."}, *user(IMAGE))
    assert len(prompt.images) == 1


def test_evaluation_sets_have_their_own_images(folder: Path) -> None:
    config = config_of(jsonl(folder, {"prompt": "<image>", "images": "a.png"}))

    def images_of(**keys: Any) -> tuple[Any, ...]:
        return load_prompts(config_of_set(config, EvaluationSet(name="set", **keys)), folder)[0].images

    assert len(images_of()) == 1
    assert images_of(image_column="") == images_of(source="arithmetic", size=1) == ()


def test_models_without_a_tower_are_rejected(tmp_path: Path) -> None:
    tiny_vision.tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(UserError, match=r"model.vision=true: model .* has no vision tower. Fix: set model.path"):
        load(tmp_path, {"prompt": "Hi", "images": None})


def test_encoded_images_are_not_kept_in_memory(folder: Path, tmp_path: Path) -> None:
    import tracemalloc

    files = [png(200, 200, seed) for seed in range(8)]  # noise, so that files are as large as their pixels
    rows = [{"prompt": "<image>", "images": [{"bytes": file}], "answer": 0} for file in files]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    config = config_of(tmp_path / "train.parquet")
    del rows
    tracemalloc.start()
    try:
        data = load_prompts(config, folder)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < len(files[0])
    assert [data.images.read(prompt.images[0].digest) for prompt in data.prompts] == files
    assert Image.open(io.BytesIO(data.images.read(data[3].images[0].digest))).size == (200, 200)
