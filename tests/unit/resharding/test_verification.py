"""Trainer and engine compute equal checksums if and only if their weights are equal, regardless of layouts."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megarl.resharding.families import huggingface_holder, megatron_holders, vllm_holder, vllm_holders
from megarl.resharding.families.vllm import padded_experts
from megarl.resharding.piece import Holder, num_elements
from megarl.resharding.planning.planner import make_plan
from megarl.resharding.verification import (
    NOTHING,
    Checksum,
    Region,
    check_weights,
    checksum,
    regions,
    sample,
    source_checksums,
)
from tests.unit.resharding.cases import NUM_EXPERTS, config_of, configs, layout_of, random_checkpoint, vllm_shard
from tests.unit.resharding.test_round_trip import Weights, resharded

VOCAB_MULTIPLE = 4


def trained(config, layout) -> tuple[list[Holder], Weights]:
    """Return a trainer's ranks and their parameters from a random checkpoint."""
    folder = huggingface_holder(config)
    ranks = megatron_holders(config, layout, vocab_multiple=VOCAB_MULTIPLE)
    return ranks, resharded([folder], {folder.name: random_checkpoint(config)}, ranks)


def expected_of(
    config, ranks: list[Holder], weights: Weights, engines: list[Holder], wanted: list[Region] | None = None
) -> dict[Region, Checksum]:
    """Sum the checksums of all ranks for the wanted regions; by default, for all regions of the engines."""
    plan = make_plan(ranks, [huggingface_holder(config)])
    expected = dict.fromkeys(regions(engines) if wanted is None else wanted, NOTHING)
    for rank in ranks:
        for region, part in source_checksums(list(expected), plan, rank.name, weights[rank.name]).items():
            expected[region] += part
    return expected


@settings(max_examples=5)
@given(configs())
def test_correct_engine_weights_pass(case):
    """The expected weights are computed by plain tensor algebra, without a plan."""
    check_engine_weights(*case)


@pytest.mark.exhaustive
@settings(max_examples=50)
@given(configs())
def test_many_correct_engine_weights_pass(case):
    check_engine_weights(*case)


def check_engine_weights(config, layout, tp):
    ranks, weights = trained(config, layout)
    engines = vllm_holders(config, tp, replicas=1)
    expected = expected_of(config, ranks, weights, engines)
    found = {}
    for rank, holder in enumerate(engines):
        found |= check_weights(holder, vllm_shard(config, random_checkpoint(config), tp, rank), expected)
    assert found == dict(enumerate(checksum.value for checksum in expected.values())), "an engine has every region"


@pytest.mark.exhaustive
@settings(max_examples=25)
@given(configs(), st.integers(1, 40))
def test_sample_of_correct_engine_weights_passes(case, num_elements):
    config, layout, tp = case
    ranks, weights = trained(config, layout)
    engines = vllm_holders(config, tp, replicas=1)
    wanted = sample(regions(engines), 1000, num_elements)
    expected = expected_of(config, ranks, weights, engines, wanted)
    for rank, holder in enumerate(engines):
        check_weights(holder, vllm_shard(config, random_checkpoint(config), tp, rank), expected)


@pytest.mark.exhaustive
@settings(max_examples=25)
@given(configs(), st.integers(0, 5))
def test_expert_padding_is_written_and_verified(case, extra):
    """vLLM's CPU kernels require experts padded to more rows and columns, in every layout. Plans for gpt-oss, whose
    gates and ups alternate, do not support padding."""
    config, layout, tp = case
    assume(config["model_type"] != "gpt_oss")
    ranks, weights = trained(config, layout)
    for rank in range(tp):
        params = with_padded_experts(vllm_shard(config, random_checkpoint(config), tp, rank), extra)
        padded = padded_experts({name: (tuple(tensor.shape), "float32") for name, tensor in params.items()})
        engine = vllm_holder(config, tp, rank, 0, padded_experts=padded)
        written = resharded(ranks, weights, [engine])[engine.name]
        assert written.keys() == params.keys() and all(torch.equal(written[name], params[name]) for name in params)
        expected = expected_of(config, ranks, weights, [engine])
        check_weights(engine, written, expected)
        if padded is not None and extra:
            stack = next(name for name in params if name.endswith("w2_weight"))
            written[stack][0, -1] = 1.0
            with pytest.raises(RuntimeError, match=f"padding of vllm:0.{rank} {stack} is not zero"):
                check_weights(engine, written, expected)


def with_padded_experts(params: Weights, extra: int) -> Weights:
    """Pad the stacked expert weights as vLLM's CPU build does."""
    padded = dict(params)
    for name, stack in params.items():
        if name.endswith("w2_weight"):
            padded[name] = torch.nn.functional.pad(stack, (0, extra))
        elif name.endswith("w13_weight"):
            gates_and_ups = stack.view(NUM_EXPERTS, 2, -1, stack.shape[-1])
            padded[name] = torch.nn.functional.pad(gates_and_ups, (0, 0, 0, extra)).flatten(0, 2)
    return padded


