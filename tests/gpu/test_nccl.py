"""Weights travel over NCCL between processes with a GPU each."""

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
BESIDE = 256 * 2**20
"""Room for what a first exchange takes beside buffers: NCCL's kernels and the transport's own messages."""


def a_case() -> Case:
    return Case(layout_of(), vllm_tp=1, replicas=1, bucket_bytes=1024)


class Member:
    """A rank's transport, on the GPU of its number."""

    def __init__(self, rank: int, port: int, rendezvous: str = "first"):
        torch.cuda.set_device(rank)
        messages.UNPACKED_BYTES_NCCL = 64  # what is larger travels beside the packed message, in the same batch
        case = a_case()
        self.holder = case.members[rank]
        self.receives = self.holder in case.destinations
        self._writes = case.plan.into(self.holder.name) if self.receives else None
        self.expected = {name: tensor.cuda() for name, tensor in case.weights[self.holder.name].items()}
        self.own = {name: torch.full_like(t, torch.nan) if self.receives else t for name, t in self.expected.items()}
        self._port, self._part = port, case.part(rank)
        self.meet(rendezvous)

    def meet(self, name: str) -> None:
        rendezvous = Rendezvous("127.0.0.1", self._port, name, 2 * LIMIT_S)
        self.transport = rendezvous.open(self.holder.name, self.own, self._part)

    def refit(self, factor: float) -> None:
        """Carries out a refit of weights that the source has changed by the factor."""
        if self.receives:
            execute(self._writes, self.own, self.transport)
            assert torch.cuda.current_stream().query(), "reported before all is in its place"
            wrong = [name for name, own in self.own.items() if not torch.equal(own, factor * self.expected[name])]
            assert not wrong
        else:
            self.transport.send()
            for tensor in self.own.values():
                tensor.mul_(2)  # exact; whoever still read them would see it


def refit_twice(connection: Connection, rank: int, port: int) -> None:
    member = Member(rank, port)
    for factor in (1, 2):
        member.refit(factor)
    connection.send("done")
    connection.recv()


def dies_in_the_second(connection: Connection, rank: int, port: int) -> None:
    member = Member(rank, port)
    member.refit(1)
    for _ in member.transport.deliver(()):
        os.kill(os.getpid(), signal.SIGKILL)


def goes_on_without(connection: Connection, rank: int, port: int) -> None:
    """The other dies in the second refit, and a third is with one that is new."""
    member = Member(rank, port)
    member.refit(1)
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match=r"^megatron:0: with vllm:0.0: "):
        for _ in range(2):  # all of the second may have left before it died
            member.transport.send()
    assert time.monotonic() - begun < 6 * LIMIT_S
    for tensor in member.own.values():
        tensor.div_(2)
    torch.cuda.synchronize()  # nothing of the lost exchange occupies the GPU
    connection.send("lost")
    connection.recv()
    member.meet("second")
    member.refit(1)
    connection.send("done")
    connection.recv()


def comes_later(connection: Connection, rank: int, port: int) -> None:
    member = Member(rank, port, "second")
    member.refit(1)
    connection.send("done")
    connection.recv()


def measures_the_first(connection: Connection, rank: int, port: int) -> None:
    member = Member(rank, port)
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
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=function, args=(theirs, rank, self._store.port))
        process.start()
        theirs.close()  # so that its end is seen
        self._started.append(process)
        return ours

    def end(self) -> None:
        for process in self._started:
            process.kill()


@pytest.fixture
def processes():
    own = Processes()
    yield own
    own.end()


def answer(connection: Connection) -> str:
    assert connection.poll(WAIT_S), "no answer"
    return connection.recv()


def test_all_has_arrived_when_it_is_said(processes):
    """All has left when the source goes on, too."""
    connections = [processes.start(refit_twice, rank) for rank in range(2)]
    for connection in connections:
        assert answer(connection) == "done"


def test_two_ranks_have_one_communicator_and_it_fits(processes, monkeypatch, tmp_path):
    """NCCL's log has a line for each that a process creates."""
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("NCCL_DEBUG_SUBSYS", "INIT")
    monkeypatch.setenv("NCCL_DEBUG_FILE", f"{tmp_path}/%p.log")
    connections = [processes.start(measures_the_first, rank) for rank in range(2)]
    for connection in connections:
        assert answer(connection) <= buffer_bytes(between=0, near=1) + BESIDE
    logs = [file.read_text(errors="replace") for file in sorted(tmp_path.iterdir())]
    assert [log.count("Init COMPLETE") for log in logs] == [1, 1]


def test_a_member_that_dies_is_named_and_the_others_go_on(processes):
    source = processes.start(goes_on_without, 0)
    processes.start(dies_in_the_second, 1)
    assert answer(source) == "lost"
    engine = processes.start(comes_later, 1)
    source.send("go on")
    for connection in (source, engine):
        assert answer(connection) == "done"
