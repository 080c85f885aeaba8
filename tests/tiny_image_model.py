"""Tiny random image models with all parts of their pipelines, written as diffusers folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    AutoencoderKL,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    StableDiffusion3Pipeline,
    ZImagePipeline,
)
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, Qwen3Config, Qwen3Model, T5Config, T5EncoderModel

from tests.tiny_denoiser import MODELS, STABLE_DIFFUSION_3
from tests.tiny_model import randomize, tiny_tokenizer

SHIFT = 3.0
PIXELS_PER_LATENT = 2
CLIP_TOKENS = 20


def write_tiny_image_model(folder: Path, name: str = "Z-Image", has_t5: bool = True, **transformer: Any) -> Path:
    """Write a pipeline with random float32 weights, and return its folder.

    Args:
        name: key of tiny_denoiser.MODELS.
        has_t5: whether SD3.5 has its third text encoder.
        transformer: keys of the transformer's config.json that differ from the tiny model's.
    """
    tiny = MODELS[name]
    vae = AutoencoderKL(
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        layers_per_block=1,
        latent_channels=tiny.shape.channels,
        norm_num_groups=4,
        scaling_factor=0.4,
        shift_factor=0.1,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    randomize(vae, 2)
    model, scheduler = tiny.random(**transformer), FlowMatchEulerDiscreteScheduler(shift=SHIFT)
    if name == "Z-Image":
        encoder = _qwen((tiny.config | transformer)["cap_feat_dim"])
        ZImagePipeline(scheduler, vae, encoder, tiny_tokenizer(), model).save_pretrained(folder)
        return folder
    tokenizers = [tiny_tokenizer() for _ in range(2)]
    for tokenizer in tokenizers:
        tokenizer.model_max_length = CLIP_TOKENS
    clip = [encoder for channels, seed in ((8, 3), (10, 4)) for encoder in (_clip(channels, seed), tokenizers.pop())]
    t5 = (_t5(), tiny_tokenizer()) if has_t5 else (None, None)
    StableDiffusion3Pipeline(model, scheduler, vae, *clip, *t5).save_pretrained(folder)
    return folder


def load_pipeline(folder: Path) -> Any:
    """Return diffusers' own pipeline for the folder, in the default dtype."""
    parts = json.loads((folder / "model_index.json").read_text())
    absent = {name: None for name, entry in parts.items() if entry == [None, None]}
    pipeline = DiffusionPipeline.from_pretrained(folder, dtype=torch.get_default_dtype(), **absent)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def draw(pipeline: Any, **options: Any) -> Any:
    """Return the images of a pipeline of diffusers. It asserts that Z-Image's latents are float32, even in float64."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float32", torch.get_default_dtype())
        return pipeline(**options).images


def _qwen(channels: int) -> Qwen3Model:
    encoder = Qwen3Model(
        Qwen3Config(
            vocab_size=128,
            hidden_size=channels,
            intermediate_size=32,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            max_position_embeddings=512,
        )
    )
    randomize(encoder, 1)
    return encoder


def _clip(channels: int, seed: int) -> CLIPTextModelWithProjection:
    encoder = CLIPTextModelWithProjection(
        CLIPTextConfig(
            vocab_size=128,
            hidden_size=channels,
            intermediate_size=16,
            projection_dim=STABLE_DIFFUSION_3["pooled_projection_dim"] // 2,
            num_hidden_layers=3,
            num_attention_heads=2,
            max_position_embeddings=CLIP_TOKENS,
            pad_token_id=0,
            bos_token_id=2,
            eos_token_id=1,
        )
    )
    randomize(encoder, seed)
    return encoder


def _t5() -> T5EncoderModel:
    encoder = T5EncoderModel(
        T5Config(
            vocab_size=128,
            d_model=STABLE_DIFFUSION_3["joint_attention_dim"],
            d_kv=8,
            d_ff=16,
            num_layers=2,
            num_heads=2,
            feed_forward_proj="gated-gelu",
        )
    )
    randomize(encoder, 5)
    return encoder
