"""The vLLM arguments that megarl sets, and those that `vllm_overrides` may not change."""

from __future__ import annotations

from typing import Any, Literal

from megarl.config.rollout_schema import Rollout

EngineSection = Literal["rollout", "reward_model", "teachers"]

_WITHOUT_DRAFTS = dict.fromkeys(("speculative_config", "spec_method", "spec_model", "spec_tokens"))

_ALWAYS: dict[str, str | None] = {
    "dtype": "model.dtype",
    "seed": "run.seed",
    "enable_chunked_prefill": None,
    "worker_cls": None,
    "worker_extension_cls": None,
    "pipeline_parallel_size": None,
    "prefill_context_parallel_size": None,
    "data_parallel_size": None,
    "nnodes": None,
    "node_rank": None,
    "master_addr": None,
    "master_port": None,
    "distributed_executor_backend": None,
}

MANAGED: dict[EngineSection, dict[str, str | None]] = {
    "rollout": _ALWAYS
    | {
        "model": "model.path",
        "tensor_parallel_size": "rollout.tp",
        "max_model_len": "rollout.context_length",
        "kv_cache_memory_bytes": "rollout.kv_cache_gib",
        "max_logprobs": "rollout.top_k",
        "enable_sleep_mode": "rollout.sleep",
        "enable_return_routed_experts": "actor.experts.replay_routes",
        "speculative_config": "rollout.speculative.method",
        "spec_method": "rollout.speculative.method",
        "spec_model": "rollout.speculative.path",
        "spec_tokens": "rollout.speculative.tokens",
        "per_request_spec_decode_metrics": "rollout.speculative.method",
        "logprobs_mode": None,
        "moe_backend": None,
        "hf_overrides": None,
        "mm_processor_kwargs": "data.max_pixels",
        "mm_device_do_normalize": None,
        "mm_processor_cache_gb": None,
        "mm_encoder_tp_mode": None,
        "limit_mm_per_prompt": None,
        "language_model_only": "model.vision",
        "enable_mm_embeds": None,
    },
    "reward_model": _ALWAYS
    | {
        "model": "reward_model.path",
        "tensor_parallel_size": "reward_model.layout.tp",
        "max_model_len": "reward_model.context_length",
        "kv_cache_memory_bytes": "reward_model.kv_cache_gib",
        "max_num_batched_tokens": "reward_model.tokens_per_microbatch",
        "runner": None,
        "pooler_config": None,
    }
    | _WITHOUT_DRAFTS,
    "teachers": _ALWAYS
    | {
        "model": "teachers.models",
        "tensor_parallel_size": "teachers.layout.tp",
        "max_model_len": "rollout.context_length",
        "kv_cache_memory_bytes": "teachers.kv_cache_gib",
        "max_num_batched_tokens": "teachers.tokens_per_microbatch",
        "max_logprobs": "algorithm.distillation.top_k",
        "logprobs_mode": None,
        "runner": None,
        "hf_overrides": None,
    }
    | _WITHOUT_DRAFTS,
}
"""Arguments that megarl sets, for each section with vllm_overrides: argument -> the key that determines it, or None if
samples, scores or refits would be wrong with any other value."""

ADJUSTABLE = frozenset(
    {
        "attention_backend",
        "disable_log_stats",
        "enable_prefix_caching",
        "enforce_eager",
        "gpu_memory_utilization",
        "hf_overrides",
        "load_format",
        "mamba_ssm_cache_dtype",
        "max_num_batched_tokens",
    }
)
"""Arguments that megarl sets and vllm_overrides may change, unless MANAGED lists them for that section."""

REFITTABLE: dict[str, tuple[Any, str]] = {
    "expert_placement_strategy": ("linear", "a refit writes consecutive experts to a rank"),
    "enable_eplb": (False, "a refit writes experts to their original ranks, but EPLB moves them"),
    "offload_group_size": (0, "vLLM would read a layer's parameters from copies that a refit does not update"),
}
"""Arguments in rollout.vllm_overrides -> the only value for which vLLM reads the weights that a refit writes, and the
effect of other values. Startup checks cannot detect other values, because the parameters' names and shapes stay the
same."""


def batched_tokens(rollout: Rollout) -> int:
    """Return the maximum number of tokens that an engine processes in one forward pass."""
    return rollout.vllm_overrides.get("max_num_batched_tokens", max(2048, rollout.context_length))
