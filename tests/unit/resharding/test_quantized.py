"""Weights in fp8 blocks are bitwise equal to the output of vLLM's own quantizer on whole tensors."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from vllm import _custom_ops
from vllm.utils.deep_gemm import per_block_cast_to_fp8

from megarl.models.mtp import add_mtp, num_mtp_layers
from megarl.resharding import quantized_copy
from megarl.resharding.execute import execute
from megarl.resharding.families import (
    huggingface_holder,
    megatron_holders,
    quantized_destinations,
    quantized_sources,
    vllm_holders,
)
from megarl.resharding.families.megatron import Coordinates
from megarl.resharding.families.quantized import SCALES, quantization_config
from megarl.resharding.families.vllm import DRAFTER
from megarl.resharding.piece import Holder
from megarl.resharding.planning.check import check_plan
from megarl.resharding.planning.planner import make_plan
from megarl.resharding.quantized_copy import QuantizedCopy
from megarl.resharding.transports.local import LocalMemory
from megarl.resharding.transports.transport import view
from tests.marks import exhaustive_but
from tests.published_models import CONFIGS
from tests.timing import WAIT_S
from tests.unit.resharding.cases import layout_of
from tests.unit.resharding.vllm_world import SHARED, weights, worker

# Skip vLLM's compilation of this function, which takes half a minute. The uncompiled function returns the same bits.
quantize = per_block_cast_to_fp8._torchdynamo_orig_callable

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
    "GLM-4.6, MTP layer": add_mtp(
        CONFIGS["GLM-4.6"]
        | SIZES
        | dict(first_k_dense_replace=1, n_routed_experts=4, num_experts_per_tok=2, max_position_embeddings=64)
        | dict(num_nextn_predict_layers=1)
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
    parameters = empty(holder)
    for piece in holder.pieces:
        if piece.canonical is not None:
            view(parameters[piece.local], piece.local_rectangle).copy_(
                view(tensors[piece.canonical], piece.canonical_rectangle)
            )
    return parameters


class Group:
    """A process group whose ranks are threads."""

    def __init__(self, size: int):
        self._barrier, self._parts = threading.Barrier(size), []

    def reduce_max(self, tensor: torch.Tensor) -> None:
        self._parts.append(tensor)
        self._barrier.wait(timeout=WAIT_S)
        largest = torch.stack(self._parts).amax(0)
        self._barrier.wait(timeout=WAIT_S)
        tensor.copy_(largest)


def copies_of(sources, quantized, layout, tensors) -> dict[str, dict[str, torch.Tensor]]:
    """Return the tensors that each rank sends.

    The process group of dense layers is the pipeline stage; that of experts contains the ranks with parts of the same
    experts.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    ranks = [Coordinates.of(layout, rank) for rank in range(layout.world_size)]
    dense, experts = [(rank.stage,) for rank in ranks], [(rank.stage, rank.ep_rank) for rank in ranks]
    groups = {key: Group(size) for key, size in Counter(dense + experts).items()}

    def quantize_rank(rank: int) -> dict[str, torch.Tensor]:
        def group_of(parameter: str):
            return experts[rank] if ".mlp.experts." in parameter else dense[rank]

        parameters = held(sources[rank], tensors)
        copy = QuantizedCopy(sources[rank].shard, quantized[rank].shard, shapes, group_of)
        copy.fill(parameters, lambda tensor, group: groups[group].reduce_max(tensor))
        return parameters | copy.tensors

    with ThreadPoolExecutor(layout.world_size) as threads:
        sent = threads.map(quantize_rank, range(layout.world_size))
        return {source.name: tensors for source, tensors in zip(sources, sent, strict=True)}


def engines(config, tp: int) -> list[Holder]:
    """Return the holders of an engine, which drafts tokens if the model keeps its MTP layer."""
    return vllm_holders(config, tp, 1, "bfloat16", drafts=num_mtp_layers(config) > 0)


