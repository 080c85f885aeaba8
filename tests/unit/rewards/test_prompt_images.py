"""Reward functions that receive the images in prompts."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from megarl.config.load import load
from megarl.core.completion import VersionRun
from megarl.core.prompt import Prompt
from megarl.core.prompt_images import PromptImage
from megarl.core.sample import Sample
from megarl.data.image_files import ImageFiles
from megarl.data.images import decode
from megarl.environments.batch import judge_batch, judge_single
from megarl.environments.trial import try_rewards
from megarl.rewards import judge, worker
from megarl.rewards.pool import FunctionPool
from tests.paths import QUICKSTART
from tests.timing import WAIT_S
from tests.unit.data.image_data import encoded, picture, png

FUNCTIONS = """
import numpy as np

def value(image):
    assert image.mode == "RGB"
    return float(np.asarray(image, np.float64)[0, 0, 0]) + image.width / 1000

def single(prompt, response, answer, prompt_images, *, row):
    assert isinstance(prompt_images, tuple) and "prompt_image_files" not in row
    return sum((i + 1) * value(image) for i, image in enumerate(prompt_images))

def batch(prompts, responses, answers, prompt_images, prompt_image_files):
    assert len(prompt_images) == len(prompts) and len(prompt_images[1:]) == len(prompts) - 1
    assert all(isinstance(images, tuple) for images in prompt_images)
    kept = list(prompt_images)
    images_of = dict(zip(prompt_image_files, kept))
    assert all(kept[i] is images_of[files] for i, files in enumerate(prompt_image_files))
    return [sum(map(value, images)) for images in prompt_images]

def changes(prompt, response, answer, prompt_images):
    total = sum(map(value, prompt_images))
    for image in prompt_images:
        image.paste((0, 0, 0), (0, 0, *image.size))
    return total

def files(prompt, response, answer, prompt_image_files):
    return len(b"".join(prompt_image_files))

def blind(prompt, response, answer, *, row):
    return len(row)

def judge(prompt, first, second, answer, prompt_images):
    return len(prompt_images) / 4
"""

FILES = [
    png(5, 4, seed=1),
    encoded(picture(7, 3, seed=2, mode="RGBA")),
    encoded(picture(6, 6, seed=3), "JPEG"),
]
VALUES = [
    float(np.asarray(image.convert("RGB"), np.float64)[0, 0, 0]) + image.width / 1000
    for image in (
        picture(5, 4, seed=1),
        Image.alpha_composite(Image.new("RGBA", (7, 3), "white"), picture(7, 3, seed=2, mode="RGBA")),
        Image.open(io.BytesIO(FILES[2])),
    )
]


def sample(name: str, *files: bytes) -> Sample:
    images = tuple(PromptImage(i, 1, (1, 2, 2), str(i), file) for i, file in enumerate(files))
    prompt = Prompt(name.partition(".")[0], "?", [5] * max(1, len(files)), images=images)
    return Sample(name, prompt, [7], [-1.0], [True], (VersionRun(0, 1),), "stop", name)


SAMPLES = [sample("a.0", *FILES[:2]), sample("a.1", *FILES[:2]), sample("b.0", FILES[2]), sample("c.0")]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("functions") / "functions.py"
    file.write_text(FUNCTIONS)
    return file


@pytest.fixture(scope="module")
def pool(file: Path) -> Iterator[FunctionPool]:
    names = [f"{file}:{name}" for name in ("single", "batch", "files", "blind", "changes")]
    pool = FunctionPool(names, f"{file}:judge", 1, WAIT_S)
    yield pool
    pool.close()


def test_single_functions_receive_images_in_order(pool: FunctionPool, file: Path) -> None:
    names = [f"{file}:{name}" for name in ("single", "files", "blind")]
    results = [asyncio.run(judge_single(pool, names, item)) for item in SAMPLES]
    both = VALUES[0] + 2 * VALUES[1]
    assert [result[names[0]].value for result in results] == pytest.approx([both, both, VALUES[2], 0.0])
    sizes = [len(b"".join(item.prompt.files)) for item in SAMPLES]
    assert [result[names[1]].value for result in results] == sizes
    assert [result[names[2]].value for result in results] == [0] * 4


def test_batch_functions_receive_shared_images(pool: FunctionPool, file: Path) -> None:
    results = asyncio.run(judge_batch(pool, SAMPLES))
    both = VALUES[0] + VALUES[1]
    assert [result[f"{file}:batch"].value for result in results] == pytest.approx([both, both, VALUES[2], 0.0])


def test_functions_cannot_change_images_for_other_calls(pool: FunctionPool, file: Path) -> None:
    results = [asyncio.run(judge_single(pool, [f"{file}:changes"], item)) for item in SAMPLES[:2]]
    values = [result[f"{file}:changes"].value for result in results]
    assert values == pytest.approx([VALUES[0] + VALUES[1]] * 2)


def test_batch_images_are_decoded_on_access(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a function reads one sample at a time, only one prompt's images are in memory."""
    decoded: list[bytes] = []
    monkeypatch.setattr(worker, "decode", lambda file: decoded.append(file) or decode(file))
    rows = [{"prompt_image_files": item.prompt.files} for item in SAMPLES]
    images = worker._batch_keywords({"prompt_images": True}, rows)["prompt_images"]
    assert not decoded
    refs = [weakref.ref(image) for image in images[0]]
    assert images[1][0] is refs[0]() and decoded == FILES[:2]
    assert [image.size for image in images[2]] == [(6, 6)] and decoded == FILES
    gc.collect()
    assert [ref() for ref in refs] == [None, None]


