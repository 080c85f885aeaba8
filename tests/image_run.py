"""A run folder of an image model: pictures of digits whose noise shrinks from step to step."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from megarl.cluster.groups.evaluation import write_samples
from megarl.core.completion import VersionRun
from megarl.core.latents import Conditioning, LatentSample
from megarl.core.prompt import Prompt
from megarl.core.score import Score
from megarl.rewards.rollout_file import append_rollouts, write_advantages

NUM_DIGITS, SAMPLES_PER_PROMPT = 3, 5


def picture(digit: int, seed: int, noise: float, side: int) -> NDArray[np.uint8]:
    """Draw a digit, uint8 [side, side, 3]. Equal seeds give equal noise."""
    image = Image.new("RGB", (side, side), (232, 228, 220))
    font = ImageFont.load_default(side * 0.9)
    ImageDraw.Draw(image).text((side * 0.25, 0), str(digit), (20, 40, 120), font)
    random = np.random.default_rng(seed)
    coarse = random.normal(0, noise, (16, 16, 3)).repeat(side // 16, 0).repeat(side // 16, 1)
    return (np.asarray(image) + coarse).clip(0, 255).astype(np.uint8)


def sample(name: str, digit: int, seed: int, noise: float, side: int, caption: str = "") -> LatentSample:
    return LatentSample(
        name,
        Prompt(f"digits-{digit}", caption or f"a photo of the digit {digit}, blue ink on paper", (), answer=str(digit)),
        sigmas=[1, 0.8, 0.5, 0],
        steps=[0, 1],
        latents=np.zeros((3, 1, 2, 2)),
        logprobs=[-1.25, -0.5],
        versions=(VersionRun(0, 3),),
        embedding=Conditioning(np.zeros((1, 2))),
        empty_embedding=None,
        num_tokens=64,
        image=picture(digit, seed, noise, side),
    )


def write_step(folder: Path, step: int, side: int = 32, caption: str = "", first_noise: float = 120) -> None:
    """Write a step's metrics and rollouts, and the evaluations after even steps."""
    noise, file = first_noise / step, folder / "rollouts" / f"step_{step:06d}.jsonl"
    scored = []
    for digit in range(NUM_DIGITS):
        for k in range(SAMPLES_PER_PROMPT):
            item = sample(f"{step}.{digit}.{k}", digit, 1000 * step + 10 * digit + k, noise, side, caption)
            failed = (digit, k) == (1, 3)
            reward = None if failed else 1 - noise / 150 + (k - 2) / 20
            scored.append((item, Score(reward, {}, failure="rewards.functions: ocr timed out" if failed else None)))
    append_rollouts(file, step, scored)
    write_advantages(file, {item.id: (int(item.id[-1]) - 2) / 2 for item, score in scored if score.value is not None})
    with (folder / "metrics.jsonl").open("a") as metrics:
        row = {"step": step, "reward/mean": 1 - noise / 150, "reward/std": 0.1, "time/step": 2.0}
        metrics.write(json.dumps(row) + "\n")
    if step % 2 == 0:
        evaluate(folder, step, noise, side, caption)


def evaluate(folder: Path, step: int, noise: float, side: int, caption: str = "") -> None:
    items = [
        sample(f"digits.{digit}.{k}", digit, 10 * digit + k, noise, side, caption) for digit in (7, 8) for k in (0, 1)
    ]
    scores = [Score(None if number == 3 and step == 0 else 1 - noise / 150, {}, failure="f") for number in range(4)]
    write_samples(folder / "evaluations" / "digits" / f"step_{step:06d}.jsonl", step, items, scores, append_rollouts)


def write_run(
    folder: Path, num_steps: int = 4, side: int = 32, caption: str = "", first_noise: float = 120, seed: int = 0
) -> Path:
    """Write a run. first_noise: the noise in step 1. The evaluation before step 1 does not depend on it."""
    (folder / "rollouts").mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps({"name": folder.name, "model": "tiny-flow"}))
    (folder / "config.resolved.yaml").write_text(f"run:\n  steps: {num_steps}\n  seed: {seed}\n")
    evaluate(folder, 0, 120, side, caption)
    for step in range(1, num_steps + 1):
        write_step(folder, step, side, caption, first_noise)
    return folder
