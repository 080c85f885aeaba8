"""Build the arguments of vLLM engines: rollout engines, judges, classifiers and teachers."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from vllm import EngineArgs

from megarl.config.rollout_schema import Rollout
from megarl.config.vllm_arguments import ADJUSTABLE, MANAGED, EngineSection, batched_tokens
from megarl.core import device
from megarl.core.errors import UserError
from megarl.models.engine_kernels import check_cpu_kernels
from megarl.models.families import completed
from megarl.models.folder import is_dequantized, read_config, resolve
from megarl.models.huggingface import experts, latent_attention, linear_attention
from megarl.resharding.families.quantized import quantization_config
from megarl.rollout.vllm.images import PIXELS, vision_arguments

INVARIANT_KERNELS = (9, 0)
"""Minimum compute capability for vLLM's batch-invariant mode (VLLM_BATCH_INVARIANT in its envs.py)."""

FREE_SHARE = 0.01
"""Fraction of GPU memory that vLLM requires to be free at startup. vLLM's default, nearly all of the memory, fails on
shared GPUs. A low value is safe: cluster/memory/shared_gpu.py checks that the engine fits, and the KV cache has a fixed
size."""

NGRAM_LENGTHS = (2, 4)
"""Minimum and maximum length of the n-grams that rollout.speculative.method=ngram looks up in the context."""


