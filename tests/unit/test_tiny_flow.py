"""The tiny flow model that recipes and tests train, read by diffusers' pipeline and by the engine."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from megarl.core.prompt import Prompt
from megarl.rewards.digits import rendered_digits
from megarl.rollout.diffusers.engine import DiffusersEngine
from megarl.rollout.diffusers.request import Denoising, ImageRequest
from tests.tiny_flow import tiny_flow_model
from tests.tiny_image_model import load_pipeline
from tools import tiny_flow


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a model that was pre-trained for two steps."""
    monkeypatch.setattr(tiny_flow, "STEPS", 2)
    tiny_flow.write(tmp_path / "first")
    return tmp_path / "first"


def images(folder: Path, captions: list[tuple[str, str]]) -> list[np.ndarray]:
    """Return the engine's image for each (caption, answer)."""
    engine = DiffusersEngine(folder, "float32", max_batch=len(captions), loads_weights=True)
    engine.hold(0)
    denoising = Denoising(height=16, width=24, num_steps=8, shift=engine.shift)
    requests = [
        ImageRequest(
            sample_id=f"0.{number}.0",
            prompt=Prompt(str(number), caption, (), answer),
            seed=0,
            denoising=denoising,
            returns_image=True,
        )
        for number, (caption, answer) in enumerate(captions)
    ]
    return [sample.response for sample in asyncio.run(engine.generate(requests))]


def test_vae_is_nearly_the_identity_on_gray_images():
    vae = tiny_flow.vae()
    pixels = tiny_flow.draw(np.array([7, 48]))
    noisy = pixels + 0.5 * torch.randn(pixels.shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        latents = vae.encode(noisy.expand(-1, 3, -1, -1)).latent_dist.mode()
        decoded = vae.decode(noisy).sample
    assert latents.shape == (2, 1, 16, 24) and (latents - noisy).abs().max() < 1e-2
    assert (decoded - noisy).abs().max() < 1e-2


def test_folder_depends_only_on_the_seed(folder, tmp_path):
    tiny_flow.write(tmp_path / "second")
    names = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    assert {name.parts[0] for name in names} >= {"transformer", "text_encoder", "vae", "tokenizer", "captions.jsonl"}
    assert all((folder / name).read_bytes() == (tmp_path / "second" / name).read_bytes() for name in names)


@pytest.mark.exhaustive
def test_captions_are_the_numbers_and_have_different_embeddings(folder):
    rows = [json.loads(line) for line in (folder / "captions.jsonl").read_text().splitlines()]
    assert rows == [{"prompt": f"the number {number:02}", "answer": f"{number:02}"} for number in range(100)]
    embeddings, _ = load_pipeline(folder).encode_prompt([row["prompt"] for row in rows])
    stacked = torch.stack(embeddings)
    stacked = stacked / stacked.norm(dim=-1, keepdim=True)
    cosines = torch.einsum("ild,jld->ijl", stacked, stacked).amin(-1)  # cosine of the token that differs most
    assert cosines.fill_diagonal_(0).max() < 0.9


@pytest.mark.slow
@pytest.mark.exhaustive
def test_trained_model_draws_digits_that_can_improve():
    folder = tiny_flow_model()
    rows = [json.loads(line) for line in (folder / "captions.jsonl").read_text().splitlines()]
    drawn = images(folder, [(row["prompt"], row["answer"]) for row in rows])
    own = [rendered_digits(row["prompt"], image, row["answer"]) for row, image in zip(rows, drawn, strict=True)]
    other = [rendered_digits("", image, row["answer"][::-1]) for row, image in zip(rows, drawn, strict=True)]
    assert 0.3 < np.mean(own) < 0.65 and np.mean(other) < 0.3
