"""Conversations and preference pairs with images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from megarl.core.errors import UserError
from megarl.core.sample import Sample
from megarl.data.offline import OfflineData, load_offline_data
from tests import tiny_vision
from tests.unit.data.image_data import png
from tests.unit.data.offline import config_of, message, write

SIZES = {"a.png": (64, 32), "b.png": (20, 90), "c.png": (300, 170)}
IMAGE = {"type": "image"}
BEGIN, END, PAD = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder, which also contains images."""
    folder = tiny_vision.build(tmp_path_factory.mktemp("model"), "qwen3_vl")
    for name, size in SIZES.items():
        (folder / name).write_bytes(png(*size))
    return folder


def load(folder: Path, rows: str, *records: dict[str, Any], overrides: tuple[str, ...] = (), suffix=".jsonl"):
    keys = "model.vision=true", "data.image_column=images", "rollout.context_length=512", *overrides
    return load_offline_data(config_of(write(folder, list(records), suffix), rows, *keys), folder)


def text(folder: Path, content: str, *images: str) -> str:
    """Return the text with each <image> replaced by as many placeholders as transformers' processor has features."""
    for name in images:
        width, height = SIZES[name]
        processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
        grid = processor([Image.new("RGB", (width, height))], return_tensors="np")["image_grid_thw"][0]
        content = content.replace("<image>", BEGIN + PAD * int(np.prod(grid) // 4) + END, 1)
    return content


def check(sample: Sample, prompt: str, response: str, trained: str) -> None:
    """Compare with the expected texts. `trained`: the trained parts of the response, joined."""
    tokenizer = tiny_vision.tokenizer()
    assert sample.prompt.token_ids.tolist() == tokenizer(prompt)["input_ids"]
    assert sample.response_ids.tolist() == tokenizer(response)["input_ids"]
    assert sample.response_ids[sample.response_mask].tolist() == tokenizer(trained)["input_ids"]
    is_placeholder = np.zeros(sample.num_tokens, bool)
    for image in sample.images:
        is_placeholder[image.start : image.stop] = True
    np.testing.assert_array_equal(is_placeholder, sample.token_ids == tiny_vision.IMAGE_ID)


def test_conversations_may_have_images_in_every_turn(folder: Path) -> None:
    """The images after the first response belong to the response."""
    record = {
        "messages": [
            message("user", "<image>What?"),
            message("assistant", "A cat."),
            {"role": "user", "content": [{"type": "text", "text": "Or <image>"}, IMAGE, IMAGE]},
            message("assistant", "Two."),
        ],
        "images": ["a.png", "b.png", "c.png"],
    }
    plain = {"messages": [message("user", "1+1"), message("assistant", "2")], "images": None}
    data = load(folder, "messages", record, plain)
    [[sample], [other]] = data.rows
    check(
        sample,
        text(folder, "<|im_start|>user\n<image>What?<|im_end|>\n<|im_start|>assistant\n", "a.png"),
        "A cat.<|im_end|>\n<|im_start|>user\nOr <image>"
        + text(folder, "<image><image>", "b.png", "c.png")
        + "<|im_end|>\n<|im_start|>assistant\nTwo.<|im_end|>",
        "A cat.<|im_end|>Two.<|im_end|>",
    )
    check(other, "<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n", "2<|im_end|>", "2<|im_end|>")
    assert data.images is not None and len(data.images) == 3 and not other.images
    assert (len(sample.prompt.images), len(sample.response_images)) == (1, 2)
    files = [(folder / name).read_bytes() for name in SIZES]
    assert [image.file for image in data.images.attach(sample).images] == files
    assert data.row_images.num_bytes() == sum(map(len, files))


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_pairs_share_the_images_of_their_prompt(folder: Path, suffix: str) -> None:
    image: Any = "b.png" if suffix == ".jsonl" else {"bytes": (folder / "b.png").read_bytes(), "path": None}
    row = {"prompt": "See <image>: ok?", "chosen": "yes", "rejected": "<image>", "images": image}
    [[chosen, rejected]] = load(folder, "preferences", row, suffix=suffix).rows
    prompt = text(folder, "<|im_start|>user\nSee <image>: ok?<|im_end|>\n<|im_start|>assistant\n", "b.png")
    check(chosen, prompt, "yes<|im_end|>", "yes<|im_end|>")
    check(rejected, prompt, "<image><|im_end|>", "<image><|im_end|>")
    assert chosen.prompt == rejected.prompt and chosen.prompt.images == rejected.prompt.images


def test_markers_of_the_assistant_are_text(folder: Path) -> None:
    messages = [message("user", "<image>Tag?"), message("assistant", "<image>"), message("user", "?")]
    record = {"messages": [*messages, message("assistant", "</image>")], "images": "a.png"}
    [[sample]] = load(folder, "messages", record).rows
    check(
        sample,
        text(folder, "<|im_start|>user\n<image>Tag?<|im_end|>\n<|im_start|>assistant\n", "a.png"),
        "<image><|im_end|>\n<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n</image><|im_end|>",
        "<image><|im_end|></image><|im_end|>",
    )
    pair = {"prompt": messages, "chosen": "a", "rejected": "b", "images": "a.png"}
    [[chosen, _]] = load(folder, "preferences", pair).rows
    assert len(chosen.prompt.images) == 1


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_responses_of_pairs_may_consist_of_text_parts(folder: Path, suffix: str) -> None:
    def turn(*texts: str) -> list[dict[str, Any]]:
        return [{"role": "assistant", "content": [{"type": "text", "text": text} for text in texts]}]

    image: Any = "b.png" if suffix == ".jsonl" else {"bytes": (folder / "b.png").read_bytes(), "path": None}
    user = [{"role": "user", "content": [IMAGE, {"type": "text", "text": "Ok?"}]}]
    row = {"prompt": user, "chosen": turn("<image>", "yes"), "rejected": turn("no"), "images": image}
    [pair] = load(folder, "preferences", row, suffix=suffix).rows
    prompt = text(folder, "<|im_start|>user\n<image>Ok?<|im_end|>\n<|im_start|>assistant\n", "b.png")
    for sample, response in zip(pair, ("<image>yes<|im_end|>", "no<|im_end|>"), strict=True):
        check(sample, prompt, response, response)
    with pytest.raises(UserError, match=r"column 'chosen': expected text or a list .* {type: text, text: TEXT}"):
        load(folder, "preferences", row | {"chosen": [{"role": "assistant", "content": [IMAGE]}]}, suffix=suffix)


def test_rendered_pairs_may_have_images(folder: Path) -> None:
    row = {"prompt": f"{BEGIN}{PAD}{END}Q:", "chosen": "yes", "rejected": "no", "images": "c.png"}
    [[chosen, _]] = load(folder, "preferences", row, overrides=("data.chat_template=false",)).rows
    check(chosen, text(folder, "<image>Q:", "c.png"), "yes<|im_end|>", "yes<|im_end|>")


def test_data_hash_includes_images(folder: Path) -> None:
    def data(name: str) -> OfflineData:
        return load(folder, "preferences", {"prompt": "<image>", "chosen": "a", "rejected": "b", "images": name})

    (folder / "d.png").write_bytes(png(64, 32, seed=5))
    first, other = data("a.png"), data("d.png")
    assert first.rows[0][0].prompt.token_ids.tolist() == other.rows[0][0].prompt.token_ids.tolist()
    assert first.data_hash != other.data_hash and first.data_hash == data("a.png").data_hash


@pytest.mark.parametrize(
    ("messages", "images", "expected"),
    [
        (
            [message("user", "Draw."), {"role": "assistant", "content": [IMAGE]}],
            "a.png",
            "rows.jsonl:1: an assistant message contains an image, but responses must be text. Fix: move the image",
        ),
        (
            [message("user", "<image>"), message("assistant", "a")],
            [],
            "rows.jsonl:1: the number of placeholders in the row (<image>, or parts of type image) is 1, but the",
        ),
        (
            [message("user", "<image>"), message("assistant", PAD)],
            "a.png",
            "rows.jsonl:1: the number of image tokens in the row is 2, but the number of images is 1. Fix: remove",
        ),
        (
            [message("user", "<image>"), message("assistant", "a")],
            "missing.png",
            "rows.jsonl:1: image 1 (missing.png): it cannot be read (No such file or directory). Fix: use the path",
        ),
    ],
)
def test_rows_with_unusable_images_are_named(folder: Path, messages: list, images: Any, expected: str) -> None:
    with pytest.raises(UserError) as raised:
        load(folder, "messages", {"messages": messages, "images": images})
    assert str(raised.value).removeprefix(f"{folder}/").startswith(expected)


def test_images_count_toward_the_length_of_a_row(folder: Path) -> None:
    row = {"messages": [message("user", "<image>"), message("assistant", "a")], "images": "a.png"}
    short = {"messages": [message("user", "b"), message("assistant", "a")], "images": None}
    limit = "rollout.context_length=24"  # without the image's second token, the row would fit
    data = load(folder, "messages", row, short, overrides=(limit, "data.overlong=drop"))
    assert data.num_dropped == 1 and len(data.rows) == 1
    with pytest.raises(
        UserError, match=r"rows.jsonl:1: the row has \d+ tokens, 2 of them for images, .* data.max_pixel"
    ):
        load(folder, "messages", row, overrides=(limit,))
