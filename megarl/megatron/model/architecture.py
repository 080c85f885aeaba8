"""Derives the architecture fields in Megatron's TransformerConfig from a config.json of transformers or diffusers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.nn.functional as F
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megarl.models.denoiser import DenoiserShape, StableDiffusion3Shape, shape_of
from megarl.models.families import completed
from megarl.models.huggingface import rope_parameters
from megarl.models.shape import ModelShape

FORM = (
    *("activation_func_clamp_value", "apply_query_key_layer_scaling", "apply_residual_connection_post_layernorm"),
    *("attention_output_gate", "experimental_attention_variant", "glu_linear_offset", "heterogeneous_block_specs"),
    *("is_hybrid_model", "kv_lora_rank", "layernorm_zero_centered_gamma", "linear_attention_freq"),
    *("linear_conv_kernel_dim", "linear_key_head_dim", "linear_num_key_heads", "linear_num_value_heads"),
    *("linear_value_head_dim", "moe_apply_probs_on_input", "moe_ffn_hidden_size", "moe_latent_size", "moe_layer_freq"),
    *("moe_router_enable_expert_bias", "moe_router_force_biased", "moe_router_force_load_balancing"),
    *("moe_router_group_topk", "moe_router_num_groups", "moe_router_pre_softmax", "moe_router_score_function"),
    *("moe_router_topk", "moe_router_topk_limited_devices", "moe_router_topk_scaling_factor", "moe_shared_expert_gate"),
    *("moe_shared_expert_intermediate_size", "multi_latent_attention", "no_rope_freq", "num_moe_experts"),
    *("qk_l2_norm", "rotary_interleaved", "softmax_scale", "softmax_type", "window_attn_skip_freq", "window_size"),
)
"""Fields that only some models set and that determine the model's outputs. If they were overridden, the trainer's model
would differ from the engine's and from the exported one."""


@dataclass
class YarnConfig(TransformerConfig):
    """A TransformerConfig with YaRN's parameters, which GPTModel and its attention read but Megatron does not
    declare."""

    yarn_rotary_scaling_factor: float = 1.0
    yarn_original_max_position_embeddings: int = 0
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    yarn_correction_range_round_to_int: bool = True
    yarn_mscale: ClassVar[float | None] = None
    yarn_mscale_all_dim: ClassVar[float | None] = None


def config_class(fields: Mapping[str, Any]) -> type[TransformerConfig]:
    """Return the TransformerConfig class that has these architecture fields."""
    if "kv_lora_rank" in fields:
        return MLATransformerConfig
    return YarnConfig if "yarn_rotary_scaling_factor" in fields else TransformerConfig


