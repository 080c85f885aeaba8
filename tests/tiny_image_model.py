"""A tiny random image model with all parts of Z-Image's pipeline, written as a diffusers folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
from transformers import Qwen3Config, Qwen3Model

from tests.tiny_denoiser import CONFIG
from tests.tiny_model import randomize, tiny_tokenizer

SHIFT = 3.0
PIXELS_PER_LATENT = 2


def write_tiny_image_model(folder: Path, **transformer: Any) -> Path:
    """Write a pipeline with random float32 weights, and return its folder. `transformer` has keys of the transformer's
    config.json that differ from CONFIG."""
    config = CONFIG | transformer
    encoder = Qwen3Model(
        Qwen3Config(
            vocab_size=128,
            hidden_size=config["cap_feat_dim"],
            intermediate_size=32,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            max_position_embeddings=512,
        )
    )
    vae = AutoencoderKL(
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        layers_per_block=1,
        latent_channels=config["in_channels"],
        norm_num_groups=4,
        scaling_factor=0.4,
        shift_factor=0.1,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    model = ZImageTransformer2DModel.from_config(config)
    for seed, part in enumerate((model, encoder, vae)):
        randomize(part, seed)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=SHIFT)
    ZImagePipeline(scheduler, vae, encoder, tiny_tokenizer(), model).save_pretrained(folder)
    return folder


def load_pipeline(folder: Path) -> ZImagePipeline:
    """Return diffusers' own pipeline for the folder."""
    pipeline = ZImagePipeline.from_pretrained(folder, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
