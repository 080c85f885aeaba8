"""Rewards for images, against PIL and transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import save_file
from transformers import AutoTokenizer, CLIPConfig, CLIPModel
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from megarl.core.errors import UserError
from megarl.rewards.image import AestheticScore, ClipScore, jpeg_compressibility, jpeg_incompressibility
from megarl.rewards.options import configure
from megarl.rewards.registry import takes_batches
from tests.tiny_model import tiny_tokenizer

PROMPTS = ["a red square", "12", "a red square " * 40]
SIZE, DIM = 16, 8


@pytest.fixture(scope="module")
def images() -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.integers(0, 256, shape, np.uint8) for shape in ((16, 16, 3), (40, 20, 3), (9, 33, 3))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small random CLIP model."""
    folder = tmp_path_factory.mktemp("clip")
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder)
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    CLIPModel(
        CLIPConfig(
            text_config=small
            | {
                "vocab_size": len(tokenizer),
                "max_position_embeddings": 24,
                "eos_token_id": tokenizer.eos_token_id,
                "projection_dim": DIM,
            },
            vision_config=small | {"image_size": SIZE, "patch_size": 8, "projection_dim": DIM},
            projection_dim=DIM,
        )
    ).save_pretrained(folder)
    CLIPImageProcessorPil(size={"shortest_edge": SIZE}, crop_size={"height": SIZE, "width": SIZE}).save_pretrained(
        folder
    )
    return folder


def embeddings(folder: Path, image: np.ndarray, prompt: str) -> tuple[np.ndarray, float]:
    """Return the embedding of one image, and its cosine with the prompt, by transformers' forward pass."""
    model = CLIPModel.from_pretrained(folder)
    tokens = AutoTokenizer.from_pretrained(folder)(prompt, truncation=True, max_length=24, return_tensors="pt")
    pixels = CLIPImageProcessorPil.from_pretrained(folder)(Image.fromarray(image), return_tensors="pt")
    with torch.no_grad():
        outputs = model(**tokens, **pixels)
    return outputs.image_embeds[0].numpy(), (outputs.logits_per_image / model.logit_scale.exp()).item()


def test_jpeg_sizes_are_those_of_a_file(images, tmp_path):
    Image.fromarray(images[1]).save(tmp_path / "image.jpg", quality=95)
    expected = (tmp_path / "image.jpg").stat().st_size / 1000
    assert jpeg_incompressibility("", images[1], None) == expected == -jpeg_compressibility("", images[1], None)


def test_flat_image_is_smaller_than_noise(images):
    flat = np.full_like(images[1], 128)
    assert jpeg_compressibility("", flat, None) > jpeg_compressibility("", images[1], None)
    assert jpeg_compressibility("", images[1], None, quality=20) > jpeg_compressibility("", images[1], None)


def test_clip_score_equals_transformers(folder, images):
    scores = ClipScore(str(folder))(PROMPTS, images, [None] * 3)
    cosines = [embeddings(folder, image, prompt)[1] for image, prompt in zip(images, PROMPTS, strict=True)]
    assert scores == pytest.approx([2.5 * max(0.0, cosine) for cosine in cosines], abs=1e-5)
    assert len({round(score, 4) for score in scores}) > 1


def test_negative_similarity_scores_zero(folder, images):
    score = ClipScore(str(folder))
    pairs = [(prompt, image) for prompt in ["a", "b", "12", "square"] for image in images]
    cosines = [embeddings(folder, image, prompt)[1] for prompt, image in pairs]
    assert min(cosines) < 0 < max(cosines), "the test needs both signs"
    scores = score([prompt for prompt, _ in pairs], [image for _, image in pairs], [None] * len(pairs))
    assert scores == pytest.approx([2.5 * max(0.0, cosine) for cosine in cosines], abs=1e-5)


def test_aesthetic_score_applies_the_layers_to_the_embedding(folder, images, tmp_path):
    random = np.random.default_rng(1)
    first, second = random.normal(size=(5, DIM)).astype(np.float32), random.normal(size=(1, 5)).astype(np.float32)
    biases = random.normal(size=5).astype(np.float32), random.normal(size=1).astype(np.float32)
    tensors = {
        "layers.2.weight": first,
        "layers.2.bias": biases[0],
        "layers.10.weight": second,
        "layers.10.bias": biases[1],
    }
    save_file(tensors, tmp_path / "head.safetensors")
    scores = AestheticScore(str(folder), str(tmp_path / "head.safetensors"))(PROMPTS, images, [None] * 3)
    expected = [second @ (first @ embeddings(folder, image, "a")[0] + biases[0]) + biases[1] for image in images]
    assert scores == pytest.approx([value.item() for value in expected], abs=1e-5)


def test_head_of_another_clip_model_is_refused(folder, tmp_path):
    head = {"layers.0.weight": np.zeros((1, DIM + 1), np.float32), "layers.0.bias": np.zeros(1, np.float32)}
    save_file(head, tmp_path / "head.safetensors")
    with pytest.raises(ValueError, match=rf"options.head=.*must map CLIP embeddings of size {DIM} to size 1"):
        AestheticScore(str(folder), str(tmp_path / "head.safetensors"))


def test_missing_model_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"options.path=.*has no config.json"):
        configure("clip_score", ClipScore, {"path": str(tmp_path)})


@pytest.mark.parametrize("response", ["text", np.zeros((2, 2), np.uint8), np.zeros((2, 2, 3), np.float32)])
def test_other_responses_are_failures(response):
    with pytest.raises(ValueError, match="expected an RGB image, uint8"):
        jpeg_compressibility("", response, None)


def test_models_score_whole_batches(folder):
    assert takes_batches(configure("clip_score", ClipScore, {"path": str(folder)}))
