"""Rules for features that a model needs or has: positions, attention windows, experts, an MTP layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megarl.config.model_schema import Placed
from megarl.config.schema import Config
from megarl.models.huggingface import attention_window, experts
from megarl.models.mtp import why_no_mtp
from megarl.models.rules.model_path import path_of
from megarl.models.unsupported import unsupported


def context_fits_the_positions(config: Config, placed: Placed, hf: Mapping[str, Any]) -> Iterator[str]:
    (key, context), positions = config.context_of(placed), hf["max_position_embeddings"]
    if context > positions:
        yield (
            f"{key}={context}: the model has {positions} positions (max_position_embeddings). Fix: set {key} to at "
            f"most {positions}"
        )


def teacher_engine_has_a_position_left(config: Config, placed: Placed, hf: Mapping[str, Any]) -> Iterator[str]:
    """Require a position after the longest sample: vLLM samples a token there in every request."""
    (key, context), positions = config.context_of(placed), hf["max_position_embeddings"]
    if context + 1 > positions:
        yield (
            f"{key}={context}: with engine=vllm, the teacher needs one more position, but it has only {positions} "
            f"(max_position_embeddings). Fix: set {key} to at most {positions - 1}, or set engine=megatron"
        )


def attention_is_full(config: Config, placed: Placed, hf: Mapping[str, Any]) -> Iterator[str]:
    """Require that the attention window, if any, covers the longest sample, so that attention is full."""
    window, (key, context) = attention_window(hf), config.context_of(placed)
    if window is not None and context > window:
        yield (
            f"{key}={context}: it exceeds the model's sliding_window={window}, but the trainer computes full "
            f"attention. Fix: set {key} to at most {window}"
        )


def features_are_supported(config: Config, placed: Placed, hf: Mapping[str, Any]) -> Iterator[str]:
    features = unsupported(hf)
    if features:
        yield f"{path_of(config, placed)}: megarl does not support {' and '.join(features)}. Fix: use another model"


def expert_keys_require_experts(config: Config, hf: Mapping[str, Any]) -> Iterator[str]:
    keys, model = config.actor.experts, path_of(config, config.actor)
    if keys.replay_routes and experts(hf) is None:
        yield f"actor.experts.replay_routes=true: {model} has no experts. Fix: set actor.experts.replay_routes=false"
    if keys.router != "free" and experts(hf) is None:
        yield f"actor.experts.router=frozen: {model} has no routers. Fix: set actor.experts.router=free"


def trust_region_requires_dense_model(config: Config, hf: Mapping[str, Any]) -> Iterator[str]:
    limit = config.algorithm.trust_region.kl_limit
    if limit is not None and experts(hf) is not None:
        yield (
            f"algorithm.trust_region.kl_limit={limit:g}: TRPO computes differences between passes, but "
            f"{path_of(config, config.actor)} may route a token to different experts in each pass. Fix: set "
            "algorithm.trust_region.kl_limit=null"
        )


def model_has_mtp(config: Config, hf: Mapping[str, Any]) -> Iterator[str]:
    if config.actor.has_mtp and (reason := why_no_mtp(hf)) is not None:
        yield (
            f"actor.mtp.loss_coefficient={config.actor.mtp.loss_coefficient}: {path_of(config, config.actor)}: "
            f"{reason}. Fix: set actor.mtp.loss_coefficient=null"
        )
