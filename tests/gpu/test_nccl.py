"""Refits over NCCL between processes with one GPU each."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection

import pytest
import torch
import torch.distributed as dist

from megarl.resharding.execute import execute
from megarl.resharding.planning import messages
from megarl.resharding.planning.communicators import buffer_bytes
from megarl.resharding.transports.p2p import Rendezvous
from tests.distributed.test_p2p import Case
from tests.gpu.gpus import needs_gpus
from tests.timing import LIMIT_S, WAIT_S
from tests.unit.resharding.cases import layout_of

pytestmark = needs_gpus(2, can_rehearse=False)
OTHER_MEMORY = 256 * 2**20
"""Bytes allowed in the first exchange besides NCCL's buffers: for its kernels and the transport's messages."""


def a_case() -> Case:
    return Case(layout_of(), vllm_tp=1, replicas=1, bucket_bytes=1024)


class Rank:
    """A rank and its transport, on the GPU with the rank's number."""

    def __init__(self, rank: int, port: int, rendezvous: str = "first"):
        torch.cuda.set_device(rank)
        # Send larger tensors in the same batch as the packed message, but outside it.
        messages.UNPACKED_BYTES_NCCL = 64
        case = a_case()
        self.holder = case.members[rank]
        self.receives = self.holder in case.destinations
        self._writes = case.plan.into(self.holder.name) if self.receives else None
        self.expected = {name: tensor.cuda() for name, tensor in case.weights[self.holder.name].items()}
        self.weights = {
            name: torch.full_like(t, torch.nan) if self.receives else t for name, t in self.expected.items()
        }
        self._port, self._part = port, case.part(rank)
        self.meet(rendezvous)

    def meet(self, name: str) -> None:
        rendezvous = Rendezvous("127.0.0.1", self._port, name, 2 * LIMIT_S)
        self.transport = rendezvous.open(self.holder.name, self.weights, self._part)

    def refit(self, factor: float) -> None:
        """Run a refit, and check that the received weights are the expected weights times the factor."""
        if self.receives:
            execute(self._writes, self.weights, self.transport)
            assert torch.cuda.current_stream().query(), "execute returned before all weights were written"
            wrong = [
                name for name, weight in self.weights.items() if not torch.equal(weight, factor * self.expected[name])
            ]
            assert not wrong
        else:
            self.transport.send()
            for tensor in self.weights.values():
                tensor.mul_(2)  # doubling is exact, and an unfinished send would transfer the doubled values


def refit_twice(connection: Connection, rank: int, port: int) -> None:
    member = Rank(rank, port)
    for factor in (1, 2):
        member.refit(factor)
    connection.send("done")
    connection.recv()


def die_in_the_second_refit(connection: Connection, rank: int, port: int) -> None:
    member = Rank(rank, port)
    member.refit(1)
    for _ in member.transport.deliver(()):
        os.kill(os.getpid(), signal.SIGKILL)


def continue_without_peer(connection: Connection, rank: int, port: int) -> None:
    """Lose the peer in the second refit, and run a third refit with the peer's replacement."""
    member = Rank(rank, port)
    member.refit(1)
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match=r"^megatron:0: with vllm:0.0: "):
        for _ in range(2):  # the second refit may have been sent completely before the peer died
            member.transport.send()
    assert time.monotonic() - begun < 6 * LIMIT_S
    for tensor in member.weights.values():
        tensor.div_(2)
    torch.cuda.synchronize()  # would hang if the aborted exchange still occupied the GPU
    connection.send("lost")
    connection.recv()
    member.meet("second")
    member.refit(1)
    connection.send("done")
    connection.recv()


def join_later(connection: Connection, rank: int, port: int) -> None:
    member = Rank(rank, port, "second")
    member.refit(1)
    connection.send("done")
    connection.recv()


def measure_first_refit(connection: Connection, rank: int, port: int) -> None:
    member = Rank(rank, port)
    messages_of = member.transport._layouts.values()
    assert max(len(layout.unpacked) + bool(layout.packed) for layout in messages_of) > 1, "no batch has two messages"
    before, _ = torch.cuda.mem_get_info()
    member.refit(1)
    after, _ = torch.cuda.mem_get_info()
    connection.send(before - after)
    connection.recv()


class Processes:
    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._started: list[multiprocessing.Process] = []
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def start(self, function, rank: int) -> Connection:
        parent, child = self._context.Pipe()
        process = self._context.Process(target=function, args=(child, rank, self._store.port))
        process.start()
        child.close()  # so that recv fails when the process exits
        self._started.append(process)
        return parent

    def end(self) -> None:
        for process in self._started:
            process.kill()


@pytest.fixture
def processes():
    started = Processes()
    yield started
    started.end()


def answer(connection: Connection) -> str:
    assert connection.poll(WAIT_S), "no answer"
    return connection.recv()


def test_weights_have_arrived_when_execute_returns(processes):
    """The source may also change its weights as soon as send returns."""
    connections = [processes.start(refit_twice, rank) for rank in range(2)]
    for connection in connections:
        assert answer(connection) == "done"


def test_two_ranks_use_one_communicator_within_its_budget(processes, monkeypatch, tmp_path):
    """NCCL logs a line for each communicator that a process creates."""
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("NCCL_DEBUG_SUBSYS", "INIT")
    monkeypatch.setenv("NCCL_DEBUG_FILE", f"{tmp_path}/%p.log")
    connections = [processes.start(measure_first_refit, rank) for rank in range(2)]
    for connection in connections:
        assert answer(connection) <= buffer_bytes(between=0, near=1) + OTHER_MEMORY
    logs = [file.read_text(errors="replace") for file in sorted(tmp_path.iterdir())]
    assert [log.count("Init COMPLETE") for log in logs] == [1, 1]


def test_dead_rank_is_named_and_others_continue(processes):
    source = processes.start(continue_without_peer, 0)
    processes.start(die_in_the_second_refit, 1)
    assert answer(source) == "lost"
    engine = processes.start(join_later, 1)
    source.send("go on")
    for connection in (source, engine):
        assert answer(connection) == "done"
