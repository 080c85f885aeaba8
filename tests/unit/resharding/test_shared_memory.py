"""Reading the weights of a live trainer process from another process."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megarl.resharding.transports.shared_memory import SharedMemory, publish
from tests.timing import WAIT_S


def train(connection: Connection) -> None:
    """Run a trainer process: publish the parameters, then perform an update per request."""
    torch.set_num_threads(1)
    buffer = torch.zeros(1000)  # as in Megatron, parameters are views of one buffer
    parameters = {"row": torch.nn.Parameter(torch.empty(0)), "matrix": torch.nn.Parameter(torch.empty(0))}
    parameters["row"].data = buffer[3:10]
    parameters["matrix"].data = buffer[16:46].view(5, 6).t()
    optimizer = torch.optim.SGD(parameters.values(), lr=0.5)
    published = publish(parameters)
    assert publish(parameters) == published
    connection.send(published)
    while connection.recv():
        (parameters["row"].sum() - (parameters["matrix"] * torch.arange(30.0).view(6, 5)).sum()).backward()
        optimizer.step()
        assert buffer[3] == parameters["row"][0]
        connection.send("updated")


class Trainer:
    def __init__(self):
        context = multiprocessing.get_context("fork")
        self.connection, remote = context.Pipe()
        self.process = context.Process(target=train, args=(remote,), daemon=True)
        self.process.start()
        remote.close()  # so that recv fails if the trainer has died
        self.published = self.connection.recv()

    def update(self) -> None:
        self.connection.send("update")
        assert self.connection.recv() == "updated"

    def kill(self) -> None:
        self.process.kill()
        self.process.join(timeout=WAIT_S)
        self.connection.close()


@pytest.fixture
def trainer():
    trainer = Trainer()
    yield trainer
    trainer.kill()


def test_reader_sees_in_place_updates(trainer):
    transport = pickle.loads(pickle.dumps(SharedMemory({"megatron:0": trainer.published})))
    assert transport.dtype("megatron:0", "row") == torch.float32
    row = transport.read("megatron:0", "row", ((2, 5),))
    assert row.tolist() == [0, 0, 0]

    trainer.update()

    assert row.tolist() == [-0.5, -0.5, -0.5]
    matrix = transport.read("megatron:0", "matrix", ((0, 6), (0, 5)))
    assert torch.equal(matrix, torch.arange(30.0).view(6, 5) / 2)


def test_later_transport_reuses_the_mapping(trainer):
    first, second = (
        SharedMemory({"t": trainer.published}).read("t", "row", ((0, 7),)).untyped_storage().data_ptr()
        for _ in range(2)
    )
    assert first == second


def test_killed_trainer_leaves_no_shared_memory(trainer):
    before = set(os.listdir("/dev/shm"))
    row = SharedMemory({"t": trainer.published}).read("t", "row", ((0, 7),))
    trainer.kill()
    assert not [name for name in set(os.listdir("/dev/shm")) - before if name.startswith("torch_")]
    assert row.tolist() == [0] * 7  # mapped memory stays readable


def test_memory_of_a_dead_trainer_is_released(trainer):
    SharedMemory({"t": trainer.published}).read("t", "row", ((0, 7),))
    inode = trainer.published["row"].segment.inode
    assert maps(inode)
    trainer.kill()
    tensor = torch.zeros(4)
    SharedMemory({"own": publish({"w": tensor})}).read("own", "w", ((0, 4),))
    assert not maps(inode)


def maps(inode: int) -> bool:
    """Return whether this process maps the file with this inode."""
    return any(line.split()[4] == str(inode) for line in Path("/proc/self/maps").read_text().splitlines())


def test_error_names_the_dead_trainer(trainer):
    trainer.kill()
    with pytest.raises(RuntimeError, match=f"process {trainer.process.pid} has exited or released its shared weights"):
        SharedMemory({"t": trainer.published}).read("t", "row", ((0, 7),))


def test_reused_descriptor_is_detected(tmp_path: Path):
    tensor = torch.zeros(4)
    published = publish({"w": tensor})
    descriptor = published["w"].segment.descriptor
    kept = os.dup(descriptor)
    with open(tmp_path / "other", "wb") as other:
        os.dup2(other.fileno(), descriptor)
    with pytest.raises(RuntimeError, match="has exited or released its shared weights"):
        SharedMemory({"t": published}).read("t", "w", ((0, 4),))
    os.dup2(kept, descriptor)
    os.close(kept)


def test_error_names_an_unknown_parameter():
    with pytest.raises(ValueError, match="t has not published parameter w"):
        SharedMemory({"t": {}}).read("t", "w", ((0, 1),))


def test_full_dev_shm_is_detected_before_moving_weights(monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**20))
    tensor = torch.zeros(2**20)
    with pytest.raises(
        ValueError, match=r"/dev/shm has 1 MiB free, but the weights need 4 MiB\. Fix: enlarge /dev/shm"
    ):
        publish({"w": tensor})
    assert not tensor.is_shared()
