"""Weights in fp8 blocks, against vLLM's own quantiser of whole tensors, bit by bit."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from vllm.utils.deep_gemm import per_block_cast_to_fp8

from megarl.resharding import quantised_copy
from megarl.resharding.execute import execute
from megarl.resharding.families import (
    huggingface_holder,
    megatron_holders,
    quantised_destinations,
    quantised_sources,
    vllm_holders,
)
from megarl.resharding.families.megatron import Coordinates
from megarl.resharding.families.quantised import SCALES, quantization_config
from megarl.resharding.piece import Holder
from megarl.resharding.planning.check import check_plan
from megarl.resharding.planning.planner import make_plan
from megarl.resharding.quantised_copy import QuantisedCopy
from megarl.resharding.transports.local import LocalMemory
from megarl.resharding.transports.transport import view
from tests.published_models import CONFIGS
from tests.unit.resharding.cases import layout_of
from tests.unit.resharding.vllm_world import weights, worker

# Compiled, which is how vLLM has it, it begins with half a minute of a compiler's; the bits are the same.
quantise = per_block_cast_to_fp8._torchdynamo_orig_callable

SIZES = dict(
    hidden_size=512,
    intermediate_size=1536,
    moe_intermediate_size=768,
    num_hidden_layers=2,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=64,
    vocab_size=131,
)
MODELS = {
    "Llama": CONFIGS["Llama-3.1-8B"] | SIZES,
    "Qwen3, experts": CONFIGS["Qwen3-30B-A3B"]
    | SIZES
    | dict(num_experts=4, num_experts_per_tok=2, mlp_only_layers=[0]),
    "DeepSeek-V3": CONFIGS["DeepSeek-V3"]
    | SIZES
    | dict(
        num_key_value_heads=16,
        q_lora_rank=256,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        first_k_dense_replace=1,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
    ),
}
LAYOUTS = {
    "one process": dict(),
    "tp=8": dict(tp=8),
    "tp=2 pp=2 dp=2": dict(tp=2, pp=2, dp=2),
    "tp=8 ep=2 etp=4": dict(tp=8, ep=2, etp=4),
}


def checkpoint(config) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    holder = huggingface_holder(config, "bfloat16")
    return {
        name: (torch.randn(shape, generator=generator) * 0.02).to(getattr(torch, holder.dtypes[name]))
        for name, shape in holder.shapes.items()
    }


def empty(holder: Holder) -> dict[str, torch.Tensor]:
    return {n: torch.zeros(shape, dtype=getattr(torch, holder.dtypes[n])) for n, shape in holder.shapes.items()}


def held(holder: Holder, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = empty(holder)
    for piece in holder.pieces:
        if piece.canonical is not None:
            view(found[piece.local], piece.local_rectangle).copy_(
                view(tensors[piece.canonical], piece.canonical_rectangle)
            )
    return found


class Group:
    """A process group of threads."""

    def __init__(self, size: int):
        self._barrier, self._parts = threading.Barrier(size), []

    def reduce_max(self, tensor: torch.Tensor) -> None:
        self._parts.append(tensor)
        self._barrier.wait(timeout=60)
        largest = torch.stack(self._parts).amax(0)
        self._barrier.wait(timeout=60)
        tensor.copy_(largest)


def copies_of(sources, quantised, layout, tensors) -> dict[str, dict[str, torch.Tensor]]:
    """What each rank sends. Those of a pipeline stage are a group for its dense layers; of experts, those that have
    parts of the same ones."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    places = [Coordinates.of(layout, rank) for rank in range(layout.world_size)]
    dense, experts = [(place.stage,) for place in places], [(place.stage, place.ep_rank) for place in places]
    groups = {key: Group(size) for key, size in Counter(dense + experts).items()}

    def quantise_rank(rank: int) -> dict[str, torch.Tensor]:
        def group_of(parameter: str):
            return experts[rank] if ".mlp.experts." in parameter else dense[rank]

        parameters = held(sources[rank], tensors)
        copy = QuantisedCopy(sources[rank].shard, quantised[rank].shard, shapes, group_of)
        copy.fill(parameters, lambda tensor, group: groups[group].reduce_max(tensor))
        return parameters | copy.tensors

    with ThreadPoolExecutor(layout.world_size) as ranks:
        found = ranks.map(quantise_rank, range(layout.world_size))
        return {source.name: sent for source, sent in zip(sources, found, strict=True)}


@pytest.mark.parametrize(
    ("name", "layout"),
    [(name, layout) for name in MODELS for layout in LAYOUTS if name != "Llama" or "ep" not in layout],
)
def test_engines_and_folder_have_what_vllm_makes_of_whole_tensors(name, layout):
    """Scales included, though the trainer's cuts split blocks."""
    config, layout = MODELS[name], layout_of(**LAYOUTS[layout])
    tensors = checkpoint(config)
    sources = megatron_holders(config, layout, "bfloat16")
    quantised = [replace(holder, node=0) for holder in quantised_sources(config, sources)]
    copies = copies_of(sources, quantised, layout, tensors)
    expected = vllms_own(config, tensors)
    folder = replace(huggingface_holder(config, "bfloat16"), name="folder")
    for holders in (vllm_holders(config, 1, 1, "bfloat16"), vllm_holders(config, 2, 1, "bfloat16"), [folder]):
        targets = [  # each on a node of its own: nothing is handed on
            replace(holder, node=1 + i) for i, holder in enumerate(quantised_destinations(config, holders))
        ]
        plan = make_plan(quantised, targets)
        check_plan(plan, quantised, targets)
        for target in targets:
            found = empty(target)
            execute(plan.into(target.name), found, LocalMemory(copies))
            right = held(target, expected)
            wrong = [name for name in right if not torch.equal(bits(found[name]), bits(right[name]))]
            assert not wrong, f"{target.name}: {wrong}"


