"""Builds denoisers from a diffusers config and wraps them for data parallelism."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.config.model_schema import Placed
from megarl.core import device
from megarl.megatron.model import kernels
from megarl.megatron.model.build import parameters_of, transformer_config, wrap
from megarl.megatron.model.denoiser.model import Denoiser
from megarl.megatron.model.denoiser.stable_diffusion_3 import StableDiffusion3
from megarl.megatron.model.denoiser.z_image import ZImage
from megarl.megatron.model.layer_spec import replace_activations
from megarl.models.denoiser import DenoiserShape, StableDiffusion3Shape, ZImageShape
from megarl.ops.swiglu import swiglu


def build_denoiser(
    settings: Placed,
    config: Mapping[str, Any],
    dtype: torch.dtype,
    frozen: Collection[str] = (),
    attach: Callable[[Sequence[Denoiser]], object] = lambda chunks: None,
) -> list[DistributedDataParallel]:
    """Build this rank's shard of the model, one chunk per virtual pipeline stage. Weights are loaded later.

    Args:
        config: diffusers' config.json.
        frozen, attach: as in build_model.
    """
    transformer = denoiser_config(settings, config, dtype)
    chunks = build_chunks(transformer, config, settings.layout.vpp)
    for chunk in chunks:
        chunk.to(device.device())
    for name, parameter in parameters_of(chunks).items():
        if name in frozen:
            parameter.requires_grad_(False)
    attach(chunks)
    if settings.recompute != "none" and chunks[0].pre_process:
        # As in build_model, but for the stacks whose inputs are images or captions.
        for embedder in (chunks[0].image_embedder, chunks[0].caption_embedder):
            embedder.register_forward_hook(lambda _, __, hidden: hidden.requires_grad_(torch.is_grad_enabled()))
    return wrap(chunks, transformer, settings)


def build_chunks(transformer: TransformerConfig, config: Mapping[str, Any], vpp: int) -> list[Denoiser]:
    """Build this rank's layers, one model chunk per virtual stage."""
    kernels.fuse_weight_gradients()
    shape, stages = DenoiserShape.of(config), [stage if vpp > 1 else None for stage in range(vpp)]
    if isinstance(shape, StableDiffusion3Shape):
        chunks: list[Denoiser] = [StableDiffusion3(transformer, shape, stage) for stage in stages]
        # Megatron's fused kernel requires its own activation in the config.
        activation = None if transformer.bias_activation_fusion else partial(F.gelu, approximate="tanh")
    else:
        assert isinstance(shape, ZImageShape), f"{type(shape).__name__} has no model"
        chunks = [ZImage(transformer, shape, stage) for stage in stages]
        activation = swiglu if transformer.use_te_activation_func else None
    if activation is not None:
        for chunk in chunks:
            replace_activations(chunk, activation)
    return chunks


def denoiser_config(settings: Placed, config: Mapping[str, Any], dtype: torch.dtype) -> TransformerConfig:
    """Build the TransformerConfig, as `transformer_config` does for language models."""
    transformer = transformer_config(settings, config, dtype)
    # Make Megatron sum the gradients of the noise-level embedder over the pipeline stages.
    transformer.has_cond_embedder = True  # pyright: ignore[reportAttributeAccessIssue]  # Megatron does not declare it
    return transformer
