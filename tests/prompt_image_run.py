"""A run folder of a vision-language model: prompts with pictures of digits between their texts."""

from __future__ import annotations

import hashlib
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import numpy as np
from PIL import Image

from megarl.cluster.groups.evaluation import write_samples
from megarl.core.completion import VersionRun
from megarl.core.episode import Episode, RolloutInfo
from megarl.core.prompt import Prompt
from megarl.core.prompt_images import PromptImage
from megarl.core.sample import Sample
from megarl.core.score import Score
from megarl.rewards import prompt_thumbnails
from megarl.rewards.rollout_file import append_rollouts

PLACEHOLDER = 0x10FFFF
"""Token id of the placeholder. All other ids are code points."""

PLACEHOLDER_TEXT = "<|image_pad|>"

INFO = RolloutInfo("done", 1, 1, {}, 0, 0)


def decode(ids: Sequence[int]) -> str:
    return "".join(PLACEHOLDER_TEXT if token == PLACEHOLDER else chr(token) for token in ids)


def encoded(color: tuple[int, int, int], width: int = 60, height: int = 40, kind: str = "PNG", **options) -> bytes:
    """Return an image of one color with a black corner."""
    pixels = np.full((height, width, 3), color, np.uint8)
    pixels[: height // 4, : width // 4] = 0
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **options)
    return file.getvalue()


def prompt(name: str, *parts: str | bytes, num_tokens: int = 30) -> Prompt:
    """Return a prompt with these texts and encoded images. Each image has one token more than the previous one."""
    ids: list[int] = []
    images: list[PromptImage] = []
    for part in parts:
        if isinstance(part, str):
            ids += map(ord, part)
            continue
        count = num_tokens + len(images)
        images.append(PromptImage(len(ids), count, (1, 2, 2 * count), hashlib.sha256(part).hexdigest(), part))
        ids += [PLACEHOLDER] * count
    content = [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in parts]
    text = "".join(part if isinstance(part, str) else PLACEHOLDER_TEXT for part in parts)
    return Prompt(name, text, ids, "7", ({"role": "user", "content": content},), {}, tuple(images))


def sample(name: str, of: Prompt, messages: Sequence[dict] | None = None) -> Sample:
    episode = None if messages is None else Episode(INFO, (), {}, None, tuple(messages), 0, True)
    return Sample(name, of, [55, 10], [-0.5, -1.0], [True] * 2, (VersionRun(0, 2),), "stop", "7", episode=episode)


@patch.object(prompt_thumbnails, "MAX_SECONDS", math.inf)  # a busy machine would omit thumbnails
def write_step(folder: Path, step: int, prompts: Sequence[Prompt], samples_per_prompt: int = 2) -> Path:
    """Write a step's metrics and rollouts, and an evaluation of the first prompt."""
    (folder / "rollouts").mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").write_text(json.dumps({"name": folder.name, "model": "tiny-vl"}))
    file = folder / "rollouts" / f"step_{step:06d}.jsonl"
    scored = [
        (sample(f"{step}.{group}.{k}", item), Score(group + k / 10, {}))
        for group, item in enumerate(prompts)
        for k in range(samples_per_prompt)
    ]
    append_rollouts(file, step, scored, decode=decode)
    with (folder / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps({"step": step, "reward/mean": 0.5, "time/step": 2.0}) + "\n")
    evaluated = folder / "evaluations" / "digits" / f"step_{step:06d}.jsonl"
    write_samples(evaluated, step, [sample("digits.0.0", prompts[0])], [Score(1.0, {})], _append)
    return file


def _append(file: Path, step: int, scored: Sequence[tuple[Sample, Score]]) -> None:
    append_rollouts(file, step, scored, decode=decode)