CONFIG = config_of(num_key_value_heads=2)
LAYOUT = layout_of(tp=2, pp=2)
QKV, UP = "model.layers.1.self_attn.qkv_proj.weight", "model.layers.1.mlp.gate_up_proj.weight"


def swap_rows(tensor: torch.Tensor) -> None:
    tensor[[0, 1]] = tensor[[1, 0]]


def one_bit(tensor: torch.Tensor) -> None:
    tensor.view(torch.int32)[1, 2] ^= 1


def swap_halves(tensor: torch.Tensor) -> None:
    tensor.copy_(torch.cat(tensor.chunk(2)[::-1]))


@pytest.mark.parametrize(
    ("parameter", "damage", "region", "count"),
    [
        (QKV, swap_rows, "model.layers.1.self_attn.q_proj.weight[6:12, 0:12]", 1),
        (QKV, one_bit, "model.layers.1.self_attn.q_proj.weight[6:12, 0:12]", 1),
        (UP, swap_halves, "model.layers.1.mlp.gate_proj.weight[9:18, 0:12]", 2),
        ("model.norm.weight", torch.Tensor.neg_, "model.norm.weight[0:12]", 1),
    ],
)
def test_mismatch_names_the_tensor_and_both_sides(parameter, damage, region, count):
    ranks, weights = trained(CONFIG, LAYOUT)
    engines = vllm_holders(CONFIG, 2, replicas=2)
    expected = expected_of(CONFIG, ranks, weights, engines)
    params = vllm_shard(CONFIG, random_checkpoint(CONFIG), 2, rank=1)
    damage(params[parameter])
    with pytest.raises(RuntimeError) as error:
        check_weights(engines[3], params, expected)
    match = re.fullmatch(
        r"engine and trainer weights differ in (\d+) regions. The first is (.*) \(float32\): checksum (\w{16}) in "
        r"vllm:1.1 (\S+), expected (\w{16}) in megatron:\d chunk0\S+(, megatron:\d chunk0\S+)*\. Fix: .*",
        str(error.value),
    )
    assert match, error.value
    assert (int(match[1]), match[2], match[4]) == (count, region, parameter)
    assert match[3] != match[5]


def test_stale_engine_weights_differ_in_a_sample():
    """The trainer is one update ahead of the engine."""
    ranks, weights = trained(CONFIG, LAYOUT)
    [engine] = vllm_holders(CONFIG, 1, replicas=1)
    wanted = sample(regions([engine]), 4, 10)
    assert len(wanted) == 4 and all(num_elements(region.rectangle) <= 10 for region in wanted)
    assert wanted == sample(regions([engine]), 4, 10), "the same elements every time"
    params = vllm_shard(CONFIG, random_checkpoint(CONFIG), 1, rank=0)
    check_weights(engine, params, expected_of(CONFIG, ranks, weights, [engine], wanted))
    updated = {rank: {name: weight + 1e-6 for name, weight in part.items()} for rank, part in weights.items()}
    with pytest.raises(RuntimeError, match=r"engine and trainer weights differ in 4 regions. The first is "):
        check_weights(engine, params, expected_of(CONFIG, ranks, updated, [engine], wanted))


def test_nonzero_padding_is_detected():
    ranks, weights = trained(CONFIG, LAYOUT)
    [engine] = vllm_holders(CONFIG, 1, replicas=1)
    params = vllm_shard(CONFIG, random_checkpoint(CONFIG), 1, rank=0)
    params["lm_head.weight"][-1] = 1.0
    with pytest.raises(RuntimeError, match=r"padding of vllm:0.0 lm_head.weight is not zero"):
        check_weights(engine, params, expected_of(CONFIG, ranks, weights, [engine]))


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 40), st.sampled_from([torch.float32, torch.bfloat16]))
def test_checksums_of_parts_add_up(rows, columns, cut, dtype):
    tensor = torch.randn(rows, columns).to(dtype)
    cut = min(cut, rows)
    above = checksum(tensor[:cut], ((5, 5 + cut), (7, 7 + columns))) if cut else 0
    below = checksum(tensor[cut:], ((5 + cut, 5 + rows), (7, 7 + columns))) if cut < rows else 0
    whole = checksum(tensor, ((5, 5 + rows), (7, 7 + columns)))
    assert (above + below) % 2**64 == whole
    assert checksum(tensor, ((6, 6 + rows), (7, 7 + columns))) != whole


def test_checksum_of_a_tensor_larger_than_a_chunk():
    tensor = torch.randn(2500, 1000)
    halves = [checksum(tensor[i : i + 1250], ((i, i + 1250), (0, 1000))) for i in (0, 1250)]
    assert checksum(tensor, ((0, 2500), (0, 1000))) == sum(halves) % 2**64
