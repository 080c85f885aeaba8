"""A process fills its shard from another process's weights on the same GPU, which it reads in place."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection

import pytest
import torch

from megarl.core import device
from megarl.resharding.execute import execute
from megarl.resharding.families import huggingface_holder, vllm_holder
from megarl.resharding.planning.plan import Plan
from megarl.resharding.planning.planner import make_plan
from megarl.resharding.transports.cuda_memory import CudaMemory, publish
from megarl.resharding.transports.local import LocalMemory
from tests.gpu.gpus import needs_gpus
from tests.timing import WAIT_S
from tests.unit.resharding.cases import config_of, random_checkpoint

pytestmark = needs_gpus(1, can_rehearse=False)
CONFIG = config_of()
SOURCE, TARGET = huggingface_holder(CONFIG), vllm_holder(CONFIG, 1, 0, replica=0)


def write(connection: Connection, plan: Plan) -> None:
    """Fill this process's parameters for each received channel; None repeats the transfer over the last channel."""
    parameters = {name: torch.full(shape, torch.nan, device="cuda") for name, shape in TARGET.shapes.items()}
    addresses = {name: tensor.data_ptr() for name, tensor in parameters.items()}
    transport = None
    while (channel := connection.recv()) != "end":
        if channel is not None:
            transport = channel.open(TARGET.name, parameters, plan)
        execute(plan.into(TARGET.name), parameters, transport)
        assert {name: tensor.data_ptr() for name, tensor in parameters.items()} == addresses
        connection.send({name: tensor.cpu().numpy() for name, tensor in parameters.items()})


@pytest.mark.parametrize("moving", [False, True])
def test_reader_sees_changed_weights(moving):
    """With `moving`, the owner frees and reallocates the memory after each transfer, once the reader has closed it."""
    flat, weights = flattened(random_checkpoint(CONFIG))
    plan = make_plan([SOURCE], [TARGET])
    parent, child = multiprocessing.get_context("spawn").Pipe()
    reader = multiprocessing.get_context("spawn").Process(target=write, args=(child, plan))
    reader.start()
    try:
        for step, change in enumerate((0.0, 1.5, -0.25)):
            flat.add_(change)
            published = step == 0 or moving
            parent.send(CudaMemory({SOURCE.name: {TARGET.name: publish(weights)}}, moving) if published else None)
            assert parent.poll(WAIT_S), "no answer"
            written = parent.recv()
            expected = {name: torch.full(shape, torch.nan) for name, shape in TARGET.shapes.items()}
            host = {name: tensor.cpu() for name, tensor in weights.items()}
            execute(plan.into(TARGET.name), expected, LocalMemory({SOURCE.name: host}))
            for name, tensor in expected.items():
                assert torch.equal(torch.from_numpy(written[name]), tensor), name
            if moving:
                free_and_reallocate(flat)
        parent.send("end")
        reader.join(WAIT_S)
        assert reader.exitcode == 0
    finally:
        reader.kill()


def die(connection: Connection, plan: Plan) -> None:
    """Kill this process while it has the other process's weights open."""
    parameters = {name: torch.zeros(shape, device="cuda") for name, shape in TARGET.shapes.items()}
    for _ in connection.recv().open(TARGET.name, parameters, plan).deliver(plan.into(TARGET.name).copies):
        torch.cuda.synchronize()
        os.kill(os.getpid(), signal.SIGKILL)


def test_dead_reader_does_not_keep_memory_allocated():
    flat, weights = flattened(random_checkpoint(CONFIG))
    before = flat.clone()
    parent, child = multiprocessing.get_context("spawn").Pipe()
    reader = multiprocessing.get_context("spawn").Process(target=die, args=(child, make_plan([SOURCE], [TARGET])))
    reader.start()
    try:
        parent.send(CudaMemory({SOURCE.name: {TARGET.name: publish(weights)}}, moving=True))
        reader.join(WAIT_S)
        assert reader.exitcode == -signal.SIGKILL
    finally:
        reader.kill()
    free_and_reallocate(flat)
    assert torch.equal(flat, before)


def flattened(weights: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return a flat tensor on the GPU and the weights as views of it, like the trainer's parameters."""
    flat = torch.cat([tensor.flatten() for tensor in weights.values()]).cuda()
    parts = flat.split([tensor.numel() for tensor in weights.values()])
    return flat, {name: part.view(weights[name].shape) for name, part in zip(weights, parts, strict=True)}


def free_and_reallocate(flat: torch.Tensor) -> None:
    """Free the tensor's memory and fill it again, as megatron/offload.py does."""
    storage, host, before = flat.untyped_storage(), flat.cpu(), torch.cuda.memory_allocated()
    size = storage.nbytes()
    storage.resize_(0)
    device.release_cache()
    assert torch.cuda.memory_allocated() <= before - size, (
        "torch did not free the memory, as if a reader still had it open"
    )
    storage.resize_(size)
    flat.copy_(host)
