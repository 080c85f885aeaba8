"""Keys of the config.json of tiny models that vLLM runs on CPUs, by family, in addition to SIZES."""

# vLLM's CPU kernels require a head dim of at least 32 and experts whose number of rows is a multiple of 32.
SIZES = dict(
    vocab_size=128,
    hidden_size=64,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    num_hidden_layers=2,
    intermediate_size=128,
    max_position_embeddings=256,
)
# vLLM's CPU kernel requires these values of kv_lora_rank and qk_rope_head_dim.
LATENT = dict(
    num_key_value_heads=2,
    kv_lora_rank=512,
    qk_rope_head_dim=64,
    qk_nope_head_dim=16,
    v_head_dim=24,
    moe_intermediate_size=64,
    n_routed_experts=4,
    n_shared_experts=1,
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
    scoring_func="sigmoid",
    topk_method="noaux_tc",
)
YARN = dict(
    rope_type="yarn",
    rope_theta=10000.0,
    factor=4.0,
    original_max_position_embeddings=64,
    mscale=1.0,
    mscale_all_dim=1.0,
)
# vLLM's CPU MoE kernels require a hidden size that is a multiple of 32.
GATED_DELTA = dict(
    num_attention_heads=4,
    num_key_value_heads=2,
    num_hidden_layers=4,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=24,
    linear_value_head_dim=16,
    rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.25),
)
GATED_DELTA_EXPERTS = GATED_DELTA | dict(
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32
)
GLM = dict(
    moe_intermediate_size=64,
    n_routed_experts=4,
    num_experts_per_tok=2,
    attention_bias=True,
    first_k_dense_replace=1,
)
TWO_GROUPS = dict(num_attention_heads=4, num_key_value_heads=2)
GPT_OSS_YARN = dict(
    rope_type="yarn",
    rope_theta=10000.0,
    factor=4.0,
    original_max_position_embeddings=64,
    beta_fast=32.0,
    beta_slow=1.0,
    truncate=False,
)
GPT_OSS = TWO_GROUPS | dict(
    num_local_experts=4,
    num_experts_per_tok=2,
    sliding_window=24,
    rms_norm_eps=1e-5,
    rope_parameters=GPT_OSS_YARN,
)
KIMI_YARN = YARN | dict(rope_theta=50.0, factor=32.0, beta_fast=1.0, beta_slow=1.0)
