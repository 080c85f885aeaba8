"""Builds denoisers from a diffusers config and wraps them for data parallelism."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.config.model_schema import Placed
from megarl.core import device
from megarl.megatron.model import kernels
from megarl.megatron.model.build import configure, parameters_of, wrap
from megarl.megatron.model.denoiser.model import Denoiser
from megarl.megatron.model.layer_spec import replace_activations
from megarl.models.denoiser import DenoiserShape


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
        parameter.requires_grad_(name not in frozen)
    attach(chunks)
    if settings.recompute != "none" and chunks[0].pre_process:
        # As in build_model, for both stacks of refiners.
        for embedder in (chunks[0].image_embedder, chunks[0].caption_embedder):
            embedder.register_forward_hook(lambda _, __, hidden: hidden.requires_grad_(torch.is_grad_enabled()))
    return wrap(chunks, transformer, settings)


def build_chunks(transformer: TransformerConfig, config: Mapping[str, Any], vpp: int) -> list[Denoiser]:
    """Build this rank's layers, one model chunk per virtual stage."""
    kernels.fuse_weight_gradients()
    shape = DenoiserShape.of(config)
    chunks = [Denoiser(transformer, shape, stage if vpp > 1 else None) for stage in range(vpp)]
    for chunk in chunks if transformer.use_te_activation_func else ():
        replace_activations(chunk)
    return chunks


def denoiser_config(settings: Placed, config: Mapping[str, Any], dtype: torch.dtype) -> TransformerConfig:
    """Build the TransformerConfig, as `transformer_config` does for language models."""
    shape = DenoiserShape.of(config)
    transformer = configure(settings, shape, TransformerConfig, architecture(shape), dtype)
    # With this flag, Megatron sums the gradients of the noise-level embedder over the pipeline stages.
    transformer.has_cond_embedder = True  # pyright: ignore[reportAttributeAccessIssue]  # read, but not declared
    return transformer


def architecture(shape: DenoiserShape) -> dict[str, Any]:
    """Return the architecture fields in Megatron's TransformerConfig."""
    return dict(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.intermediate,
        layernorm_epsilon=1e-5,
        normalization="RMSNorm",
        qk_layernorm=True,
        rotary_interleaved=True,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )
