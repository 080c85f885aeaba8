"""Sending weights over a fake NCCL: a class on top of gloo with exactly the guarantees of torch's NCCL groups."""

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
from megarl.resharding.planning import messages
from tests.distributed.test_p2p import Case, in_layouts, send_alone
from tests.forked import run_ranks
from tests.unit.resharding.cases import layout_of

BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"


class FakeCommunicator:
    """A fake NCCL communicator.

    All of its ranks create it together, without a timeout. It executes one batch at a time, when both ends have reached
    it. The first batch of each direction connects two ranks, without a timeout. Blocking wait is read at construction.
    """

    Options = SimpleNamespace
    num_created, largest_batch = 0, 0

    def __init__(self, store: dist.Store, rank: int, size: int, options: SimpleNamespace):
        assert os.environ.get(BLOCKING_WAIT) == "1", "without blocking wait, errors kill the process"
        self._store, self._rank, self._size = store, rank, size
        self._is_created = False
        self._connected: set[tuple[str, int]] = set()
        gloo = dist.ProcessGroupGloo._Options()
        gloo._timeout = options._timeout
        gloo._devices = [dist.ProcessGroupGloo.create_default_device(lazy_init=True)]
        self._group = dist.ProcessGroupGloo(store, rank, size, gloo)

    def eager_connect_single_device(self, device: torch.device) -> None:
        assert not self._is_created
        self._store.add("NCCL: created", 1)
        while self._store.add("NCCL: created", 0) < self._size:
            time.sleep(0.01)
        self._is_created = True
        FakeCommunicator.num_created += 1

    def batch(self, operations: list[tuple[str, torch.Tensor, int]]) -> None:
        assert self._is_created, "this batch would create the communicator, which requires all ranks"
        FakeCommunicator.largest_batch = max(FakeCommunicator.largest_batch, len(operations))
        [(operation, other)] = {(operation, other) for operation, _, other in operations}
        self._connect(operation, other)
        sizes = torch.tensor([tensor.nbytes for _, tensor, _ in operations])
        if operation == "send":
            self._do("send", sizes, other)
        else:
            self._do("recv", received := torch.zeros_like(sizes), other)
            assert torch.equal(received, sizes), "the batch was matched with a different one"
        for operation, tensor, _ in operations:
            self._do(operation, tensor, other)

    def abort(self) -> None:
        """Abort without notifying other ranks."""

    def _connect(self, operation: str, other: int) -> None:
        if (operation, other) not in self._connected:
            opposite = {"send": "recv", "recv": "send"}[operation]
            self._store.set(f"NCCL: {self._rank} {operation} {other}", "")
            while not self._store.check([f"NCCL: {other} {opposite} {self._rank}"]):
                time.sleep(0.01)
        self._connected.add((operation, other))

    def _do(self, operation: str, tensor: torch.Tensor, other: int) -> None:
        getattr(self._group, operation)([tensor], other, 0).wait()


class FakeProcessGroup:
    """A process group with one communicator, which only supports batches."""

    BackendType = dist.ProcessGroup.BackendType

    def __init__(self, store: dist.Store, rank: int, size: int):
        self._batch: list[tuple[str, torch.Tensor, int]] | None = None

    def _register_backend(self, device: torch.device, kind: BackendType, backend: FakeCommunicator) -> None:
        assert kind == self.BackendType.NCCL
        self._communicator = backend

    def _start_coalescing(self, device: torch.device) -> None:
        self._batch = []

    def send(self, tensors: list[torch.Tensor], receiver: int, tag: int) -> None:
        self._batch += [("send", tensor, receiver) for tensor in tensors]

    def recv(self, tensors: list[torch.Tensor], sender: int, tag: int) -> None:
        self._batch += [("recv", tensor, sender) for tensor in tensors]

    def _end_coalescing(self, device: torch.device) -> SimpleNamespace:
        batch, self._batch = self._batch, None
        self._communicator.batch(batch)
        return SimpleNamespace(wait=lambda: None)


@pytest.fixture(autouse=True)
def nccl(monkeypatch):
    """Replace NCCL with the fake; forked ranks inherit the patch."""
    monkeypatch.setattr(device, "backend", lambda: "nccl")
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeCommunicator, raising=False)
    monkeypatch.setattr(dist, "ProcessGroup", FakeProcessGroup)
    monkeypatch.delenv(BLOCKING_WAIT, raising=False)


def take_part(store: dist.Store, rank: int, case: Case) -> None:
    """Exchange weights twice with different values."""
    holder = case.members[rank]
    transport, parameters = case.open(store, rank)
    for factor in (1, 2):
        if holder in case.destinations:
            execute(case.plan.into(holder.name), parameters, transport)
            expected = case.weights[holder.name]
            assert not [name for name, value in parameters.items() if not torch.equal(value, factor * expected[name])]
        else:
            for tensor in parameters.values():
                tensor.mul_(factor)
            transport.send()
    store.add("done", 1)
    while store.add("done", 0) < len(case.members):  # rank 0 hosts the store that other ranks still use
        time.sleep(0.01)


@in_layouts
def test_batches_match_by_order_alone(layout, vllm_tp, replicas, nodes):
    case = Case(layout, vllm_tp, replicas, 1024, nodes)
    run_ranks(len(case.members), take_part, case)


def take_part_and_count(store: dist.Store, rank: int, case: Case) -> tuple[int, int]:
    """Return the number of communicators that the member has created, and the messages in its largest batch."""
    take_part(store, rank, case)
    return FakeCommunicator.num_created, FakeCommunicator.largest_batch


def test_buckets_are_batches_in_few_communicators(monkeypatch):
    """Three workers on one node forward buckets to each other; the fourth is on another node."""
    monkeypatch.setattr(messages, "UNPACKED_BYTES_NCCL", 8)
    case = Case(layout_of(), vllm_tp=2, replicas=2, bucket_bytes=1024, nodes=(1, 1, 1, 2))
    counts = run_ranks(len(case.members), take_part_and_count, case)
    assert [created for created, _ in counts] == [1, 2, 2, 2, 1]
    assert min(largest for _, largest in counts) > 1


def test_missing_member_causes_a_timeout():
    case = Case(layout_of(), vllm_tp=1, replicas=1, bucket_bytes=256)
    case.timeout_s = 1.0
    [error] = run_ranks(1, send_alone, case)
    assert re.match(r"megatron:0: exchange with vllm:0.0: .*timeout", error, re.DOTALL)


@pytest.mark.parametrize("previous_value", [None, "0"])
def test_blocking_wait_does_not_affect_other_groups(monkeypatch, previous_value):
    if previous_value is not None:
        monkeypatch.setenv(BLOCKING_WAIT, previous_value)
    case = Case(layout_of(), vllm_tp=1, replicas=1, bucket_bytes=256)
    case.open(dist.HashStore(), 0)
    assert os.environ.get(BLOCKING_WAIT) == previous_value