def engine_arguments(
    section: EngineSection,
    folder: Path,
    dtype: str,
    tp: int,
    context_length: int,
    kv_cache_gib: float,
    extra: Mapping[str, Any],
    **specific: Any,
) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM`. Raise a UserError if `extra` contains an argument that vLLM does not have or
    that the model determines, or if vLLM does not support the model on this device. `extra` is the section's
    vllm_overrides, and `specific` are arguments for this kind of engine."""
    arguments: dict[str, Any] = dict(
        model=str(folder),
        dtype=dtype,
        tensor_parallel_size=tp,
        max_model_len=context_length,
        kv_cache_memory_bytes=int(kv_cache_gib * 2**30),
        # Chunked prefill rewinds the generator of a seeded request, which torch's CPU generators do not support.
        enable_chunked_prefill=device.on_cuda(),
        # On CPU, compilation takes minutes without a speedup.
        enforce_eager=not device.on_cuda(),
        # Set even for engines without refits, because importing the extension's module patches vLLM in every worker.
        worker_extension_cls="megarl.rollout.vllm.worker_extension.RefitExtension",
        disable_log_stats=True,
        **(dict(gpu_memory_utilization=FREE_SHARE) if device.on_cuda() else {}),
        **specific,
    )
    if linear_attention(completed(read_config(folder))) is not None:
        # The trainer's kernels keep the state in float32, but vLLM's default for Qwen3-Next is the model's dtype.
        arguments["mamba_ssm_cache_dtype"] = "float32"
    required = _required_on_cpu(folder)
    if PIXELS not in specific and (text_model := _text_model(folder)):
        arguments["hf_overrides"] = text_model | arguments.get("hf_overrides", {})
    assert (arguments | required).keys() <= MANAGED[section].keys() | ADJUSTABLE, (
        "config/vllm_arguments.py does not list all arguments"
    )
    assert not MANAGED[section].keys() & extra.keys(), "a config rule must reject these overrides"
    _check_extra(section, extra, required)
    return {**arguments, **required, **extra}


def _check_extra(section: EngineSection, extra: Mapping[str, Any], required: Mapping[str, Any]) -> None:
    for name in required.keys() & extra.keys():
        reason = f"on this device, the model's attention requires {required[name]}"
        raise UserError(f"{section}.vllm_overrides.{name}={extra[name]}: {reason}. Fix: remove {name}")
    known = [field.name for field in dataclasses.fields(EngineArgs)]
    for name in extra.keys() - known:
        near = difflib.get_close_matches(name, known)
        remedy = f"use {' or '.join(near)}" if near else f"remove {name}"
        raise UserError(f"{section}.vllm_overrides.{name}={extra[name]}: not a vLLM engine argument. Fix: {remedy}")


def _text_model(folder: Path) -> dict[str, Any]:
    """Return the override that makes vLLM load only the text model of a multimodal checkpoint."""
    hf_config = read_config(folder)
    return {"architectures": hf_config["architectures"]} if "vision_config" in hf_config else {}


def _required_on_cpu(folder: Path) -> dict[str, Any]:
    """Return the arguments that the model's attention requires on CPU: for latent attention, a backend that supports
    in-place writes of kv_b_proj; for gated delta nets, no prefix cache, which would split prompts as chunked prefill
    does. Raise a UserError if vLLM's CPU build has no kernel for the model."""
    if device.on_cuda():
        return {}
    check_cpu_kernels(folder, hf_config := read_config(folder))
    model = completed(hf_config)
    latent = {} if latent_attention(model) is None else dict(attention_backend="CPU_MLA")
    return latent if linear_attention(model) is None else latent | dict(enable_prefix_caching=False)


def rollout_arguments(
    config: Rollout,
    model_folder: Path,
    dtype: str,
    seed: int,
    returns_routes: bool = False,
    head_dtype: Literal["float32", "model"] = "float32",
    pixels: tuple[int | None, int | None] | None = None,
) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM` for a rollout engine. Raise a UserError in the same cases as
    `engine_arguments`, or if the device does not support rollout.batch_invariant or rollout.quantization.

    Args:
        returns_routes: whether completions contain the experts chosen for each token.
        pixels: data.min_pixels and data.max_pixels; None for an engine without a vision tower.
    """
    if config.batch_invariant and device.capability() < INVARIANT_KERNELS:
        raise UserError(
            "rollout.batch_invariant=true: vLLM's batch-invariant kernels require a GPU with compute capability 9.0 or "
            "higher, such as an H100. Fix: set rollout.batch_invariant=false"
        )
    routes = {}
    if returns_routes:
        # On GPU, vLLM returns routes only with the prefix cache, which is off by default for some models. On CPU,
        # RouteCapture cannot report the routes of cached prefixes.
        on_gpu = dict(enable_return_routed_experts=True, enable_prefix_caching=True)
        routes = on_gpu if device.on_cuda() else dict(enable_prefix_caching=False)
    quantization = {} if config.quantization is None else _quantization(config.quantization, model_folder)
    if is_dequantized(model_folder):
        quantization = {"quantization_config": None} | quantization  # the engine receives the trainer's weights
    return engine_arguments(
        "rollout",
        model_folder,
        dtype,
        config.tp,
        config.context_length,
        config.kv_cache_gib,
        config.vllm_overrides,
        load_format="dummy",
        # Report log-probs of the sampling distribution, after temperature, top-p and top-k.
        logprobs_mode="processed_logprobs",
        max_logprobs=config.top_k or 0,
        max_num_batched_tokens=batched_tokens(config),
        # Use the trainer's head dtype. vLLM's default is the model's dtype.
        hf_overrides={"head_dtype": head_dtype} | quantization,
        # On GPU, only this MoE backend keeps expert weights unpacked, so that refits can write in place.
        moe_backend="triton" if device.on_cuda() else "auto",
        # vLLM has no sleep mode on CPU: sleeping would release no memory.
        enable_sleep_mode=config.sleep and device.on_cuda(),
        seed=seed,
        **routes,
        **({} if pixels is None else vision_arguments(*pixels)),
        **_speculative_arguments(config, model_folder),
    )


def _speculative_arguments(config: Rollout, model_folder: Path) -> dict[str, Any]:
    speculative = config.speculative
    if speculative.method is None:
        return {}
    drafts: dict[str, Any]
    if speculative.method == "mtp":
        # vLLM selects the attention backend of the draft model separately.
        required = _required_on_cpu(model_folder)
        drafts = {name: required[name] for name in ("attention_backend",) if name in required}
    elif speculative.method == "ngram":
        lookup_min, lookup_max = NGRAM_LENGTHS
        drafts = dict(prompt_lookup_min=lookup_min, prompt_lookup_max=lookup_max)
    else:
        assert speculative.path is not None, "a config rule must reject a draft model without a path"
        folder = resolve(speculative.path, key="rollout.speculative.path")
        drafts = dict(model=str(folder))
    common = dict(method=speculative.method, num_speculative_tokens=speculative.tokens)
    # Count drafts per request, because training and evaluation requests may run at the same time.
    return dict(speculative_config=common | drafts, per_request_spec_decode_metrics="summary")


def _quantization(name: str, model_folder: Path) -> dict[str, Any]:
    """Return the hf_overrides for an engine that receives quantized weights."""
    hf_config = read_config(model_folder)
    mixture = experts(completed(hf_config))
    if not device.on_cuda() and mixture is not None and any(mixture.layers):
        raise UserError(
            f"rollout.quantization={name}: {model_folder} has experts, but vLLM's CPU kernels for quantized experts do "
            "not support refits. Fix: set rollout.quantization=null, or run this model on GPUs"
        )
    return {"quantization_config": quantization_config(hf_config)}
