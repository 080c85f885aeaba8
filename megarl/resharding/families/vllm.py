"""Describe the weights in a vLLM worker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.config.divisors import divisibility_error, divisors
from megarl.core.errors import UserError
from megarl.models.huggingface import replicates_kv_heads, weights_dtype
from megarl.models.shape import ModelShape
from megarl.resharding.families import vision
from megarl.resharding.families.canonical import EMBEDDING, FINAL_NORM, HEAD, Canonical
from megarl.resharding.families.mtp import SEPARATE_ENGINE, is_separate
from megarl.resharding.families.shard_builder import ShardBuilder, Share
from megarl.resharding.families.tiling import Padded, Whole
from megarl.resharding.piece import Holder, Shard

VOCABULARY_MULTIPLE = 64
"""vLLM pads the vocabulary size to a multiple of this value, regardless of tp."""

DRAFTER = "drafter."
"""Name prefix of the draft model's parameters."""

DOWN_PROJECTIONS = ".experts.routed_experts.w2_weight"
"""Name suffix of the stacked expert down-projections; their last axis is the intermediate size."""


GPT_OSS_NAMES = {".self_attn.": ".attn.", "model.embed_tokens.": "model.embedding."}
"""Substrings of gpt-oss's checkpoint names -> their replacements in vLLM."""


def vllm_holder(
    hf_config: Mapping[str, Any],
    tp: int,
    rank: int,
    replica: int,
    dtype: str | None = None,
    expert_parallel: bool = False,
    padded_experts: int | None = None,
    drafts: bool = False,
) -> Holder:
    """Return the holder of tensor-parallel worker `rank` of engine `replica`, named "vllm:{replica}.{rank}". Raise a
    UserError if the model cannot be split evenly over tp workers.

    Args:
        dtype: dtype of the weights, such as "bfloat16". None: the checkpoint's dtype.
        expert_parallel: whether each worker holds whole experts, evenly distributed, instead of a share of each expert.
        padded_experts: size to which a worker zero-pads its share of the experts' intermediate size (None: no padding).
            See `padded_experts`.
        drafts: whether the engine drafts tokens with the model's MTP layers.
    """
    return Holder(f"vllm:{replica}.{rank}", _shard(hf_config, tp, rank, dtype, expert_parallel, padded_experts, drafts))


def vllm_holders(
    hf_config: Mapping[str, Any],
    tp: int,
    replicas: int,
    dtype: str | None = None,
    expert_parallel: bool = False,
    padded_experts: int | None = None,
    drafts: bool = False,
) -> list[Holder]:
    """Return the holders for all workers in all engines. See `vllm_holder` for the arguments."""
    shards = [_shard(hf_config, tp, rank, dtype, expert_parallel, padded_experts, drafts) for rank in range(tp)]
    return [Holder(f"vllm:{replica}.{rank}", shards[rank]) for replica in range(replicas) for rank in range(tp)]


def padded_experts(parameters: Mapping[str, tuple[tuple[int, ...], str]]) -> int | None:
    """Return the size to which a worker pads its share of the experts' intermediate size; None for a dense model.

    vLLM's CPU kernels require certain multiples, so the size is inferred from the parameters of a running worker
    (name -> shape and dtype).
    """
    return next((shape[-1] for name, (shape, _) in parameters.items() if name.endswith(DOWN_PROJECTIONS)), None)


def _shard(
    hf_config: Mapping[str, Any],
    tp: int,
    rank: int,
    dtype: str | None,
    expert_parallel: bool,
    padded: int | None,
    drafts: bool,
) -> Shard:
    canonical = Canonical(hf_config)
    model = canonical.model
    vocab = -(-model.vocab // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    _check_tp(model, vocab, tp, expert_parallel)
    builder, share = ShardBuilder(canonical, dtype or weights_dtype(hf_config)), Share(tp, rank)
    count = model.experts.count if model.experts else 0
    experts, expert_share = range(count), share
    if expert_parallel:
        experts, expert_share = _expert_range(count, tp, rank), Share(1, 0)
    builder.add(_engine_name(model, EMBEDDING), Padded((EMBEDDING,), padded=vocab), share)
    layers = {layer: canonical.layer_prefix(layer) for layer in range(model.num_layers)}
    if drafts:
        layers |= {layer: _drafter_prefix(canonical, layer) for layer in canonical.following_layers().values()}
    for layer, prefix in layers.items():
        for part in canonical.layer_parts(layer):
            part_share = expert_share if part.per_expert else share
            tilings, kept = part.vllm_tilings(experts, padded), "float32" if part.engine_float32 else None
            named = {_engine_name(model, prefix + local): tiling for local, tiling in tilings.items()}
            builder.add_layer(layer, "", named, part_share, kept)
    builder.add(_engine_name(model, FINAL_NORM), Whole((FINAL_NORM,)), share)
    if not model.tied:
        builder.add(_engine_name(model, HEAD), Padded((HEAD,), padded=vocab), share)
    for local, tiling in vision.vllm_tilings(model.vision).items() if model.vision is not None else ():
        builder.add(local, tiling, share)
    return builder.build()


def _drafter_prefix(canonical: Canonical, layer: int) -> str:
    return DRAFTER + (SEPARATE_ENGINE if is_separate(canonical.model) else canonical.layer_prefix(layer))


def _engine_name(model: ModelShape, name: str) -> str:
    """Return a parameter's name in this model's vLLM class, given its usual name in vLLM."""
    for part, replacement in GPT_OSS_NAMES.items() if model.model_type == "gpt_oss" else ():
        name = name.replace(part, replacement)
    return name if model.vision is None else vision.ENGINE_TEXT_PREFIX + name


def _expert_range(count: int, parts: int, part: int) -> range:
    """Return the expert indices in part `part` of `parts`; the first `count % parts` parts have one more expert."""
    each, remainder = divmod(count, parts)
    start = part * each + min(part, remainder)
    return range(start, start + each + (part < remainder))


def _check_tp(model: ModelShape, padded_vocab: int, tp: int, expert_parallel: bool) -> None:
    experts, sizes = model.experts, {"attention heads": model.heads}
    if not experts or not all(experts.layers):
        sizes["MLP rows (intermediate_size)"] = model.intermediate
    if experts and not expert_parallel:
        sizes["MLP rows of an expert"] = experts.intermediate
    if experts:
        sizes["MLP rows of the shared experts"] = experts.shared_intermediate
    if model.linear is not None:
        sizes["key heads of the gated delta nets"] = model.linear.key_heads
    if not replicates_kv_heads(model.model_type):
        sizes["KV heads"] = model.kv_heads
    sizes[f"vocabulary rows (vocab_size padded to a multiple of {VOCABULARY_MULTIPLE})"] = padded_vocab
    for name, size in sizes.items():
        if message := divisibility_error("rollout.tp", tp, name, size, divisors(size)):
            raise UserError(message)
    if experts and expert_parallel and tp > experts.count:
        raise UserError(
            f"rollout.tp={tp}: with expert parallelism, {tp - experts.count} of {tp} workers would have none of the "
            f"{experts.count} experts. Fix: set rollout.tp to at most {experts.count}"
        )
    if model.kv_heads % tp and tp % model.kv_heads:
        raise UserError(
            f"rollout.tp={tp}: {tp} is neither a divisor nor a multiple of num_key_value_heads={model.kv_heads}. Fix: "
            f"set rollout.tp to a divisor or a multiple of {model.kv_heads}"
        )
