from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megarl.resharding.execute import Assembly, execute
from megarl.resharding.families import huggingface_holder, megatron_holder, megatron_holders
from megarl.resharding.planning.planner import make_plan
from megarl.resharding.transports.local import LocalMemory
from tests.unit.resharding.cases import config_of, layout_of, random_checkpoint

CONFIG = config_of()
FOLDER, RANK = huggingface_holder(CONFIG), megatron_holder(CONFIG, layout_of(), 0)
PLAN = make_plan([FOLDER], [RANK])
NORM = "chunk0.decoder.final_layernorm.weight"


@pytest.fixture
def checkpoint() -> dict[str, torch.Tensor]:
    return random_checkpoint(CONFIG)


@pytest.fixture
def parameters() -> dict[str, torch.Tensor]:
    return {name: torch.full(shape, torch.nan) for name, shape in RANK.shapes.items()}


def run(parameters, checkpoint, plan=PLAN) -> int:
    return execute(plan.into(RANK.name), parameters, LocalMemory({FOLDER.name: checkpoint}))


def test_writes_in_place_into_trainable_leaves(parameters, checkpoint):
    addresses = {name: tensor.requires_grad_().data_ptr() for name, tensor in parameters.items()}
    run(parameters, checkpoint)
    assert torch.equal(parameters[NORM], checkpoint["model.norm.weight"])
    assert {name: tensor.data_ptr() for name, tensor in parameters.items()} == addresses
    assert not any(tensor.isnan().any() for tensor in parameters.values())


def test_padding_is_zeroed(parameters, checkpoint):
    run(parameters, checkpoint)
    assert (parameters["chunk0.output_layer.weight"][CONFIG["vocab_size"] :] == 0).all()


def test_undeclared_cast_is_rejected(parameters, checkpoint):
    halved = {name: tensor.bfloat16() for name, tensor in checkpoint.items()}
    with pytest.raises(
        ValueError, match=r"is float32, but .* is bfloat16\. The plan only casts from float32 to float32"
    ):
        run(parameters, halved)
    assert all(tensor.isnan().all() for tensor in parameters.values())
    run(parameters, halved, make_plan([huggingface_holder(CONFIG, "bfloat16")], [RANK]))
    assert torch.equal(parameters[NORM], halved["model.norm.weight"].float())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p.pop(NORM), f"{NORM}: the plan writes this parameter, but the model does not have it"),
        (lambda p: p.update(extra=torch.empty(1)), "extra: the model has this parameter, but the plan does not cover"),
        (
            lambda p: p.update({NORM: torch.full((13,), torch.nan)}),
            rf"{NORM}: .* shape \(13,\) in the model, but \(12,\) in the plan",
        ),
    ],
)
def test_mismatched_model_is_not_modified(parameters, checkpoint, change, message):
    change(parameters)
    with pytest.raises(ValueError, match=message):
        run(parameters, checkpoint)
    assert all(tensor.isnan().all() for name, tensor in parameters.items() if name != "extra")


def test_missing_source_parameter_is_rejected(parameters, checkpoint):
    del checkpoint["model.norm.weight"]
    with pytest.raises(ValueError, match=r"huggingface has no parameter model.norm.weight"):
        run(parameters, checkpoint)
    assert all(tensor.isnan().all() for tensor in parameters.values())


def test_assembly_combines_the_parts_of_ranks(checkpoint):
    layout = layout_of(tp=3, pp=2)
    ranks = megatron_holders(CONFIG, layout)
    shards = {rank.name: {n: torch.full(s, torch.nan) for n, s in rank.shapes.items()} for rank in ranks}
    into_ranks = make_plan([FOLDER], ranks)
    for name, shard in shards.items():
        execute(into_ranks.into(name), shard, LocalMemory({FOLDER.name: checkpoint}))
    back = make_plan(ranks, [huggingface_holder(CONFIG, "bfloat16")], bucket_bytes=100).into("huggingface")
    cpu, doubles = torch.device("cpu"), {n: {k: t.double() for k, t in s.items()} for n, s in shards.items()}
    with pytest.raises(
        ValueError, match=r"is bfloat16, but .* of megatron:0 is float64\. The plan only casts from float32"
    ):
        next(Assembly(back, LocalMemory(doubles), cpu).parameters())
    assembly = Assembly(back, LocalMemory(shards), cpu)
    whole = list(assembly.parameters())
    assert sorted(name for name, _ in whole) == sorted(checkpoint)
    for name, tensor in whole:
        assert torch.equal(tensor, checkpoint[name].bfloat16())
    largest, total = max(t.nbytes for _, t in whole), sum(t.nbytes for _, t in whole)
    assert largest <= assembly.staging_bytes < total


def test_assembly_allocates_on_the_destination_device(checkpoint):
    writes = make_plan([FOLDER], [replace(FOLDER, name="engine")]).into("engine")
    assembly = Assembly(writes, LocalMemory({FOLDER.name: checkpoint}), torch.device("meta"))
    assert {tensor.device.type for _, tensor in assembly.parameters()} == {"meta"}
