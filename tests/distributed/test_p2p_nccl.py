"""Weights over NCCL, without it: gloo in a class that does what torch's NCCL group does, and no more than that."""

from __future__ import annotations

import os
import re
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megarl.core import device
from megarl.resharding.execute import execute
from megarl.resharding.transports.delta_p2p import DeltaRendezvous
from megarl.resharding.transports.p2p import Rendezvous
from tests.distributed.test_p2p import Case, alone, in_layouts
from tests.forked import run_ranks
from tests.unit.resharding.cases import layout_of

BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"


class OverGloo:
    """It ignores tags, does one operation after the other, as on a GPU that has room for one only, and connects two
    members, without a deadline, in their first one. It reads at its start whether who waits for an operation waits for
    its end, and is told of its error."""

    Options = SimpleNamespace

    def __init__(self, store: dist.Store, rank: int, size: int, options: SimpleNamespace):
        assert os.environ.get(BLOCKING_WAIT) == "1", "nobody waits for the end, and an error ends the process"
        self._store, self._rank = store, rank
        self._connected: set[int] = set()
        gloo = dist.ProcessGroupGloo._Options()
        gloo._timeout = options._timeout
        gloo._devices = [dist.ProcessGroupGloo.create_default_device(lazy_init=True)]
        self._group = dist.ProcessGroupGloo(store, rank, size, gloo)

    def send(self, tensors: list[torch.Tensor], receiver: int, tag: int) -> SimpleNamespace:
        self._connect(receiver)
        return self._done(self._group.send(tensors, receiver, 0))

    def recv(self, tensors: list[torch.Tensor], sender: int, tag: int) -> SimpleNamespace:
        self._connect(sender)
        return self._done(self._group.recv(tensors, sender, 0))

    def abort(self) -> None:
        """Nobody hears of it."""

    def _connect(self, other: int) -> None:
        if other not in self._connected:
            self._store.set(f"NCCL: {self._rank} to {other}", "")
            while not self._store.check([f"NCCL: {other} to {self._rank}"]):
                time.sleep(0.01)
        self._connected.add(other)

    def _done(self, work: dist.Work) -> SimpleNamespace:
        work.wait()
        return SimpleNamespace(wait=lambda: None)


@pytest.fixture(autouse=True)
def nccl(monkeypatch):
    """Lets ranks, which inherit it, take gloo for NCCL."""
    monkeypatch.setattr(device, "backend", lambda: "nccl")
    monkeypatch.setattr(dist, "ProcessGroupNCCL", OverGloo, raising=False)
    monkeypatch.delenv(BLOCKING_WAIT, raising=False)


def take_part(store: dist.Store, rank: int, case: Case, kind: type[Rendezvous]) -> None:
    """Twice, as the weights of a source change in between."""
    holder = case.members[rank]
    transport, parameters = case.open(store, rank, kind)
    for factor in (1, 2):
        if holder in case.destinations:
            execute(case.plan.into(holder.name), parameters, transport)
            expected = case.weights[holder.name]
            assert not [name for name, own in parameters.items() if not torch.equal(own, factor * expected[name])]
        else:
            for tensor in parameters.values():
                tensor.mul_(factor)
            transport.send()
    store.add("done", 1)
    while store.add("done", 0) < len(case.members):  # rank 0 has what others still meet at
        time.sleep(0.01)


@pytest.mark.parametrize("kind", [Rendezvous, DeltaRendezvous])
@in_layouts
def test_the_order_is_enough_for_members_to_find_each_other(layout, vllm_tp, replicas, nodes, kind):
    case = Case(layout, vllm_tp, replicas, 1024, nodes)
    run_ranks(len(case.members), take_part, case, kind)


def test_nobody_waits_for_ever_for_one_that_does_not_come():
    case = Case(layout_of(), vllm_tp=1, replicas=1, bucket_bytes=256)
    case.timeout_s = 1.0
    [error] = run_ranks(1, alone, case)
    assert re.match(r"megatron:0: with vllm:0.0: .*timeout", error, re.DOTALL)


@pytest.mark.parametrize("of_others", [None, "0"])
def test_other_groups_of_the_process_wait_as_they_did(monkeypatch, of_others):
    if of_others is not None:
        monkeypatch.setenv(BLOCKING_WAIT, of_others)
    case = Case(layout_of(), vllm_tp=1, replicas=1, bucket_bytes=256)
    case.open(dist.HashStore(), 0)
    assert os.environ.get(BLOCKING_WAIT) == of_others
