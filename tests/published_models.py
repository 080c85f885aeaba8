"""config.json of published models, and their parameter counts. Those of language models are in CONFIGS."""

from __future__ import annotations

from typing import Any

_LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
}
_SMOLLM2 = _LLAMA | {"vocab_size": 49152, "max_position_embeddings": 8192, "tie_word_embeddings": True}
_MISTRAL = {
    "model_type": "mistral",
    "architectures": ["MistralForCausalLM"],
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 32768,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-05,
    "sliding_window": None,
    "tie_word_embeddings": False,
}
_MIXTRAL = _MISTRAL | {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
_PHI3 = {
    "model_type": "phi3",
    "architectures": ["Phi3ForCausalLM"],
    "rms_norm_eps": 1e-05,
    "sliding_window": None,
    "tie_word_embeddings": False,
}
_QWEN2 = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-06,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
}
_QWEN3 = _QWEN2 | {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}
_QWEN3_MOE = _QWEN3 | {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
_DEEPSEEK = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_layer_freq": 1,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False,
}
_GLM = {
    "model_type": "glm4_moe",
    "architectures": ["Glm4MoeForCausalLM"],
    "head_dim": 128,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-05,
    "vocab_size": 151552,
    "tie_word_embeddings": False,
}

_QWEN3_NEXT = {
    "model_type": "qwen3_next",
    "architectures": ["Qwen3NextForCausalLM"],
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25},
    "tie_word_embeddings": False,
}
_QWEN35 = _QWEN3_NEXT | {
    "model_type": "qwen3_5_text",
    "architectures": ["Qwen3_5ForCausalLM"],
    "vocab_size": 248320,
}
_QWEN35_MOE = _QWEN35 | {
    "model_type": "qwen3_5_moe_text",
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "num_key_value_heads": 2,
}

