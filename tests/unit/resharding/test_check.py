"""Defects planted into a good plan: each must be found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megarl.resharding.check import PlanError, check_plan
from megarl.resharding.families import megatron_holder, vllm_holder
from megarl.resharding.plan import Fill, Plan, make_plan
from tests.unit.resharding.cases import config_of, layout_of

CONFIG = config_of(num_attention_heads=4, num_key_value_heads=4, intermediate_size=16, vocab_size=37)
SOURCES = [megatron_holder(CONFIG, layout_of(tp=4), rank) for rank in range(4)]
DESTINATIONS = [vllm_holder(CONFIG, 2, rank, 0) for rank in range(2)]
PLAN = make_plan(SOURCES, DESTINATIONS)


def position(parameter: str, destination: str = "vllm:0.0") -> int:
    return next(
        i
        for i, copy in enumerate(PLAN.copies)
        if (copy.destination, copy.destination_parameter) == (destination, parameter)
    )


def changed(index: int, **changes) -> Plan:
    copies = list(PLAN.copies)
    copies[index] = replace(copies[index], **changes)
    return Plan(tuple(copies), PLAN.fills)


def shifted(rectangle, axis: int, by: int):
    return tuple((a + by, b + by) if i == axis else (a, b) for i, (a, b) in enumerate(rectangle))


def refused(plan: Plan, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check_plan(plan, SOURCES, DESTINATIONS)


def test_the_good_plan_passes():
    check_plan(PLAN, SOURCES, DESTINATIONS)


@pytest.mark.parametrize("index", [0, 7, len(PLAN.copies) - 1])
def test_a_dropped_copy(index):
    refused(Plan(PLAN.copies[:index] + PLAN.copies[index + 1 :], PLAN.fills), "elements are never written")


@pytest.mark.parametrize("index", [0, 7, len(PLAN.copies) - 1])
def test_a_doubled_copy(index):
    refused(Plan((*PLAN.copies, PLAN.copies[index]), PLAN.fills), "written twice")


def test_a_dropped_and_a_doubled_fill():
    assert PLAN.fills
    refused(Plan(PLAN.copies, PLAN.fills[1:]), "elements are never written")
    refused(Plan(PLAN.copies, (*PLAN.fills, PLAN.fills[0])), "written twice")


def test_a_fill_over_weights():
    fill = Fill("vllm:0.0", "model.norm.weight", ((0, 3),))
    refused(Plan(PLAN.copies, (*PLAN.fills, fill)), "fills elements that are not padding")


@pytest.mark.parametrize("axis", [0, 1])
def test_a_source_rectangle_out_of_its_piece(axis):
    i = position("model.layers.1.mlp.down_proj.weight")
    refused(changed(i, source_rectangle=shifted(PLAN.copies[i].source_rectangle, axis, 1)), "source does not hold")


def test_a_source_rectangle_within_its_piece_but_elsewhere():
    """Half of the rows, from the other half: shapes and volumes are right."""
    i = position("model.layers.0.input_layernorm.weight")
    half = PLAN.copies[i]
    first = replace(half, source_rectangle=((6, 12),), destination_rectangle=((0, 6),))
    second = replace(half, source_rectangle=((0, 6),), destination_rectangle=((6, 12),))
    copies = (*PLAN.copies[:i], first, second, *PLAN.copies[i + 1 :])
    refused(Plan(copies, PLAN.fills), "at the source, .* at the destination")


def test_key_and_value_exchanged():
    i = position("model.layers.0.self_attn.qkv_proj.weight")
    rows = [j for j in range(i, len(PLAN.copies)) if PLAN.copies[j].destination_parameter.endswith("qkv_proj.weight")]
    key, value = PLAN.copies[rows[2]], PLAN.copies[rows[4]]
    refused(changed(rows[2], source_rectangle=value.source_rectangle, source=value.source), "at the source")
    assert key.source_parameter == value.source_parameter


def test_a_shifted_destination_rectangle():
    i = position("model.embed_tokens.weight")
    rectangle = shifted(PLAN.copies[i].destination_rectangle, 0, 1)
    refused(changed(i, destination_rectangle=rectangle), "at the source|does not keep")


def test_another_tensor_of_the_same_shape():
    i = position("model.layers.0.input_layernorm.weight")
    refused(changed(i, source_parameter="chunk0.decoder.layers.1.input_layernorm.weight"), "at the source")


@pytest.mark.parametrize("name", ["source", "source_parameter"])
def test_an_unknown_source(name):
    refused(changed(0, **{name: "nobody"}), "source does not hold")


def test_an_unknown_destination():
    refused(changed(0, destination="vllm:7.0"), "vllm:7.0 is not a destination")
    refused(changed(0, destination_parameter="nothing"), "does not keep")
