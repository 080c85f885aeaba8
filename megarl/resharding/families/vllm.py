"""The weights of a worker of a vLLM engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.config.divisors import divisors, does_not_divide
from megarl.core.errors import UserError
from megarl.models.huggingface import weights_dtype
from megarl.models.shape import ModelShape
from megarl.resharding.families.canonical import EMBEDDING, FINAL_NORM, HEAD, Canonical
from megarl.resharding.families.shard_builder import ShardBuilder, Share
from megarl.resharding.families.tiling import Padded, Whole
from megarl.resharding.piece import Holder, Shard

VOCABULARY_MULTIPLE = 64
"""The multiple to which vLLM pads the vocabulary, whatever tp is."""

DOWN_PROJECTIONS = ".experts.routed_experts.w2_weight"
"""The end of the name of a stack of experts' down-projections, whose last axis is the intermediate size."""


def vllm_holder(
    hf_config: Mapping[str, Any],
    tp: int,
    rank: int,
    replica: int,
    dtype: str | None = None,
    expert_parallel: bool = False,
    padded_experts: int | None = None,
) -> Holder:
    """Returns the holder of tensor-parallel worker `rank` of engine `replica`, named "vllm:{replica}.{rank}".

    dtype            of the weights, such as "bfloat16" (None: the checkpoint's)
    expert_parallel  whether workers have whole experts, in runs as equal as can be, not a share of each expert
    padded_experts   the size to which a worker pads its share of the experts' intermediate size with zeros (None: it
                     does not), see `padded_experts`

    Raises UserError where the model does not divide by tp.
    """
    return Holder(f"vllm:{replica}.{rank}", _shard(hf_config, tp, rank, dtype, expert_parallel, padded_experts))


def vllm_holders(
    hf_config: Mapping[str, Any],
    tp: int,
    replicas: int,
    dtype: str | None = None,
    expert_parallel: bool = False,
    padded_experts: int | None = None,
) -> list[Holder]:
    """Returns the holders of all workers of all engines; the arguments are those of `vllm_holder`."""
    shards = [_shard(hf_config, tp, rank, dtype, expert_parallel, padded_experts) for rank in range(tp)]
    return [Holder(f"vllm:{replica}.{rank}", shards[rank]) for replica in range(replicas) for rank in range(tp)]


def padded_experts(parameters: Mapping[str, tuple[tuple[int, ...], str]]) -> int | None:
    """Returns the size to which a worker with these parameters (name -> shape and dtype) has padded its share of the
    experts' intermediate size, None without experts. Kernels of vLLM's CPU build ask for multiples of their own, which
    only the running engine knows."""
    return next((shape[-1] for name, (shape, _) in parameters.items() if name.endswith(DOWN_PROJECTIONS)), None)


def _shard(
    hf_config: Mapping[str, Any],
    tp: int,
    rank: int,
    dtype: str | None,
    expert_parallel: bool,
    padded: int | None,
) -> Shard:
    canonical = Canonical(hf_config)
    model = canonical.model
    vocab = -(-model.vocab // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    _check_tp(model, vocab, tp, expert_parallel)
    builder, share = ShardBuilder(canonical, dtype or weights_dtype(hf_config)), Share(tp, rank)
    count = model.experts.count if model.experts else 0
    experts, expert_share = range(count), share
    if expert_parallel:
        experts, expert_share = _run(count, tp, rank), Share(1, 0)
    builder.add(EMBEDDING, Padded((EMBEDDING,), padded=vocab), share)
    for layer in range(model.num_layers):
        for part in canonical.layer_parts(layer):
            cut = expert_share if part.per_expert else share
            builder.add_layer(layer, canonical.layer_prefix(layer), part.vllm_tilings(experts, padded), cut)
    builder.add(FINAL_NORM, Whole((FINAL_NORM,)), share)
    if not model.tied:
        builder.add(HEAD, Padded((HEAD,), padded=vocab), share)
    return builder.build()


def _run(count: int, parts: int, part: int) -> range:
    """Returns the numbers in run `part` of `parts`, of which the first `count % parts` have one more than the
    others."""
    each, more = divmod(count, parts)
    start = part * each + min(part, more)
    return range(start, start + each + (part < more))


def _check_tp(model: ModelShape, padded_vocab: int, tp: int, expert_parallel: bool) -> None:
    experts = model.experts
    dense = {} if experts and all(experts.layers) else {"intermediate_size": model.intermediate}
    mixed = {"of the experts' intermediate size": experts.intermediate} if experts and not expert_parallel else {}
    shared = {"of the shared experts' intermediate size": experts.shared_intermediate} if experts else {}
    sizes = {
        "num_attention_heads": model.heads,
        **dense,
        **mixed,
        **shared,
        f"of vocab_size, padded to a multiple of {VOCABULARY_MULTIPLE},": padded_vocab,
    }
    for name, size in sizes.items():
        if message := does_not_divide("rollout.tp", tp, name, size, divisors(size)):
            raise UserError(message)
    if experts and expert_parallel and tp > experts.count:
        raise UserError(
            f"rollout.tp={tp}: with whole experts on each worker, some of {tp} would have none of the {experts.count}; "
            f"choose at most {experts.count}"
        )
    if model.kv_heads % tp and tp % model.kv_heads:
        raise UserError(
            f"rollout.tp={tp}: num_key_value_heads {model.kv_heads} neither divides by {tp} nor divides it; "
            "choose a divisor or a multiple"
        )
