"""Rules for the layout in which Megatron holds a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import gcd
from typing import Any

from megarl.config.divisors import divisors, listed, quotient
from megarl.config.model_schema import Placed, layout_key
from megarl.config.schema import Config
from megarl.models.huggingface import experts, kv_heads, linear_attention
from megarl.models.rules.model_path import path_of
from megarl.models.rules.sizes import EXPERT_ROWS, dense_rows, indivisible


def sizes_divide_by_tp(config: Config, placed: Placed, hf: Mapping[str, Any]) -> Iterator[str]:
    sizes = {"attention heads": hf["num_attention_heads"], "KV heads": kv_heads(hf)} | dense_rows(hf)
    legal = divisors(gcd(*sizes.values()))
    yield from indivisible(f"{layout_key(placed)}.tp", placed.layout.tp, sizes, legal)


def delta_net_heads_divide_by_tp_and_cp(config: Config, placed: Placed, hf: Mapping[str, Any]) -> Iterator[str]:
    """Require that the key heads of gated delta nets split evenly: context-parallel ranks exchange tokens for heads."""
    linear, layout, key = linear_attention(hf), placed.layout, layout_key(placed)
    ranks = layout.tp * layout.cp
    if linear is not None and linear.key_heads % ranks:
        yield (
            f"{key}.tp={layout.tp}, cp={layout.cp}: {linear.key_heads} key heads of the gated delta nets "
            f"cannot be split over tp x cp = {layout.tp} x {layout.cp} = {ranks} ranks. Fix: set {key}.tp and "
            f"{key}.cp so that their product is {listed(divisors(linear.key_heads))}"
        )


def experts_divide_by_ep(config: Config, placed: Placed, hf: Mapping[str, Any]) -> Iterator[str]:
    key, ep, mixture = f"{layout_key(placed)}.ep", placed.layout.ep, experts(hf)
    if mixture is not None:
        yield from indivisible(key, ep, {"experts": mixture.count}, divisors(mixture.count))
    elif ep != 1:
        yield f"{key}={ep}: {path_of(config, placed)} has no experts. Fix: set {key}=1"


def expert_mlps_divide_by_tp(config: Config, placed: Placed, hf: Mapping[str, Any]) -> Iterator[str]:
    mixture, layout, keys = experts(hf), placed.layout, layout_key(placed)
    if mixture is not None:
        rows, shared = mixture.intermediate, mixture.shared_intermediate
        key = f"{keys}.tp" if layout.etp is None else f"{keys}.etp"
        yield from indivisible(key, layout.expert_tp, {EXPERT_ROWS: rows}, divisors(rows))
        sizes = {"MLP rows of the shared experts": shared} if shared else {}
        yield from indivisible(f"{keys}.tp", layout.tp, sizes, divisors(shared))


def expert_biases_require_whole_experts(config: Config, placed: Placed, hf: Mapping[str, Any]) -> Iterator[str]:
    """Require etp=1 for experts with biases. Otherwise, each rank with a part of an expert would add the bias."""
    mixture, layout, keys = experts(hf), placed.layout, layout_key(placed)
    if mixture is not None and mixture.is_interleaved and layout.expert_tp > 1:
        parallel = f" and {keys}.ep to at least 2, or set {keys}.tp=1" if layout.ep == 1 else ""
        yield (
            f"{keys}.etp={layout.expert_tp}: the experts have biases, which Megatron does not support in "
            f"sharded experts. Fix: set {keys}.etp=1{parallel}"
        )


def experts_and_tensor_parallel_need_sequence_parallel(
    config: Config, placed: Placed, hf: Mapping[str, Any]
) -> Iterator[str]:
    key, layout = layout_key(placed), placed.layout
    if layout.tp > 1 and not layout.sequence_parallel and experts(hf) is not None:
        yield (
            f"{key}.tp={layout.tp}, sequence_parallel=false: every rank would dispatch all tokens to the "
            f"experts, which Megatron rejects. Fix: set {key}.sequence_parallel=true"
        )


def layers_tile_the_stages(config: Config, placed: Placed, hf: Mapping[str, Any]) -> Iterator[str]:
    """Require that the remaining layers split evenly over the stages without an explicit size, at least one each, and
    that the layers of each stage split evenly over its virtual stages."""
    key, layout, num_layers = layout_key(placed), placed.layout, hf["num_hidden_layers"]
    uneven = {name: layers for name, layers in layout.uneven_stages.items() if layers is not None}
    rest, stages = num_layers - sum(uneven.values()), layout.pp - len(uneven)
    if (rest == 0) if stages == 0 else (rest >= stages and rest % stages == 0):
        sizes = uneven | ({"the other stages": rest // stages} if stages else {})
        named = {f"layers of a pipeline stage ({name})": layers for name, layers in sizes.items()}
        legal = divisors(gcd(*sizes.values()))
        yield from indivisible(f"{key}.vpp", layout.vpp, named, legal)[:1]
        return
    subtracted = "".join(f" - {layers}" for layers in uneven.values())
    keys = "".join(f", {name}={layers}" for name, layers in uneven.items())
    difference = f"{num_layers}{subtracted} = {rest}" if uneven else f"{num_layers}"
    arithmetic = f" ({quotient(rest, stages)})" if stages > 0 else ""
    yield (
        f"{key}.pp={layout.pp}{keys}: {num_layers} layers cannot be split evenly over the stages: {difference} "
        f"layers over {stages} {'other ' if uneven else ''}{'stage' if stages == 1 else 'stages'}{arithmetic}. Fix: "
        f"{_stage_fix(layout.pp, num_layers)}"
    )


def _stage_fix(pp: int, num_layers: int) -> str:
    fix = f"set pp to {listed(divisors(num_layers))} with first_stage_layers=null and last_stage_layers=null"
    per_stage = -(-num_layers // pp)
    last = num_layers - (pp - 1) * per_stage
    if pp in divisors(num_layers) or last < 1:
        return fix
    return f"{fix}, or last_stage_layers={last} alone ({pp - 1} x {per_stage} + {last} = {num_layers})"