def architecture(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the architecture fields for a config. Raise a UserError if the model has an unsupported feature."""
    shape = shape_of(hf_config)
    return dict(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.intermediate,
        normalization="RMSNorm",
        qk_layernorm=shape.qk_norm or shape.latent is not None,  # latent attention normalizes its latents
        # This field adds a bias to every linear layer; the layer spec removes the biases that the model lacks.
        add_bias_linear=shape.attention_out_bias or shape.mlp_bias,
        add_qkv_bias=shape.qkv_bias,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        **(_denoiser(shape) if isinstance(shape, DenoiserShape) else _language_model(shape, completed(hf_config))),
    )


def _denoiser(shape: DenoiserShape) -> dict[str, Any]:
    if isinstance(shape, StableDiffusion3Shape):
        return dict(
            layernorm_epsilon=1e-6,
            gated_linear_unit=False,
            activation_func=F.gelu,  # Megatron's fused kernel uses the tanh approximation; see `build_chunks`
            hetereogenous_dist_checkpoint=True,  # only some layers have a second attention
        )
    return dict(layernorm_epsilon=1e-5, gated_linear_unit=True, activation_func=F.silu)


def _language_model(shape: ModelShape, model: Mapping[str, Any]) -> dict[str, Any]:
    return dict(
        **_experts(shape, model),
        **_latent_attention(shape, model),
        **_linear_attention(shape),
        **_windows_and_sinks(shape),
        **_yarn(shape, model),
        layernorm_epsilon=model["rms_norm_eps"],
        gated_linear_unit=True,
        activation_func=F.silu,
    )


def _experts(shape: ModelShape, model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields for a mixture of experts. The auxiliary loss is off unless megatron_overrides enables it,
    because it is not linear in microbatches and not part of the objective."""
    if shape.experts is None:
        return {}
    return dict(
        num_moe_experts=shape.experts.count,
        moe_ffn_hidden_size=shape.experts.intermediate,
        moe_layer_freq=[int(mixed) for mixed in shape.experts.layers],
        moe_router_topk=shape.experts.active,
        # Normalizing the top-k weights is equivalent to a softmax over the chosen experts only.
        moe_router_pre_softmax=not model.get("norm_topk_prob", True),
        moe_shared_expert_intermediate_size=shape.experts.shared_intermediate or None,
        moe_shared_expert_gate=shape.experts.has_shared_gate,
        **(_deepseek_router(model) if shape.experts.has_selection_bias else {}),
    )


def _deepseek_router(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields for DeepSeek's router: sigmoid scores, with a bias that affects only the selection. The router
    first selects expert groups, then experts within them (arXiv 2412.19437)."""
    limited = model["n_group"] > model["topk_group"]
    return dict(
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_topk_scaling_factor=model["routed_scaling_factor"],
        moe_router_num_groups=model["n_group"] if limited else None,
        moe_router_group_topk=model["topk_group"] if limited else None,
        moe_router_dtype="fp32",
    )


def _linear_attention(shape: ModelShape) -> dict[str, Any]:
    """Return the fields for models with gated delta net layers. Their full attention has an output gate, and all norms
    except the one after the delta rule store their weight minus one."""
    linear = shape.linear
    if linear is None:
        return {}
    return dict(
        experimental_attention_variant="gated_delta_net",
        linear_attention_freq=[int(is_linear) for is_linear in linear.layers],
        linear_conv_kernel_dim=linear.width,
        linear_key_head_dim=linear.key_dim,
        linear_value_head_dim=linear.value_dim,
        linear_num_key_heads=linear.key_heads,
        linear_num_value_heads=linear.value_heads,
        attention_output_gate=shape.has_output_gate,
        layernorm_zero_centered_gamma=True,
    )


def _windows_and_sinks(shape: ModelShape) -> dict[str, Any]:
    fields: dict[str, Any] = dict(softmax_type="learnable") if shape.has_sinks else {}
    if shape.windows is not None:
        fields["window_size"] = (shape.windows.size - 1, 0)  # tokens before and after the query's own token
        fields["window_attn_skip_freq"] = [int(is_windowed) for is_windowed in shape.windows.layers]
    return fields


def _yarn(shape: ModelShape, model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of YarnConfig for models with YaRN. Latent attention has its own fields."""
    rope = rope_parameters(model)
    if rope["rope_type"] != "yarn" or shape.latent is not None:
        return {}
    return dict(
        yarn_rotary_scaling_factor=rope["factor"],
        yarn_original_max_position_embeddings=rope["original_max_position_embeddings"],
        yarn_beta_fast=rope["beta_fast"],
        yarn_beta_slow=rope["beta_slow"],
        yarn_correction_range_round_to_int=rope.get("truncate", True),
    )


def _latent_attention(shape: ModelShape, model: Mapping[str, Any]) -> dict[str, Any]:
    if shape.latent is None:
        return {}
    rope = rope_parameters(model)
    yarn, mscales = rope["rope_type"] == "yarn", (rope.get("mscale"), rope.get("mscale_all_dim"))
    return dict(
        q_lora_rank=shape.latent.query_rank,
        kv_lora_rank=shape.latent.kv_rank,
        qk_head_dim=shape.latent.content_dim,
        qk_pos_emb_head_dim=shape.latent.position_dim,
        v_head_dim=shape.latent.value_dim,
        rope_type="yarn" if yarn else "rope",
        rotary_base=rope["rope_theta"],
        # Megatron applies this factor to attention for every rope type; 1 disables it.
        rotary_scaling_factor=rope["factor"] if yarn else 1.0,
        original_max_position_embeddings=rope["original_max_position_embeddings"],
        beta_fast=rope.get("beta_fast") or 32,
        beta_slow=rope.get("beta_slow") or 1,
        # As in transformers, the mscale factors are used only if both are set.
        mscale=mscales[0] if all(mscales) else None,
        mscale_all_dim=mscales[1] or 0.0,
    )