_GPT_OSS = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "head_dim": 64,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "SmolLM2-135M": _SMOLLM2
    | {
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
    },
    "SmolLM2-1.7B": _SMOLLM2
    | {
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "intermediate_size": 8192,
    },
    "Llama-3.2-1B": _LLAMA
    | {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "head_dim": 64,
        "intermediate_size": 8192,
        "tie_word_embeddings": True,
    },
    "Llama-3.1-8B": _LLAMA
    | {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 14336},
    "Llama-3.1-70B": _LLAMA
    | {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "intermediate_size": 28672},
    "Llama-3.1-405B": _LLAMA
    | {"hidden_size": 16384, "num_hidden_layers": 126, "num_attention_heads": 128, "intermediate_size": 53248},
    "Mistral-7B-v0.3": _MISTRAL,
    "Mixtral-8x7B": _MIXTRAL | {"vocab_size": 32000},
    "Mixtral-8x22B": _MIXTRAL
    | {
        "hidden_size": 6144,
        "num_hidden_layers": 56,
        "num_attention_heads": 48,
        "intermediate_size": 16384,
        "max_position_embeddings": 65536,
        "vocab_size": 32000,
    },
    "Phi-4": _PHI3
    | {
        "hidden_size": 5120,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 10,
        "intermediate_size": 17920,
        "max_position_embeddings": 16384,
        "vocab_size": 100352,
    },
    "Qwen2.5-0.5B": _QWEN2
    | {
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "Qwen2.5-7B": _QWEN2
    | {
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
    },
    "Qwen2.5-32B": _QWEN2
    | {
        "hidden_size": 5120,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "intermediate_size": 27648,
    },
    "Qwen2.5-72B": _QWEN2
    | {
        "hidden_size": 8192,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "intermediate_size": 29568,
    },
    "Qwen3-0.6B": _QWEN3
    | {
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "intermediate_size": 3072,
        "tie_word_embeddings": True,
    },
    "Qwen3-8B": _QWEN3
    | {"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 12288},
    "Qwen3-32B": _QWEN3
    | {"hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 64, "intermediate_size": 25600},
    "Qwen3-30B-A3B": _QWEN3_MOE
    | {
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
    },
    "Qwen3-235B-A22B": _QWEN3_MOE
    | {
        "hidden_size": 4096,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
    },
    "Moonlight-16B-A3B": _DEEPSEEK
    | {
        "hidden_size": 2048,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "intermediate_size": 11264,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.446,
        "first_k_dense_replace": 1,
        "rms_norm_eps": 1e-05,
        "max_position_embeddings": 8192,
        "vocab_size": 163840,
    },
    "DeepSeek-V3": _DEEPSEEK
    | {
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
        "max_position_embeddings": 163840,
        "vocab_size": 129280,
    },
    "Qwen3-Next-80B-A3B": _QWEN3_NEXT
    | {
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "linear_num_value_heads": 32,
        "intermediate_size": 5120,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "vocab_size": 151936,
    },
    "Qwen3.5-0.8B": _QWEN35
    | {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "linear_num_value_heads": 16,
        "intermediate_size": 3584,
        "tie_word_embeddings": True,
    },
    "Qwen3.5-2B": _QWEN35
    | {
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "linear_num_value_heads": 16,
        "intermediate_size": 6144,
        "tie_word_embeddings": True,
    },
    "Qwen3.5-4B": _QWEN35
    | {
        "hidden_size": 2560,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "linear_num_value_heads": 32,
        "intermediate_size": 9216,
        "tie_word_embeddings": True,
    },
    "Qwen3.5-9B": _QWEN35
    | {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "linear_num_value_heads": 32,
        "intermediate_size": 12288,
    },
    "Qwen3.5-27B": _QWEN35
    | {
        "hidden_size": 5120,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "linear_num_value_heads": 48,
        "intermediate_size": 17408,
    },
    "Qwen3.5-35B-A3B": _QWEN35_MOE
    | {
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "linear_num_value_heads": 32,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
    },
    "Qwen3.5-122B-A10B": _QWEN35_MOE
    | {
        "hidden_size": 3072,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "linear_num_value_heads": 64,
        "moe_intermediate_size": 1024,
        "shared_expert_intermediate_size": 1024,
        "num_experts": 256,
        "num_experts_per_tok": 8,
    },
    "Qwen3.5-397B-A17B": _QWEN35_MOE
    | {
        "hidden_size": 4096,
        "num_hidden_layers": 60,
        "num_attention_heads": 32,
        "linear_num_value_heads": 64,
        "moe_intermediate_size": 1024,
        "shared_expert_intermediate_size": 1024,
        "num_experts": 512,
        "num_experts_per_tok": 10,
    },
    "Kimi-K2": _DEEPSEEK
    | {
        "model_type": "kimi_k2",
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "q_lora_rank": 1536,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 384,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.827,
        "first_k_dense_replace": 1,
        "max_position_embeddings": 131072,
        "vocab_size": 163840,
    },
    "GLM-4.5-Air": _GLM
    | {
        "hidden_size": 4096,
        "num_hidden_layers": 46,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 128,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1,
        "use_qk_norm": False,
        "max_position_embeddings": 131072,
    },
    "GLM-4.6": _GLM
    | {
        "hidden_size": 5120,
        "num_hidden_layers": 92,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "n_routed_experts": 160,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
        "use_qk_norm": True,
        "max_position_embeddings": 202752,
    },
    "gpt-oss-20b": _GPT_OSS | {"num_hidden_layers": 24, "num_local_experts": 32},
    "gpt-oss-120b": _GPT_OSS | {"num_hidden_layers": 36, "num_local_experts": 128},
}
"""The published configs, without keys that do not affect the weights, such as rotary scaling. The MTP layers of
DeepSeek-V3 and GLM, and the quantization of DeepSeek-V3, Kimi K2 and gpt-oss, are omitted. GLM-4.5 and GLM-4.7 have the
same weight shapes as GLM-4.6. The configs of Qwen3.5 are those of its text models (text_config)."""

_QWEN3_TOWER = {
    "deepstack_visual_indexes": [8, 16, 24],
    "depth": 27,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "in_channels": 3,
    "intermediate_size": 4304,
    "num_heads": 16,
    "num_position_embeddings": 2304,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_QWEN3_VL = {
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "tie_word_embeddings": False,
}
_QWEN3_VL_TEXT = {
    "head_dim": 128,
    "max_position_embeddings": 262144,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
    "rope_theta": 5000000,
    "vocab_size": 151936,
}
_QWEN35_ROPE = _QWEN35["rope_parameters"] | {"mrope_interleaved": True, "mrope_section": [11, 11, 10]}

VISION_CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen2.5-VL-7B": {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "hidden_size": 3584,
        "image_token_id": 151655,
        "video_token_id": 151656,
        "vision_start_token_id": 151652,
        "vision_end_token_id": 151653,
        "intermediate_size": 18944,
        "max_position_embeddings": 128000,
        "max_window_layers": 28,
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vision_config": {
            "depth": 32,
            "hidden_act": "silu",
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "in_chans": 3,
            "out_hidden_size": 3584,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "spatial_patch_size": 14,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
            "tokens_per_second": 2,
            "temporal_patch_size": 2,
        },
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "vocab_size": 152064,
    },
    "Qwen3-VL-8B": _QWEN3_VL
    | {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "text_config": _QWEN3_VL_TEXT
        | {
            "model_type": "qwen3_vl_text",
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_key_value_heads": 8,
        },
        "vision_config": _QWEN3_TOWER | {"model_type": "qwen3_vl", "out_hidden_size": 4096},
    },
    "Qwen3-VL-30B-A3B": _QWEN3_VL
    | {
        "architectures": ["Qwen3VLMoeForConditionalGeneration"],
        "model_type": "qwen3_vl_moe",
        "text_config": _QWEN3_VL_TEXT
        | {
            "model_type": "qwen3_vl_moe_text",
            "decoder_sparse_step": 1,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "mlp_only_layers": [],
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 48,
            "num_key_value_heads": 4,
        },
        "vision_config": _QWEN3_TOWER | {"model_type": "qwen3_vl_moe", "out_hidden_size": 2048},
    },
    "Qwen3.5-35B-A3B": {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "image_token_id": 248056,
        "video_token_id": 248057,
        "vision_start_token_id": 248053,
        "vision_end_token_id": 248054,
        "tie_word_embeddings": False,
        "text_config": CONFIGS["Qwen3.5-35B-A3B"] | {"rope_parameters": _QWEN35_ROPE},
        "vision_config": _QWEN3_TOWER
        | {"deepstack_visual_indexes": [], "model_type": "qwen3_5_moe", "out_hidden_size": 2048},
    },
}
"""config.json of vision-language models: flat for Qwen2.5-VL, nested for the others."""

