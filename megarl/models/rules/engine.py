"""Rules for models that vLLM loads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import gcd
from typing import Any

from megarl.config.divisors import divisors, listed
from megarl.config.schema import Config
from megarl.models.huggingface import (
    FP8_BLOCK,
    experts,
    kv_heads,
    latent_attention,
    linear_attention,
    replicates_kv_heads,
)
from megarl.models.rules.sizes import EXPERT_ROWS, dense_rows, indivisible


def top_k_fits_the_vocabulary(config: Config, hf: Mapping[str, Any]) -> Iterator[str]:
    top_k = config.rollout.top_k
    if top_k is not None and top_k > hf["vocab_size"]:
        yield (
            f"rollout.top_k={top_k}: the model's vocabulary has {hf['vocab_size']} tokens. Fix: set rollout.top_k to "
            f"at most {hf['vocab_size']}, or to null to keep all tokens"
        )


def engine_sizes_divide_by_tp(key: str, tp: int, hf: Mapping[str, Any]) -> Iterator[str]:
    """Require that the engine can split the model over its ranks. With more ranks than KV heads, it replicates KV
    heads, except for gpt-oss."""
    mixture, heads = experts(hf), kv_heads(hf)
    is_divided = tp % heads != 0 or not replicates_kv_heads(hf["model_type"])
    sizes = {"attention heads": hf["num_attention_heads"]} | ({"KV heads": heads} if is_divided else {})
    sizes |= dense_rows(hf) | ({EXPERT_ROWS: mixture.intermediate} if mixture else {}) | _delta_net_heads(hf)
    yield from indivisible(key, tp, sizes, _engine_sizes(hf))


def _engine_sizes(hf: Mapping[str, Any]) -> list[int]:
    mixture, heads = experts(hf), kv_heads(hf)
    rows = [*dense_rows(hf).values(), *([mixture.intermediate] if mixture else []), *_delta_net_heads(hf).values()]
    sizes, has_copies = divisors(gcd(hf["num_attention_heads"], *rows)), replicates_kv_heads(hf["model_type"])
    return [tp for tp in sizes if heads % tp == 0 or (has_copies and tp % heads == 0)]


def _delta_net_heads(hf: Mapping[str, Any]) -> dict[str, int]:
    linear = linear_attention(hf)
    return {"key heads of the gated delta nets": linear.key_heads} if linear else {}


def engine_shards_keep_blocks_whole(config: Config, hf: Mapping[str, Any]) -> Iterator[str]:
    """Require that the shards of a quantized tensor start and end at block boundaries. vLLM rejects shards that split
    blocks, except in layers that merge several tensors, where it uses incorrect scales."""
    tp = config.rollout.tp
    if config.rollout.quantization is None or tp not in _engine_sizes(hf):
        return
    whole_experts = config.rollout.has_whole_experts
    split = {size: _split_blocks(hf, size, whole_experts) for size in (tp, *_engine_sizes(hf))}
    if split[tp]:
        legal = [size for size in _engine_sizes(hf) if not split[size]]
        fix = f"set rollout.tp to {listed(legal)}" if legal else "set rollout.quantization=null"
        if split[tp].keys() == {EXPERT_ROWS} and not whole_experts:
            fix += (
                ", or set rollout.vllm_overrides={enable_expert_parallel: true} so that each expert stays on one rank"
            )
        name, size = next(iter(split[tp].items()))
        yield (
            f"rollout.quantization={config.rollout.quantization}: with rollout.tp={tp} an engine rank has {size} "
            f"{name}, which is not a multiple of the block size {FP8_BLOCK}. Fix: {fix}"
        )


def _split_blocks(hf: Mapping[str, Any], tp: int, whole_experts: bool) -> dict[str, int]:
    """Return the sizes of an engine rank's quantized shards that are not whole blocks: description -> rows or columns.
    Only shards that are split between ranks or merged with others count."""
    return {name: size for name, size in _shard_sizes(hf, tp, whole_experts).items() if size % FP8_BLOCK}


def _shard_sizes(hf: Mapping[str, Any], tp: int, whole_experts: bool) -> dict[str, int]:
    mixture, latent = experts(hf), latent_attention(hf)
    sizes = {"MLP rows": hf["intermediate_size"] // tp} if dense_rows(hf) else {}
    if mixture is not None:
        sizes[EXPERT_ROWS] = mixture.intermediate // (1 if whole_experts else tp)
        sizes["MLP rows of the shared experts"] = mixture.shared_intermediate // tp
    heads = hf["num_attention_heads"]
    if latent is None:
        head_dim = hf["head_dim"] or hf["hidden_size"] // heads
        keys = max(1, kv_heads(hf) // tp)
        return sizes | {"query rows": heads // tp * head_dim, "key rows": keys * head_dim}
    if latent.query_rank is not None:
        sizes["rows of the query latent"] = latent.query_rank
    if tp > 1:
        sizes["query rows"] = heads // tp * (latent.content_dim + latent.position_dim)
        sizes["key and value rows"] = heads // tp * (latent.content_dim + latent.value_dim)
        sizes["columns of the output projection"] = heads // tp * latent.value_dim
    return sizes


def delta_nets_are_not_quantized(config: Config, hf: Mapping[str, Any]) -> Iterator[str]:
    if config.rollout.quantization is not None and linear_attention(hf) is not None:
        yield (
            f"rollout.quantization={config.rollout.quantization}: vLLM's gated delta nets keep the projection to step "
            "sizes and decays unquantized, which refits do not support. Fix: set rollout.quantization=null"
        )


def engine_router_keys_are_present(model: str, hf: Mapping[str, Any]) -> Iterator[str]:
    """Require router keys that vLLM reads but transformers omits, for DeepSeek-V3 and Qwen3-VL."""
    required = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    missing = [key for key in required if key not in hf]
    if hf["model_type"] == "qwen3_vl_moe_text" and "norm_topk_prob" not in hf:
        yield (
            f"{model}: text_config in its config.json lacks norm_topk_prob, which engines require. Fix: add "
            "norm_topk_prob: true to text_config"
        )
    if latent_attention(hf) and missing:
        yield (
            f"{model}: its config.json lacks {' and '.join(missing)}, so the engine would route with softmax and "
            f"without the bias. Fix: add {' and '.join(f'{key}: {required[key]}' for key in missing)} to config.json"
        )
