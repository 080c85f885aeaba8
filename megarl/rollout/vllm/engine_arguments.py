"""The arguments that every engine on vLLM is started with, whatever it computes."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm import EngineArgs

from megarl.config.vllm_arguments import ADJUSTABLE, GIVEN, EngineSection
from megarl.core import device
from megarl.core.errors import UserError
from megarl.models.folder import read_config
from megarl.models.huggingface import completed, latent_attention

FREE_SHARE = 0.01
"""The share of a GPU's memory that must be free for vLLM to start, by default nearly all; the KV cache has its given
size. On a GPU that others use too, what fits is known before: see planning/shared_gpu.py."""

CPU_LATENT_SIZE = 576
"""The channels of a token in the cache of DeepSeek-V3's attention: 512 of the latent, 64 with positions."""


def engine_arguments(
    section: EngineSection,
    folder: Path,
    dtype: str,
    tp: int,
    context_length: int,
    kv_cache_gib: float,
    extra: Mapping[str, Any],
    **own: Any,
) -> dict[str, Any]:
    """Returns the arguments that `vllm.LLM` is called with.

    own     arguments of this kind of engine alone
    extra   vllm_overrides of the section, which replace those that are not megarl's alone to give

    Raises UserError for an extra that vLLM does not have or that the model needs otherwise, and for a model that vLLM
    cannot compute on this device.
    """
    given = dict(
        model=str(folder),
        dtype=dtype,
        tensor_parallel_size=tp,
        max_model_len=context_length,
        kv_cache_memory_bytes=int(kv_cache_gib * 2**30),
        # With chunks, vLLM rewinds the generator of a seeded request, which a CPU generator cannot do.
        enable_chunked_prefill=device.on_cuda(),
        # Compiling takes minutes on CPU and gains nothing there.
        enforce_eager=not device.on_cuda(),
        # It is given also where nothing is refitted, since its module installs cpu_support in every worker.
        worker_extension_cls="megarl.rollout.vllm.worker_extension.RefitExtension",
        disable_log_stats=True,
        **(dict(gpu_memory_utilization=FREE_SHARE) if device.on_cuda() else {}),
        **own,
    )
    latent = _latent_attention_arguments(folder)
    assert (given | latent).keys() <= GIVEN[section].keys() | ADJUSTABLE, "config/vllm_arguments.py names them all"
    assert not GIVEN[section].keys() & extra.keys(), "refused by a rule"
    _check_extra(section, extra, latent)
    return given | latent | extra


def _check_extra(section: EngineSection, extra: Mapping[str, Any], latent: Mapping[str, Any]) -> None:
    for name in latent.keys() & extra.keys():
        needed = f"this model's attention is right with {latent[name]} alone, here"
        raise UserError(f"{section}.vllm_overrides.{name}={extra[name]}: {needed}; leave it out")
    known = [field.name for field in dataclasses.fields(EngineArgs)]
    for name in extra.keys() - known:
        near = difflib.get_close_matches(name, known)
        remedy = f"did you mean {' or '.join(near)}?" if near else "leave it out"
        raise UserError(f"{section}.vllm_overrides.{name}={extra[name]}: vLLM has no such engine argument; {remedy}")


def _latent_attention_arguments(folder: Path) -> dict[str, Any]:
    """Returns on CPU the kernel of latent attention that leaves kv_b_proj in its place, to be written into.

    Raises UserError where vLLM has none for the model's latent.
    """
    latent = None if device.on_cuda() else latent_attention(completed(read_config(folder)))
    if latent is None:
        return {}
    size = latent.kv_rank + latent.position_dim
    if size != CPU_LATENT_SIZE:
        raise UserError(
            f"{folder}: kv_lora_rank {latent.kv_rank} + qk_rope_head_dim {latent.position_dim} = {size}, and vLLM's "
            f"CPU build has latent attention for {CPU_LATENT_SIZE} only; run this model on GPUs"
        )
    return dict(attention_backend="CPU_MLA")
