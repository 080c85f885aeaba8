"""A tiny random Z-Image transformer, written as a diffusers folder, and documents to run it on."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers.models.transformers.transformer_z_image import ZImageTransformer2DModel
from peft import LoraConfig, get_peft_model

from megarl.megatron.model.denoiser.inputs import Document
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
    t_scale=10.0,  # 1000 would amplify the rounding errors of the noise level's angles, which are float32 in diffusers
)

TARGETS = r"(layers|noise_refiner|context_refiner)\.\d+\.(attention\.to_(q|k|v|out\.0)|feed_forward\.w[123])"
"""The modules that PEFT adapts."""

SIZES = (
    # The first image and both captions need padding, and the documents have different sizes.
    *((8, 12, 5), (16, 16, 40)),
    # Equal sizes form one batch. 64 image tokens and 32 caption tokens need no padding.
    *((16, 16, 32), (16, 16, 32)),
    *((12, 6, 1), (8, 12, 33), (4, 4, 64), (8, 12, 7)),
)
"""Latent height, latent width and number of caption tokens of each document."""


def write_tiny_denoiser(folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Write random weights and the config into `folder`, and return it."""
    model = ZImageTransformer2DModel.from_config(CONFIG)
    randomize(model, seed=0)
    model.to(dtype).save_pretrained(folder)
    return folder


def write_denoiser_adapters(folder: Path, model: Path, rank: int, alpha: int) -> Path:
    """Write random adapters for the transformer in `model` with PEFT. B is random instead of zero, so that the adapters
    change the model."""
    torch.manual_seed(2)
    base = ZImageTransformer2DModel.from_pretrained(model)
    adapted = get_peft_model(base, LoraConfig(r=rank, lora_alpha=alpha, target_modules=TARGETS))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    adapted.save_pretrained(folder)
    return folder


def random_documents() -> list[Document]:
    generator = torch.Generator().manual_seed(1)
    return [
        Document(
            torch.randn(CONFIG["in_channels"], height, width, generator=generator),
            float(torch.rand((), generator=generator)),
            torch.randn(caption, CONFIG["cap_feat_dim"], generator=generator),
        )
        for height, width, caption in SIZES
    ]