CASES = [(name, layout) for name in MODELS for layout in LAYOUTS if name != "Llama" or "ep" not in layout]
KEPT = (
    ("Llama", "one process"),
    ("Llama", "tp=2 pp=2 dp=2"),
    ("Qwen3, experts", "tp=8 ep=2 etp=4"),
    ("DeepSeek-V3", "tp=8"),
    ("GLM-4.6, MTP layer", "tp=2 pp=2 dp=2"),
)


@pytest.mark.parametrize(
    ("name", "layout"),
    [pytest.param(*case, marks=() if case in KEPT else pytest.mark.exhaustive) for case in CASES],
)
def test_engines_and_folder_match_vllms_quantizer(name, layout):
    """Weights and scales match, even where shard boundaries of the trainer split blocks."""
    config, layout = MODELS[name], layout_of(**LAYOUTS[layout])
    tensors = checkpoint(config)
    sources = megatron_holders(config, layout, "bfloat16")
    quantized = [replace(holder, node=0) for holder in quantized_sources(config, sources)]
    copies = copies_of(sources, quantized, layout, tensors)
    expected = quantized_by_vllm(config, tensors)
    folder = replace(huggingface_holder(config, "bfloat16"), name="folder")
    for holders in (engines(config, 1), engines(config, 2), [folder]):
        targets = [  # each on its own node, so that nothing is forwarded
            replace(holder, node=1 + i) for i, holder in enumerate(quantized_destinations(config, holders))
        ]
        plan = make_plan(quantized, targets)
        check_plan(plan, quantized, targets)
        for target in targets:
            actual = empty(target)
            execute(plan.into(target.name), actual, LocalMemory(copies))
            reference = held(target, expected)
            wrong = [name for name in reference if not torch.equal(bits(actual[name]), bits(reference[name]))]
            assert not wrong, f"{target.name}: {wrong}"


def test_blocks_are_forwarded_inside_a_node():
    """The plan is executed bucket by bucket, so that elements have arrived before they are forwarded."""
    config, layout = MODELS["DeepSeek-V3"], layout_of(**LAYOUTS["tp=8 ep=2 etp=4"])
    tensors = checkpoint(config)
    sources = quantized_sources(config, megatron_holders(config, layout, "bfloat16"))
    copies = copies_of(megatron_holders(config, layout, "bfloat16"), sources, layout, tensors)
    targets = [replace(h, node=1) for h in quantized_destinations(config, vllm_holders(config, 2, 2, "bfloat16"))]
    plan = make_plan(sources, targets, bucket_bytes=2**18)
    received = [empty(target) for target in targets]
    all_parameters = [copies[source.name] for source in sources] + received
    forwarded = set()
    for bucket in plan.buckets:
        for link, is_first in [*((link, True) for link in bucket.links), *((link, False) for link in bucket.forwards)]:
            for move in bucket.moves:
                place = move.source if is_first else move.destination
                values = view(all_parameters[link.source][place.parameter], place.rectangle)
                view(all_parameters[link.destination][move.destination.parameter], move.destination.rectangle).copy_(
                    values
                )
                forwarded |= set() if is_first else {values.dtype, move.destination.parameter.endswith(SCALES)}
    assert forwarded >= {torch.float8_e4m3fn, True}
    expected = quantized_by_vllm(config, tensors)
    for target, actual in zip(targets, received, strict=True):
        reference = held(target, expected)
        assert not [name for name in reference if not torch.equal(bits(actual[name]), bits(reference[name]))]


