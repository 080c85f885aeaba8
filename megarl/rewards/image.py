"""Rewards for images. The response of an image model is an RGB image, uint8 [height, width, 3].

Models are read from local folders and from safetensors files, and run on the CPU of the reward process.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

CLIPSCORE_WEIGHT = 2.5
"""CLIPScore's factor, which stretches typical similarities to a range from 0 to 1."""


def jpeg_compressibility(prompt: str, response: NDArray[np.uint8], answer: Any, quality: int = 95) -> float:
    """Return −1 times the size of the image as a JPEG file, in kB (DDPO, https://arxiv.org/abs/2305.13301)."""
    return -jpeg_incompressibility(prompt, response, answer, quality)


def jpeg_incompressibility(prompt: str, response: NDArray[np.uint8], answer: Any, quality: int = 95) -> float:
    """Return the size of the image as a JPEG file, in kB (DDPO, https://arxiv.org/abs/2305.13301)."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(checked(response)).save(file, format="JPEG", quality=quality)
    return len(file.getvalue()) / 1000


class _ClipModel:
    """Embeds images and texts with a CLIP model (https://arxiv.org/abs/2103.00020)."""

    def __init__(self, path: str):
        """path: a transformers folder with model, tokenizer and image processor."""
        from transformers import CLIPModel
        from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil  # needs no torchvision

        if not (Path(path) / "config.json").is_file():
            raise ValueError(f"options.path={path!r}: has no config.json. Fix: download a CLIP model to this folder")
        # Override the config's attention implementation, which could name a kernel on the Hub and thus run its code.
        options = {"local_files_only": True, "use_safetensors": True, "attn_implementation": "sdpa"}
        self.model = CLIPModel.from_pretrained(path, **options).eval()
        self._processor = CLIPImageProcessorPil.from_pretrained(path, local_files_only=True)

    def images(self, images: Sequence[NDArray[np.uint8]]) -> NDArray[np.float32]:
        """Return the images' embeddings, float32 [B, dim], each with norm 1."""
        import torch

        with torch.no_grad():
            pixels = self._processor(list(map(checked, images)), return_tensors="pt")["pixel_values"]
            return _normalized(self.model.get_image_features(pixel_values=pixels))


class ClipScore:
    """CLIPScore (https://arxiv.org/abs/2104.08718): 2.5·max(0, cos) for the angle between CLIP's embeddings of image
    and prompt. CLIP reads the first 77 tokens of a prompt."""

    def __init__(self, path: str):
        """path: a transformers folder with model, tokenizer and image processor."""
        from transformers import AutoTokenizer

        self._clip = _ClipModel(path)
        self._tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        self._max_tokens: int = self._clip.model.text_model.config.max_position_embeddings

    def __call__(self, prompts: list[str], responses: list[NDArray[np.uint8]], answers: list[Any]) -> list[float]:
        import torch

        tokens = self._tokenizer(
            prompts, padding=True, truncation=True, max_length=self._max_tokens, return_tensors="pt"
        )
        with torch.no_grad():
            texts = _normalized(self._clip.model.get_text_features(**tokens))
        similarities = (self._clip.images(responses) * texts).sum(-1)
        return (CLIPSCORE_WEIGHT * similarities.clip(min=0)).tolist()


class AestheticScore:
    """An aesthetic predictor as in DDPO (https://arxiv.org/abs/2305.13301): a chain of linear layers that maps CLIP's
    embedding of an image to a score. LAION's predictor was trained on ratings from 1 to 10."""

    def __init__(self, path: str, head: str):
        """
        Args:
            path: a transformers folder with a CLIP model and its image processor.
            head: safetensors file with the tensors layers.N.weight and layers.N.bias, applied in the order of N.
        """
        from safetensors.numpy import load_file

        self._clip = _ClipModel(path)
        tensors = load_file(head)
        numbers = sorted(int(name.split(".")[1]) for name in tensors if name.endswith(".weight"))
        self._layers = [(tensors[f"layers.{n}.weight"], tensors[f"layers.{n}.bias"]) for n in numbers]
        sizes = [weight.shape for weight, _ in self._layers]
        dim = self._clip.model.config.projection_dim
        if [size[1] for size in sizes] != [dim, *(size[0] for size in sizes[:-1])] or sizes[-1][0] != 1:
            raise ValueError(
                f"options.head={head!r}: its layers have shapes {sizes}, but must map CLIP embeddings of size "
                f"{dim} to size 1. Fix: use the CLIP model that the head was trained with"
            )

    def __call__(self, prompts: list[str], responses: list[NDArray[np.uint8]], answers: list[Any]) -> list[float]:
        values = self._clip.images(responses)
        for weight, bias in self._layers:
            values = values @ weight.T + bias
        return values[:, 0].tolist()


def checked(image: Any) -> NDArray[np.uint8]:
    """Return the image. Raise ValueError if it is not an RGB image."""
    if not isinstance(image, np.ndarray) or image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        found = f"{image.dtype} {list(image.shape)}" if isinstance(image, np.ndarray) else type(image).__name__
        raise ValueError(
            f"expected an RGB image, uint8 [height, width, 3], got {found}. Fix: use this reward for image models only"
        )
    return image


def _normalized(output: Any) -> NDArray[np.float32]:
    """Return embeddings [B, dim], each with norm 1."""
    features = getattr(output, "pooler_output", output).numpy()
    return features / np.linalg.norm(features, axis=-1, keepdims=True)
