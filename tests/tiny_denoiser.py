"""Tiny random transformers of image models, written as diffusers folders, and documents to run them on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import diffusers
import torch
from peft import LoraConfig, get_peft_model

from megarl.core.latents import Conditioning
from megarl.megatron.model.denoiser.inputs import Document
from megarl.models.denoiser import DenoiserShape
from tests.tiny_model import randomize

CONFIG = dict(
    _class_name="ZImageTransformer2DModel",
    in_channels=4,
    dim=48,
    n_layers=4,
    n_refiner_layers=2,
    n_heads=2,
    n_kv_heads=2,
    cap_feat_dim=20,
    axes_dims=[8, 8, 8],
    axes_lens=[128, 16, 16],
    t_scale=10.0,  # with 1000, rounding errors of diffusers' float32 angles would be amplified
)

STABLE_DIFFUSION_3 = dict(
    _class_name="SD3Transformer2DModel",
    sample_size=16,
    patch_size=2,
    in_channels=4,
    out_channels=4,
    num_layers=4,
    attention_head_dim=16,
    num_attention_heads=2,
    joint_attention_dim=20,
    caption_projection_dim=32,
    pooled_projection_dim=12,
    pos_embed_max_size=12,
    dual_attention_layers=[0, 1],
    qk_norm="rms_norm",
)

TARGETS = r"(layers|noise_refiner|context_refiner)\.\d+\.(attention\.to_(q|k|v|out\.0)|feed_forward\.w[123])"
"""Regular expression for the modules of Z-Image that get adapters from PEFT."""

SIZES = (
    # The first image and both captions need padding, and the documents have different sizes.
    *((8, 12, 5), (16, 16, 40)),
    # Equal sizes form one batch. 64 image tokens and 32 caption tokens need no padding.
    *((16, 16, 32), (16, 16, 32)),
    *((12, 6, 1), (8, 12, 33), (4, 4, 64), (8, 12, 7)),
)
"""Latent height, latent width and number of caption tokens of each document."""


class TinyDenoiser:
    """A tiny model."""

    largest_sigma: float = 1.0
    """Largest noise level of the documents."""

    def __init__(self, config: Mapping[str, Any]):
        """config: the keys of diffusers' config.json."""
        self.config, self.shape = config, DenoiserShape.of(config)
        self.documents = self._documents()
        """Random documents, float32."""

    @property
    def model_class(self) -> Any:
        return getattr(diffusers, self.config["_class_name"])

    def write(self, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
        """Write random weights and the config into `folder`, and return it."""
        self.random().to(dtype).save_pretrained(folder)
        return folder

    def random(self, **changes: Any) -> torch.nn.Module:
        """Return diffusers' model with random weights. `changes` overrides keys of the config."""
        model = self.model_class.from_config({**self.config, **changes})
        randomize(model, seed=0)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name and ".linear." in name:
                    parameter.sub_(1.0)  # a modulation despite its name
        return model

    def load(self, folder: Path) -> torch.nn.Module:
        """Return diffusers' model in the default dtype."""
        return self.model_class.from_pretrained(folder, torch_dtype=torch.get_default_dtype())

    def _documents(self) -> list[Document]:
        shape, generator = self.shape, torch.Generator().manual_seed(1)

        def pooled() -> torch.Tensor | None:
            return None if shape.pooled is None else torch.randn(shape.pooled, generator=generator)

        return [
            Document(
                torch.randn(shape.channels, height, width, generator=generator),
                float(torch.rand((), generator=generator)) * self.largest_sigma,
                Conditioning(torch.randn(caption, shape.caption, generator=generator), pooled()),
            )
            for height, width, caption in SIZES
        ]


class TinyZImage(TinyDenoiser):
    def velocities(self, model: Any, documents: Sequence[Document]) -> list[torch.Tensor]:
        """Return the velocities of diffusers' class, which takes 1 − σ and returns −v."""
        outputs = model(
            [d.latents[:, None] for d in documents],
            1 - torch.tensor([d.sigma for d in documents], dtype=torch.float32),
            [d.caption.tokens for d in documents],
        ).sample
        return [-output[:, 0] for output in outputs]


class TinyStableDiffusion3(TinyDenoiser):
    largest_sigma = 0.02  # small for the same reason as t_scale: this model always multiplies noise levels by 1000

    def velocities(self, model: Any, documents: Sequence[Document]) -> list[torch.Tensor]:
        """Return the velocities of diffusers' class, which takes 1000 · σ, of one document after the other."""
        return [
            model(
                d.latents[None], d.caption.tokens[None], d.caption.pooled[None], torch.tensor([1000 * d.sigma])
            ).sample[0]
            for d in documents
        ]


MODELS = {"Z-Image": TinyZImage(CONFIG), "SD3.5": TinyStableDiffusion3(STABLE_DIFFUSION_3)}


def write_tiny_denoiser(folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Write a tiny Z-Image into `folder`, and return it."""
    return MODELS["Z-Image"].write(folder, dtype)


def write_denoiser_adapters(folder: Path, model: Path, rank: int, alpha: int) -> Path:
    """Write random adapters for the Z-Image transformer in `model` with PEFT. B is random instead of zero, so that the
    adapters change the model."""
    torch.manual_seed(2)
    base = MODELS["Z-Image"].load(model)
    adapted = get_peft_model(base, LoraConfig(r=rank, lora_alpha=alpha, target_modules=TARGETS))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    adapted.save_pretrained(folder)
    return folder