def test_blocks_are_handed_on_inside_a_node():
    """Bucket after bucket: what comes from another engine's worker has arrived there before."""
    config, layout = MODELS["DeepSeek-V3"], layout_of(**LAYOUTS["tp=8 ep=2 etp=4"])
    tensors = checkpoint(config)
    sources = quantised_sources(config, megatron_holders(config, layout, "bfloat16"))
    copies = copies_of(megatron_holders(config, layout, "bfloat16"), sources, layout, tensors)
    targets = [replace(h, node=1) for h in quantised_destinations(config, vllm_holders(config, 2, 2, "bfloat16"))]
    plan = make_plan(sources, targets, bucket_bytes=2**18)
    found = [empty(target) for target in targets]
    everybody = [copies[source.name] for source in sources] + found
    handed_on = set()
    for bucket in plan.buckets:
        for link, is_first in [*((link, True) for link in bucket.links), *((link, False) for link in bucket.forwards)]:
            for move in bucket.moves:
                place = move.source if is_first else move.destination
                values = view(everybody[link.source][place.parameter], place.rectangle)
                view(everybody[link.destination][move.destination.parameter], move.destination.rectangle).copy_(values)
                handed_on |= set() if is_first else {values.dtype, move.destination.parameter.endswith(SCALES)}
    assert handed_on >= {torch.float8_e4m3fn, True}
    expected = vllms_own(config, tensors)
    for target, tensors_found in zip(targets, found, strict=True):
        right = held(target, expected)
        assert not [name for name in right if not torch.equal(bits(tensors_found[name]), bits(right[name]))]


@pytest.mark.parametrize("chunk", [1000, 2**24])
def test_what_is_sent_is_quantised_as_in_vllm(monkeypatch, chunk):
    """Matrices of no whole number of blocks, tiny ones, outliers and zeros; chunks that end inside a block; and a
    second time, when smaller weights have taken the place of others."""
    monkeypatch.setattr(quantised_copy, "CHUNK", chunk)
    config = MODELS["Llama"] | dict(hidden_size=200, intermediate_size=300, num_attention_heads=5, head_dim=40)
    config |= dict(num_key_value_heads=5)
    holder = replace(huggingface_holder(config, "bfloat16"), name="folder")
    [sent] = quantised_sources(config, [holder])
    copy = QuantisedCopy(holder.shard, sent.shard, dict(holder.shapes), lambda _: "alone")
    first = checkpoint(config)
    for name in first:
        if "q_proj" in name:
            first[name][::37, ::41] = 3.0e4
        elif "up_proj" in name:
            first[name][:130] = 0.0
        elif "down_proj" in name:  # rounds elsewhere if it is divided by the scale
            first[name][...] = 0.80859375
            first[name][::50, ::50] = 1.078125
    for tensors in (first, {name: tensor * 1e-4 for name, tensor in first.items()}):
        copy.fill(tensors, lambda tensor, group: None)
        expected = vllms_own(config, tensors)
        assert copy.tensors.keys() == expected.keys() - {n for n in tensors if expected[n] is tensors[n]}
        assert not [n for n, tensor in copy.tensors.items() if not torch.equal(bits(tensor), bits(expected[n]))]


def vllms_own(config, tensors) -> dict[str, torch.Tensor]:
    """What vLLM makes of a checkpoint: the linear layers and experts in fp8 blocks."""
    found = {}
    for name, tensor in tensors.items():
        if name.endswith(("proj.weight", "proj_with_mqa.weight")):
            found[name], found[name + SCALES] = quantise(tensor, [128, 128])
        else:
            found[name] = tensor
    return found


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_vllm_loads_a_quantised_checkpoint_to_where_the_holder_has_it(name, tp, tmp_path, monkeypatch):
    """Names, shapes, dtypes and numbers of the model that vLLM's own classes build and load."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)  # else it has no kernel for experts
    config = MODELS[name]
    expected = vllms_own(config, checkpoint(config))
    [*holders] = quantised_destinations(config, vllm_holders(config, tp, 1, "bfloat16"))
    for rank, holder in enumerate(holders):
        with worker(
            tmp_path, config | dict(quantization_config=quantization_config(config)), tp, rank, device="cpu"
        ) as model:
            model.load_weights(iter(expected.items()))
            real = {n: tensor for n, tensor in weights(model).items() if ".attn." not in n}  # gone before it computes
        declared = held(holder, expected)
        assert {n: (t.shape, t.dtype) for n, t in declared.items()} == {n: (t.shape, t.dtype) for n, t in real.items()}
        assert not [n for n, tensor in real.items() if not torch.equal(bits(tensor), bits(declared[n]))], f"rank {rank}"
