"""Small models for GPUs: dense, with experts, and with latent attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.tiny_model import write_tiny_model

SIZES = dict(
    vocab_size=128,
    hidden_size=256,
    num_attention_heads=4,
    num_hidden_layers=2,
    intermediate_size=512,
    max_position_embeddings=256,
)
HEADS = dict(num_key_value_heads=2, head_dim=64)
ROUTED = dict(moe_intermediate_size=256, num_experts_per_tok=2)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen3", HEADS),
    "experts": ("qwen3_moe", HEADS | ROUTED | dict(num_experts=4, norm_topk_prob=True)),
    # Use DeepSeek-V3's head dims, the only ones that the kernels support.
    "latent": (
        "deepseek_v3",
        dict(
            num_key_value_heads=4,
            q_lora_rank=64,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            first_k_dense_replace=1,
            n_routed_experts=4,
            n_shared_experts=1,
            n_group=1,
            topk_group=1,
        )
        | ROUTED,
    ),
}


def write_model(folder: Path, name: str) -> Path:
    """Write the named model into the folder and return the folder."""
    kind, more = MODELS[name]
    return write_tiny_model(folder, kind, **SIZES | more)