@pytest.mark.parametrize("chunk", [1000, 2**24])
def test_quantized_copy_matches_vllms_quantizer(monkeypatch, chunk):
    """Covers incomplete blocks, outliers, zeros, chunks that end inside a block, and a refill with smaller weights."""
    monkeypatch.setattr(quantized_copy, "CHUNK", chunk)
    config = MODELS["Llama"] | dict(hidden_size=200, intermediate_size=300, num_attention_heads=5, head_dim=40)
    config |= dict(num_key_value_heads=5)
    holder = replace(huggingface_holder(config, "bfloat16"), name="folder")
    [sent] = quantized_sources(config, [holder])
    copy = QuantizedCopy(holder.shard, sent.shard, dict(holder.shapes), lambda _: "alone")
    first = checkpoint(config)
    for name in first:
        if "q_proj" in name:
            first[name][::37, ::41] = 3.0e4
        elif "up_proj" in name:
            first[name][:130] = 0.0
        elif "down_proj" in name:  # dividing by the scale would round differently
            first[name][...] = 0.80859375
            first[name][::50, ::50] = 1.078125
    for tensors in (first, {name: tensor * 1e-4 for name, tensor in first.items()}):
        copy.fill(tensors, lambda tensor, group: None)
        expected = quantized_by_vllm(config, tensors)
        assert copy.tensors.keys() == expected.keys() - {n for n in tensors if expected[n] is tensors[n]}
        assert not [n for n, tensor in copy.tensors.items() if not torch.equal(bits(tensor), bits(expected[n]))]


def quantized_by_vllm(config, tensors) -> dict[str, torch.Tensor]:
    """Quantize the linear layers and experts of a checkpoint with vLLM's quantizer."""
    result = {}
    for name, tensor in tensors.items():
        if name.endswith(("proj.weight", "proj_with_mqa.weight")) and not name.endswith("eh_proj.weight"):
            result[name], result[name + SCALES] = quantize(tensor, [128, 128])
        else:
            result[name] = tensor
    return result


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("tp", exhaustive_but([1, 2], 2))
@pytest.mark.parametrize("name", MODELS)
def test_vllm_loads_quantized_checkpoints_where_declared(name, tp, tmp_path, monkeypatch):
    """Compares names, shapes, dtypes and elements with the model that vLLM's own classes build and load."""
    # On processors without AMX or AVX-512, vLLM finds no kernels. This test needs none, because it does not run them.
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    monkeypatch.setattr(_custom_ops, "_supports_cpu_fp8_w8a16", True)
    config = MODELS[name]
    expected = quantized_by_vllm(config, checkpoint(config))
    described = config | dict(quantization_config=quantization_config(config))
    models = {"": False} | ({DRAFTER: True} if num_mtp_layers(config) else {})
    for rank, holder in enumerate(quantized_destinations(config, engines(config, tp))):
        real = {}
        for prefix, drafts in models.items():
            with worker(tmp_path, described, tp, rank, device="cpu", drafts=drafts) as model:
                model.load_weights(iter(expected.items()))
                # vLLM removes the parameters of `.attn.` after loading.
                kept = {n: tensor for n, tensor in weights(model).items() if ".attn." not in n}
            real |= {prefix + n: tensor for n, tensor in kept.items() if not (drafts and n.endswith(SHARED))}
        declared = held(holder, expected)
        assert {n: (t.shape, t.dtype) for n, t in declared.items()} == {n: (t.shape, t.dtype) for n, t in real.items()}
        assert not [n for n, tensor in real.items() if not torch.equal(bits(tensor), bits(declared[n]))], f"rank {rank}"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nonfinite_weights_are_refused(value):
    config, layout = MODELS["Llama"], layout_of(tp=2)
    tensors = checkpoint(config)
    name = next(name for name in tensors if name.endswith("layers.0.self_attn.q_proj.weight"))
    tensors[name][130, 3] = value
    sources = megatron_holders(config, layout, "bfloat16")
    quantized = [replace(holder, node=0) for holder in quantized_sources(config, sources)]
    with pytest.raises(
        RuntimeError, match=f"^{name}: a weight in the fp8 block at row 128, column 0 is infinite or NaN"
    ):
        copies_of(sources, quantized, layout, tensors)
