"""Resharding of random models between random layouts equals plain tensor algebra, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from megarl.config.model_schema import Layout
from megarl.resharding.execute import execute
from megarl.resharding.families import huggingface_holder, megatron_holder, vllm_holder
from megarl.resharding.families.megatron import chunk_layers
from megarl.resharding.piece import Holder
from megarl.resharding.planning.check import check_plan
from megarl.resharding.planning.planner import make_plan
from megarl.resharding.transports.local import LocalMemory
from tests.unit.resharding.cases import NUM_EXPERTS, configs, layout_of, megatron_shard, random_checkpoint, vllm_shard

VOCAB_MULTIPLE = 4

Weights = dict[str, dict[str, torch.Tensor]]
"""holder name -> parameter -> tensor."""


def resharded(sources: list[Holder], weights: Weights, destinations: list[Holder]) -> Weights:
    """Execute a checked plan into tensors of NaN and return the weights of the destinations."""
    plan = make_plan(sources, destinations)
    check_plan(plan, sources, destinations)
    written = {}
    for holder in destinations:
        tensors = {name: torch.full(shape, torch.nan) for name, shape in holder.shapes.items()}
        num_bytes = execute(plan.into(holder.name), tensors, LocalMemory(weights))
        assert num_bytes == sum(tensor.nbytes for tensor in tensors.values())
        written[holder.name] = tensors
    return written


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(actual[name], expected[name])]
    assert not different


def experts_of(layout: Layout, rank: int) -> tuple[range, int, int]:
    """Return the rank's expert indices, the expert tensor-parallel size and the rank in it, from the stage's grid."""
    stage_size = layout.tp * layout.cp * layout.dp
    grid = torch.arange(stage_size).reshape(-1, layout.ep, layout.expert_tp)
    [[_, ep_rank, etp_rank]] = (grid == rank % stage_size).nonzero().tolist()
    count = NUM_EXPERTS // layout.ep
    return range(ep_rank * count, (ep_rank + 1) * count), layout.expert_tp, etp_rank


@settings(max_examples=10)
@given(configs())
def test_checkpoint_to_megatron_and_back_and_to_engines(case):
    check_round_trip(*case)


@pytest.mark.exhaustive
@settings(max_examples=100)
@given(configs())
def test_many_checkpoints_to_megatron_and_back_and_to_engines(case):
    check_round_trip(*case)


def check_round_trip(config, layout, vllm_tp):
    checkpoint = random_checkpoint(config)
    folder = huggingface_holder(config)
    assert {name: tuple(tensor.shape) for name, tensor in checkpoint.items()} == folder.shapes

    ranks = [megatron_holder(config, layout, r, vocab_multiple=VOCAB_MULTIPLE) for r in range(layout.world_size)]
    trained = resharded([folder], {folder.name: checkpoint}, ranks)
    virtual_stages = chunk_layers(config["num_hidden_layers"], layout)
    for rank, holder in enumerate(ranks):
        stage = rank // (layout.tp * layout.dp)
        expected = megatron_shard(
            config,
            checkpoint,
            layout.tp,
            rank % layout.tp,
            [stages[stage] for stages in virtual_stages],
            stage == 0,
            stage == layout.pp - 1,
            VOCAB_MULTIPLE,
            experts_of(layout, rank),
        )
        assert_same(trained[holder.name], expected)

    assert_same(resharded(ranks, trained, [folder])[folder.name], checkpoint)

    workers = [vllm_holder(config, vllm_tp, rank, replica) for replica in range(2) for rank in range(vllm_tp)]
    engines = resharded(ranks, trained, workers)
    for replica in range(2):
        for rank in range(vllm_tp):
            assert_same(engines[f"vllm:{replica}.{rank}"], vllm_shard(config, checkpoint, vllm_tp, rank))


@settings(max_examples=25)
@given(configs())
def test_megatron_to_another_megatron_layout_is_exact(case):
    config, layout, _ = case
    etp = 1 if config["model_type"] == "gpt_oss" else None
    target_layout = layout_of(tp=config["num_key_value_heads"] if layout.tp == 1 else 1, etp=etp)
    divided = "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"
    for key in (*divided, "linear_num_key_heads", "linear_num_value_heads"):
        config[key] *= target_layout.tp
    folder = huggingface_holder(config)
    weights = {folder.name: random_checkpoint(config)}
    ranks = [megatron_holder(config, layout, r, vocab_multiple=VOCAB_MULTIPLE) for r in range(layout.world_size)]
    targets = [megatron_holder(config, target_layout, r, vocab_multiple=6) for r in range(target_layout.tp)]
    through = resharded(ranks, resharded([folder], weights, ranks), targets)
    for name, tensors in resharded([folder], weights, targets).items():
        assert_same(through[name], tensors)
