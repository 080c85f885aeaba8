"""Rollouts with images in real environment processes: tokens, image positions, and unusable images."""

from __future__ import annotations

import asyncio
import hashlib
import io
import threading
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from megarl.config.load import load
from megarl.core.errors import UserError
from megarl.core.prompt import Prompt
from megarl.core.prompt_images import PromptImage
from megarl.core.sample import Sample
from megarl.data.images import ImageError
from megarl.data.turns import ChatTokens
from megarl.environments import host, sent_images
from megarl.environments import images as image_module
from megarl.environments.hosts import HostPool, host_arguments
from megarl.environments.images import ImageReader, ImageStore, RolloutImages
from megarl.environments.runner import RolloutRequest, RolloutRunner
from tests import tiny_vision
from tests.paths import QUICKSTART
from tests.scripted_policy import ScriptedPolicy, call
from tests.timing import WAIT_S
from tests.tiny_vision import EOS_ID, IDS, IMAGE_ID
from tests.unit.environments.screens import FIRST, LITERAL, SECOND, encoded, picture, user

SCREENS = Path(__file__).with_name("screens.py")
TOKENIZER = tiny_vision.tokenizer()
ROW = encoded(picture(90, 40, 2))
TURN = [IDS["<|im_start|>"], *TOKENIZER("assistant\n")["input_ids"]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vision.build(tmp_path_factory.mktemp("model") / "model", "qwen3_vl")


def ids(*parts: str | bytes | list[int]) -> tuple[list[int], list[PromptImage]]:
    """Return the token ids of texts, encoded images and other ids, and the images among them. Texts contain no special
    tokens."""
    processor = Qwen2VLImageProcessorPil(
        patch_size=16, merge_size=2, size={"shortest_edge": 32**2, "longest_edge": 64**2}
    )
    found: list[int] = []
    images: list[PromptImage] = []
    for part in parts:
        if isinstance(part, str):
            found += [token for letter in part for token in TOKENIZER(letter)["input_ids"]]
        elif isinstance(part, bytes):
            processed = processor([Image.open(io.BytesIO(part))], return_tensors="np")
            grid = tuple(processed["image_grid_thw"][0].tolist())
            found.append(IDS["<|vision_start|>"])
            count = len(processed["pixel_values"]) // 4
            images.append(PromptImage(len(found), count, grid, hashlib.sha256(part).hexdigest(), part))
            found += [*[IMAGE_ID] * count, IDS["<|vision_end|>"]]
        else:
            found += part
    return found, images


def message(role: str, *parts: str | bytes) -> list[str | bytes | list[int]]:
    return [[IDS["<|im_start|>"]], f"{role}\n", *parts, [EOS_ID], "\n"]


def shows(image: object) -> dict:
    return user({"type": "image", "image": image})


def prompt(kind: str) -> Prompt:
    """Return a row's prompt with an image between two texts."""
    token_ids, images = ids(*message("user", "Look ", ROW, "!"), TURN)
    content = [{"type": "text", "text": "Look "}, {"type": "image"}, {"type": "text", "text": "!"}]
    columns = {"kind": kind, "token": IMAGE_ID}
    return Prompt("p", "", token_ids, "42", ({"role": "user", "content": content},), columns, tuple(images))


def play(
    folder: Path,
    kind: str,
    policy: ScriptedPolicy,
    *overrides: str,
    name: str = "Screens",
    tokenizer=TOKENIZER,
    row: Prompt | None = None,
) -> list[Sample]:
    [samples] = play_all(folder, {row or prompt(kind): policy}, *overrides, name=name, tokenizer=tokenizer)
    return samples


def play_all(
    folder: Path, policies: Mapping[Prompt, ScriptedPolicy], *overrides: str, name: str = "Screens", tokenizer=TOKENIZER
) -> list[list[Sample]]:
    """Run one rollout per prompt concurrently in one process."""
    settings = f"environment={{class: '{SCREENS}:{name}', timeout_s: {WAIT_S}, agent_timeout_s: {WAIT_S}}}"
    room = ("rollout.max_new_tokens=900", "rollout.context_length=1000", "actor.tokens_per_microbatch=4096")
    config = load(QUICKSTART, [settings, "rewards.functions=[]", "model.vision=true", *room, *overrides])

    async def run() -> list[list[Sample]]:
        pool = await HostPool.start(host_arguments(config), 1)
        reader = ImageReader.of(config, folder, ImageStore())
        runner = RolloutRunner(config, tokenizer, pool, reader)
        try:
            await runner.start("127.0.0.1")
            requests = [RolloutRequest(f"1.{i}", row, seed=11, task_seed=7) for i, row in enumerate(policies)]
            return await asyncio.gather(*map(runner.run, requests, policies.values()))
        finally:
            await runner.close()

    return asyncio.run(run())


def says(*texts: str) -> ScriptedPolicy:
    return ScriptedPolicy(TOKENIZER, texts)


def assert_equals(sample: Sample, *parts: str | bytes | list[int]) -> None:
    token_ids, images = ids(*parts)
    assert sample.token_ids.tolist() == token_ids
    assert list(sample.images) == images
    for image in sample.images:
        assert set(sample.token_ids[image.start : image.stop].tolist()) == {IMAGE_ID}
    assert all(image.stop <= len(sample.prompt.token_ids) for image in sample.prompt.images)
    assert all(image.start >= len(sample.prompt.token_ids) for image in sample.response_images)


def test_images_are_at_their_placeholders(folder):
    """The opening, an observation and a turn contain the placeholder as text or as a sampled token."""
    policy = says(f"a{LITERAL}", "b", "c")
    [sample] = play(folder, "extended", policy)
    opening = [*message("user", "Look ", ROW, "!"), *message("user", f"and {LITERAL} ", FIRST, ".")]
    first = [*opening, TURN, "a", [IMAGE_ID, EOS_ID]]
    second = [*first, "\n", *message("user", SECOND, "or", FIRST, "?"), TURN, "b", [EOS_ID]]
    third = [*second, "\n", *message("user", f"{LITERAL} is text"), TURN, "c", [EOS_ID]]
    assert_equals(sample, *third)
    assert [image.digest for image in sample.prompt.images] == [hashlib.sha256(i).hexdigest() for i in (ROW, FIRST)]
    trained = sample.response_ids[sample.response_mask].tolist()
    assert trained == ids("a", [IMAGE_ID, EOS_ID], "b", [EOS_ID], "c", [EOS_ID])[0]
    for asked, parts in zip(policy.asked, (first, second, third), strict=True):
        token_ids, images = ids(*parts)
        assert [*asked.token_ids, *asked.completion.token_ids] == token_ids and list(asked.images) == images
    assert sample.prompt.text.count(LITERAL) == 3, "one placeholder per image, and the text"
    assert sample.episode.rewards == (None, None, 1.0)
    shown = [part for message in sample.episode.messages if message["role"] == "user" for part in message["content"]]
    assert [part["image"] for part in shown if isinstance(part, dict) and part["type"] == "image"] == [
        image.digest for image in sample.images
    ]


def test_row_prompt_starts_the_rollout_without_an_opening(folder):
    [sample] = play(folder, "row", says("a", "b", "c"))
    first = [*message("user", "Look ", ROW, "!"), TURN, "a", [EOS_ID], "\n"]
    second = [*message("user", SECOND, "or", FIRST, "?"), TURN, "b", [EOS_ID], "\n"]
    assert_equals(sample, *first, *second, *message("user", f"{LITERAL} is text"), TURN, "c", [EOS_ID])


def test_restart_begins_a_sample_with_its_own_images(folder):
    one, two = play(folder, "restart", says("a", "b", "c"))
    assert_equals(one, *message("user", "Look ", ROW, "!"), TURN, "a", [EOS_ID])
    first = [*message("user", "again ", SECOND), TURN, "b", [EOS_ID], "\n"]
    assert_equals(two, *first, *message("user", f"{LITERAL} is text"), TURN, "c", [EOS_ID])


def test_observation_that_does_not_fit_is_omitted(folder):
    """The opening and the first turn have 32 tokens, and the observation would need 33 more."""
    [sample] = play(folder, "row", says("a"), "rollout.context_length=60", "rollout.max_new_tokens=40")
    assert sample.episode.info.stop_reason == "max_tokens" and sample.episode.failure is None
    assert_equals(sample, *message("user", "Look ", ROW, "!"), TURN, "a", [EOS_ID])


def test_images_do_not_count_toward_observation_length(folder):
    [sample] = play(folder, "row", says("a", "b", "c"), "environment.observation_tokens=2")
    first = [*message("user", "Look ", ROW, "!"), TURN, "a", [EOS_ID], "\n"]
    second = [*message("user", SECOND, "or", FIRST), TURN, "b", [EOS_ID], "\n"]
    assert_equals(sample, *first, *second, *message("user", f"{LITERAL} "), TURN, "c", [EOS_ID])


NOT_AN_IMAGE = "Fix: return a Pillow image, the bytes of an encoded image, or a data: URL. Paths and other URLs are not"
FAILURES = {
    "http": f"step raised TypeError: 'http://localhost/a.png' is not an image. {NOT_AN_IMAGE}",
    "path": f"'/etc/hostname' is not an image. {NOT_AN_IMAGE}",
    "file": f"'file:///etc/hostname' is not an image. {NOT_AN_IMAGE}",
    "empty": f"NoneType is not an image. {NOT_AN_IMAGE}",
    "damaged": "an image from the environment: it cannot be decoded (image file is truncated). Fix: replace the image",
    "text": "JPEG, PNG, PPM, TIFF, WEBP). Fix: replace the image",
    "bomb": "it has 12000 × 12000 pixels, more than the maximum of 89478485. Fix: replace the image",
    "untyped": "is not a message part. Fix: use a part of type text, image or image_url",
    "input": "is not a message part. Fix: use a part of type text, image or image_url",
    "object": "renders 1 placeholders for 0 images. Fix: send images as parts of type image, and use a chat template",
    "huge": "an image has more than 89478485 pixels. Fix: return a smaller image",
    "thin": "its size is 2000 × 4 pixels, but the model supports aspect ratios of at most 200. Fix: crop the image",
    "base64": "(Only base64 data is allowed). Fix: encode the image again",
    "many": "the messages have more than 64 images. Fix: return fewer images",
    "as is": "an observation with as_is=True cannot have images. Fix: set as_is=False",
    "ids": "Opening.token_ids cannot have images. Fix: return only the messages",
    "placeholder": "token_ids contain image placeholders. Fix: return messages with image parts instead",
}


def test_unusable_image_fails_only_its_rollout(folder):
    policies = {prompt(kind): says("a") for kind in FAILURES} | {prompt("row"): says("a", "b", "c")}
    *failed, fine = play_all(folder, policies, "environment.max_consecutive_failures=99")
    assert fine[0].episode.failure is None
    for [sample], expected in zip(failed, FAILURES.values(), strict=True):
        failure = sample.episode.failure
        assert expected in failure and "row" not in failure and sample.episode.info.stop_reason == "failed"


def test_images_of_a_rollout_are_limited(folder, monkeypatch):
    monkeypatch.setattr(image_module, "MAX_IMAGES_PER_ROLLOUT", 2)
    [sample] = play(folder, "row", says("a", "b", "c"))
    assert "the rollout has more than 2 distinct images" in sample.episode.failure


def test_only_accepted_images_count_toward_the_limits(folder, monkeypatch):
    monkeypatch.setattr(image_module, "MAX_BYTES", len(FIRST) + len(SECOND))
    threads: set[str] = set()

    class Store(ImageStore):
        def put(self, file: bytes) -> bytes:
            threads.add(threading.current_thread().name)
            return file

    images = RolloutImages(ImageReader.of(load(QUICKSTART, ["model.vision=true"]), folder, Store()))

    def read(file: bytes) -> None:
        asyncio.run(images.read(sent_images.with_data_urls([shows(file)])))

    for damaged in (FIRST[:200], FIRST[:300]):
        with pytest.raises(ImageError, match="cannot be decoded"):
            read(damaged)
    for file in (FIRST, SECOND, FIRST):
        read(file)
    with pytest.raises(ImageError, match="bytes of images"):
        read(ROW)
    assert {name.rpartition("_")[0] for name in threads} == {"images"}


def test_response_of_an_environment_is_limited_in_characters(monkeypatch):
    messages = [shows(FIRST), shows(FIRST)]
    [sent, _] = sent_images.with_data_urls(messages)
    length = len(sent["content"][0]["image_url"]["url"])
    monkeypatch.setattr(sent_images, "MAX_URL_CHARACTERS", 2 * length)
    assert len(sent_images.with_data_urls(messages)) == 2
    monkeypatch.setattr(sent_images, "MAX_URL_CHARACTERS", 2 * length - 1)
    with pytest.raises(ValueError, match=r"the images exceed .* bytes\. Fix: return smaller images"):
        sent_images.with_data_urls(messages)


def test_images_from_environments_are_encoded_in_a_thread():
    threads = []

    class Picture(Image.Image):
        def save(self, *args, **kwargs) -> None:
            threads.append(threading.current_thread())
            super().save(*args, **kwargs)

    image = Picture()
    image._im, image._mode, image._size = picture(4, 4).im, "RGB", (4, 4)
    asyncio.run(host._plain([shows(image)]))
    assert threads and threads[0] is not threading.main_thread()


def test_many_copies_of_an_image_end_the_rollout_early(folder, monkeypatch):
    """64 copies have 256 tokens, which exceed the context of 60 tokens more than four times."""
    expanded = []
    expand = image_module.expand
    monkeypatch.setattr(image_module, "expand", lambda ids, *rest: expanded.append(len(ids)) or expand(ids, *rest))
    [sample] = play(folder, "copies", says("a"), "rollout.context_length=60", "rollout.max_new_tokens=40")
    assert sample.episode.info.stop_reason == "max_tokens" and not expanded
    assert_equals(sample, *message("user", "Look ", ROW, "!"), TURN, "a", [EOS_ID])


def test_parts_without_images_are_joined_to_text(folder):
    [sample] = play(folder, "pieces", says("a", "b", "c"))
    first = [*message("user", "Look ", ROW, "!"), TURN, "a", [EOS_ID], "\n"]
    second = [*message("user", "one two"), TURN, "b", [EOS_ID], "\n"]
    assert_equals(sample, *first, *second, *message("user", "one two"), TURN, "c", [EOS_ID])


@pytest.mark.parametrize("name", ["Screens", "Viewer"])
def test_engine_error_about_an_image_fails_the_run(folder, name):
    async def sample(*_, **__):
        raise UserError("image 1: this node produces grid 1. Fix: install the same Pillow version")

    with pytest.raises(UserError, match="this node produces grid"):
        play(folder, "row", sample, name=name)


@pytest.mark.parametrize("key", ["model.vision=false", "data.chat_template=false"])
def test_text_policy_refuses_images(folder, key):
    row = Prompt("p", "", ids("go")[0], "42", ({"role": "user", "content": "go"},), {"kind": "row"})
    [sample] = play(folder, "row", says("a"), key, row=row)
    assert "the model does not receive images. Fix: set model.vision=true" in sample.episode.failure


def test_placeholder_in_a_tool_description_is_text():
    function = {"name": "look", "description": f"Shows {LITERAL}.", "parameters": {"type": "object", "properties": {}}}
    for tool_format in ("hermes", "tagged"):
        tokens = ChatTokens(TOKENIZER, [{"type": "function", "function": function}], tool_format)
        messages = [{"role": "user", "content": "go"}]
        token_ids = tokens.begin(messages)
        assert IMAGE_ID not in token_ids and LITERAL in TOKENIZER.decode(token_ids)
        assert LITERAL in tokens.shown(messages)[0]["content"]


def test_template_that_drops_images_fails_the_rollout(folder):
    tokenizer = tiny_vision.tokenizer()
    old = "{% if part.type == 'image' or 'image' in part %}"
    assert old in tokenizer.chat_template
    tokenizer.chat_template = tokenizer.chat_template.replace(
        old, "{% if m.role == 'tool' %}{% elif part.type == 'image' %}"
    )
    [sample] = play(folder, "row", says(call("look")), *TOOLS, name="Camera", tokenizer=tokenizer)
    assert "the chat template renders 0 placeholders for 1 images. Fix: send images in user" in sample.episode.failure


# The tools are described byte by byte.
TOOLS = ("environment.tool_format=hermes", "rollout.context_length=4000", "rollout.max_new_tokens=2000")


def test_tools_return_images(folder):
    script = [call("look"), call("compare"), call("rows"), call("caption"), "done"]
    [sample] = play(folder, "row", says(*script), *TOOLS, name="Camera")
    assert sample.episode.info.tool_calls == {"ok": 3, "raised": 1} and sample.episode.failure is None
    looked = encoded(picture(64, 64, 1))
    found = [image.digest for image in sample.images]
    digests = [hashlib.sha256(file).hexdigest() for file in (ROW, FIRST, SECOND)]
    assert [found[0], *found[2:]] == digests
    [tool, *others] = [m["content"] for m in sample.episode.messages if m["role"] == "tool"]
    assert tool == [{"type": "image", "image": found[1]}] and others[1] == '[{"type": "image", "name": "a.png"}]'
    assert "the result contains Image. Fix: return one Pillow image, or a list of parts" in others[2]
    stored = Image.open(io.BytesIO(sample.images[1].file))
    assert np.array_equal(stored, Image.open(io.BytesIO(looked)))


def test_agent_sends_images_through_the_endpoint(folder):
    """A request that repeats the image continues the sample."""
    policy = says("a", "b")
    [sample] = play(folder, "row", policy, name="Viewer")
    start = [*message("user", "Look ", ROW, "!"), TURN, "a", [EOS_ID], "\n"]
    assert_equals(sample, *start, *message("user", ROW, "the same?"), TURN, "b", [EOS_ID])
    assert sample.episode.outcome == 1.0


def test_tool_results_with_images_become_user_messages():
    """The chat template does not support tool messages."""
    tokenizer = tiny_vision.tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{% for m in messages %}", "{% for m in messages if m.role != 'tool' %}"
    )
    parts = [{"type": "text", "text": "left "}, {"type": "image", "image": "digest"}]
    results = [{"role": "tool", "name": "f", "content": content} for content in (parts, "b")]
    tokens = ChatTokens(tokenizer)
    expected = message(
        "user", "<tool_response>\nleft ", b"", "\n</tool_response>\n<tool_response>\nb\n</tool_response>"
    )
    image = [IDS["<|vision_start|>"], IMAGE_ID, IDS["<|vision_end|>"]]
    flat = [token for part in expected for token in (image if part == b"" else ids(part)[0])]
    assert tokens.extend([EOS_ID], results) == [*ids("\n")[0], *flat, *TURN]
