"""The model sizes that the attention and expert kernels of vLLM's CPU build support. On GPUs, vLLM has kernels for all
sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megarl.core.errors import UserError
from megarl.models.families import completed
from megarl.models.huggingface import experts, latent_attention, rope_parameters
from megarl.models.shape import ModelShape

HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head dimensions that vLLM's CPU attention supports."""

LATENT_SIZE = 576
"""Number of channels per token in the KV cache for DeepSeek-V3's attention: 512 latent and 64 rotary channels."""

EXPERTS_MULTIPLE = 32
"""vLLM's expert kernels on CPU require the hidden size to be a multiple of this. They pad intermediate sizes to such a
multiple, except for gpt-oss."""

REMEDY = "run this model on GPUs, or use a different model"


def check_cpu_kernels(folder: Path, hf_config: dict[str, Any]) -> None:
    """Raise a UserError if vLLM's CPU build has no kernel for the model."""
    latent, shape = latent_attention(completed(hf_config)), ModelShape.of(hf_config)
    if latent is not None:
        size = latent.kv_rank + latent.position_dim
        if size != LATENT_SIZE:
            raise UserError(
                f"{folder}: kv_lora_rank={latent.kv_rank} + qk_rope_head_dim={latent.position_dim} = {size}, but "
                f"vLLM's CPU build only supports a sum of {LATENT_SIZE}. Fix: {REMEDY}"
            )
    elif shape.head_dim not in HEAD_DIMS:
        raise UserError(
            f"{folder}: head_dim={shape.head_dim}, but vLLM's CPU build only supports "
            f"{', '.join(map(str, HEAD_DIMS))}. Fix: {REMEDY}"
        )
    if shape.experts is not None and shape.experts.is_interleaved and shape.experts.intermediate % EXPERTS_MULTIPLE:
        raise UserError(
            f"{folder}: intermediate_size={shape.experts.intermediate}, but vLLM's CPU MoE kernels require a multiple "
            f"of {EXPERTS_MULTIPLE} if gate and up rows alternate. Fix: {REMEDY}"
        )
    if experts(completed(hf_config)) is not None and shape.hidden % EXPERTS_MULTIPLE:
        raise UserError(
            f"{folder}: hidden_size={shape.hidden}, but vLLM's CPU MoE kernels require a multiple of "
            f"{EXPERTS_MULTIPLE}. Fix: {REMEDY}"
        )


def check_cpu_speculation(folder: Path, hf_config: dict[str, Any], method: str) -> None:
    """Raise a UserError if vLLM's CPU build cannot draft tokens for the model with this method."""
    if method == "mtp" and "mrope_section" in rope_parameters(completed(hf_config)):
        raise UserError(
            "rollout.speculative.method=mtp: vLLM's CPU build crashes when it drafts tokens for a model with "
            f"mrope_section ({folder}/config.json). Fix: set rollout.speculative.method=null, or run this model on GPUs"
        )
    if method == "eagle3" and latent_attention(completed(hf_config)) is not None:
        raise UserError(
            f"rollout.speculative.method=eagle3: {folder} has latent attention, whose KV cache has blocks of 16 tokens "
            "in vLLM's CPU build, but the draft's attention needs a block size that is a multiple of 32. Fix: set "
            "rollout.speculative.method=null and rollout.speculative.path=null, or run this model on GPUs"
        )
