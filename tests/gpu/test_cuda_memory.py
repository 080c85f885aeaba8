"""A process writes a shard of its own from weights of another one on the same GPU, which it reads where they lie."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection

import pytest
import torch

from megarl.resharding.execute import execute
from megarl.resharding.families import huggingface_holder, vllm_holder
from megarl.resharding.plan import Plan
from megarl.resharding.planner import make_plan
from megarl.resharding.transports.cuda_memory import CudaMemory, publish
from megarl.resharding.transports.local import LocalMemory
from tests.unit.resharding.cases import config_of, random_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: torch finds none"),
]
CONFIG = config_of()
SOURCE, TARGET = huggingface_holder(CONFIG), vllm_holder(CONFIG, 1, 0, replica=0)
DEADLINE_S = 120


def write(connection: Connection, plan: Plan, channel: CudaMemory) -> None:
    """Whenever it is asked to: its parameters from those of the other process."""
    parameters = {name: torch.full(shape, torch.nan, device="cuda") for name, shape in TARGET.shapes.items()}
    addresses = {name: tensor.data_ptr() for name, tensor in parameters.items()}
    transport = channel.open(TARGET.name, parameters, plan)
    while connection.recv():
        execute(plan.into(TARGET.name), parameters, transport)
        assert {name: tensor.data_ptr() for name, tensor in parameters.items()} == addresses
        connection.send({name: tensor.cpu().numpy() for name, tensor in parameters.items()})


def test_a_reader_sees_what_the_owner_has_changed():
    weights = {name: tensor.cuda() for name, tensor in random_checkpoint(CONFIG).items()}
    plan = make_plan([SOURCE], [TARGET])
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    reader = multiprocessing.get_context("spawn").Process(
        target=write, args=(theirs, plan, CudaMemory({SOURCE.name: publish(weights)}))
    )
    reader.start()
    try:
        for change in (0.0, 1.5):
            for tensor in weights.values():
                tensor.add_(change)
            torch.cuda.synchronize()
            ours.send(True)
            assert ours.poll(DEADLINE_S), "no answer"
            written = ours.recv()
            expected = {name: torch.full(shape, torch.nan) for name, shape in TARGET.shapes.items()}
            host = {name: tensor.cpu() for name, tensor in weights.items()}
            execute(plan.into(TARGET.name), expected, LocalMemory({SOURCE.name: host}))
            for name, tensor in expected.items():
                assert torch.equal(torch.from_numpy(written[name]), tensor), name
        ours.send(False)
        reader.join(DEADLINE_S)
        assert reader.exitcode == 0
    finally:
        reader.kill()