Z_IMAGE = dict(
    _class_name="ZImageTransformer2DModel",
    _diffusers_version="0.36.0.dev0",
    all_f_patch_size=[1],
    all_patch_size=[2],
    axes_dims=[32, 48, 48],
    axes_lens=[1536, 512, 512],
    cap_feat_dim=2560,
    dim=3840,
    in_channels=16,
    n_heads=30,
    n_kv_heads=30,
    n_layers=30,
    n_refiner_layers=2,
    norm_eps=1e-05,
    qk_norm=True,
    rope_theta=256.0,
    t_scale=1000.0,
)
"""The config.json of Z-Image's transformer, the same in Tongyi-MAI/Z-Image and Tongyi-MAI/Z-Image-Turbo."""

Z_IMAGE_PARAMETERS = 6_154_908_736

SD35_MEDIUM = dict(
    _class_name="SD3Transformer2DModel",
    _diffusers_version="0.32.0.dev0",
    attention_head_dim=64,
    caption_projection_dim=1536,
    dual_attention_layers=list(range(13)),
    in_channels=16,
    joint_attention_dim=4096,
    num_attention_heads=24,
    num_layers=24,
    out_channels=16,
    patch_size=2,
    pooled_projection_dim=2048,
    pos_embed_max_size=384,
    qk_norm="rms_norm",
    sample_size=128,
)
SD35_LARGE = SD35_MEDIUM | dict(
    caption_projection_dim=2432,
    dual_attention_layers=[],
    num_attention_heads=38,
    num_layers=38,
    pos_embed_max_size=192,
)
"""The config.json of the transformers of Stable Diffusion 3.5."""

SD35_MEDIUM_PARAMETERS, SD35_LARGE_PARAMETERS = 2_469_663_936, 8_146_280_768
"""Numbers of elements in their checkpoints, including the position embedding."""

PARAMETERS: dict[str, int] = {
    "SmolLM2-135M": 134_515_008,
    "SmolLM2-1.7B": 1_711_376_384,
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.1-70B": 70_553_706_496,
    "Llama-3.1-405B": 405_853_388_800,
    "Mistral-7B-v0.3": 7_248_023_552,
    "Mixtral-8x7B": 46_702_792_704,
    "Mixtral-8x22B": 140_620_634_112,
    "Phi-4": 14_659_507_200,
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-32B": 32_763_876_352,
    "Qwen2.5-72B": 72_706_203_648,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-32B": 32_762_123_264,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-235B-A22B": 235_093_634_560,
    "Moonlight-16B-A3B": 15_960_110_208,
    "DeepSeek-V3": 671_026_419_200,
    "Qwen3-Next-80B-A3B": 79_674_391_296,
    "Qwen3.5-0.8B": 752_393_024,
    "Qwen3.5-2B": 1_881_825_088,
    "Qwen3.5-4B": 4_205_751_296,
    "Qwen3.5-9B": 8_953_803_264,
    "Qwen3.5-27B": 26_895_998_464,
    "Qwen3.5-35B-A3B": 34_660_610_688,
    "Qwen3.5-122B-A10B": 122_111_526_912,
    "Qwen3.5-397B-A17B": 396_346_350_336,
    "Kimi-K2": 1_026_408_232_448,
    "GLM-4.5-Air": 106_852_251_264,
    "GLM-4.6": 352_797_829_024,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
}
"""Parameter counts. Tied weights count once."""

VISION_PARAMETERS: dict[str, int] = {
    "Qwen2.5-VL-7B": 8_292_166_656,
    "Qwen3-VL-8B": 8_767_123_696,
    "Qwen3-VL-30B-A3B": 31_070_754_032,
    "Qwen3.5-35B-A3B": 35_107_181_936,
}
"""Parameter counts including the vision tower, without MTP layers."""