def test_images_that_exceed_the_memory_have_a_remedy(file: Path) -> None:
    name = f"{file}:single"
    large = encoded(Image.new("RGB", (9000, 9000)))
    pool = FunctionPool([name], None, 1, WAIT_S, memory_mib=128)
    try:
        result = asyncio.run(judge_single(pool, [name], sample("e.0", large)))[name]
    finally:
        pool.close()
    assert result.value is None
    assert result.failure.endswith("Fix: raise rewards.memory_mib, or use prompt_image_files instead of prompt_images")


def test_pairwise_judges_receive_images(pool: FunctionPool) -> None:
    comparisons = judge.comparisons(SAMPLES[:2], "both", 0)
    calls = [pool.call(judge.NAME, *item.arguments, columns=item.columns) for item in comparisons]
    assert [call.result().value for call in calls] == [0.5, 0.5]


def test_images_are_sent_only_to_functions_that_name_them(pool: FunctionPool, file: Path) -> None:
    assert pool.image_functions == [f"{file}:single", f"{file}:batch", f"{file}:files", f"{file}:changes", judge.NAME]
    assert pool.columns == {"prompt_images": None, "prompt_image_files": None, "row": f"{file}:blind"}
    row = {"prompt_image_files": (b"file",), "level": 1}
    assert pool._sent(f"{file}:blind", row) == {"level": 1} and pool._sent(f"{file}:single", row) == row


def test_undecodable_image_fails_only_its_call(pool: FunctionPool, file: Path) -> None:
    name = f"{file}:single"
    damaged, intact = (asyncio.run(judge_single(pool, [name], sample("d.0", data)))[name] for data in (b"no", FILES[0]))
    assert damaged.value is None and "raised ImageError: it is not an image in a supported format" in damaged.failure
    assert intact.value == pytest.approx(VALUES[0])


def test_trial_uses_the_images_of_the_row(pool: FunctionPool, file: Path, tmp_path: Path) -> None:
    images = ImageFiles()
    digests = [images.add(data, tmp_path).digest for data in FILES[:2]]
    placed = tuple(PromptImage(i, 1, (1, 2, 2), digest) for i, digest in enumerate(digests))
    functions = [{"function": f"{file}:{name}"} for name in ("single", "files")]
    config = load(QUICKSTART, [f"rewards.functions={json.dumps(functions)}"])
    own = FunctionPool(config.rewards.functions, None, 1, WAIT_S)
    try:
        rewards = try_rewards(config, own, [Prompt("p", "?", [5, 5], "4", images=placed)], images)
    finally:
        own.close()
    assert list(rewards.values()) == pytest.approx([VALUES[0] + 2 * VALUES[1], len(FILES[0]) + len(FILES[1])])
