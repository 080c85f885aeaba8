"""Create one member's NCCL process groups for the communicators in a plan."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from megarl.resharding.planning.plan import Link, Plan

BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"


class NcclGroup:
    """One member's process groups, one per communicator.

    All messages are sent in batches, as in batch_isend_irecv, because a batch uses the communicator of its group. For
    single messages, torch would create an extra communicator per pair of ranks. All ranks in a group must take part in
    creating its communicator, but only two take part in a batch. Call `create` first.

    A rank executes the batches in a communicator one by one. A batch completes when both ends have executed it. Within
    a batch, messages between two ranks are matched in order.
    """

    def __init__(self, store: Store, timeout: timedelta, rank: int, plan: Plan, device: torch.device):
        self._plan, self._device = plan, device
        self._groups: dict[int, dist.ProcessGroup] = {}
        self._backends: dict[int, dist.ProcessGroupNCCL] = {}
        for number, communicator in enumerate(plan.communicators):
            if rank in communicator.members:
                ends = PrefixStore(f"communicator {number}", store), communicator.members.index(rank)
                self._backends[number] = _backend(*ends, len(communicator.members), timeout)
                self._groups[number] = dist.ProcessGroup(*ends, len(communicator.members))
                self._groups[number]._register_backend(
                    device, dist.ProcessGroup.BackendType.NCCL, self._backends[number]
                )

    @property
    def numbers(self) -> Sequence[int]:
        """Indices of the member's communicators. Creating them in this order on all members prevents deadlocks."""
        return tuple(self._backends)

    def create(self, number: int) -> None:
        """Create a communicator together with its remaining members. Waits for them without a timeout."""
        self._backends[number].eager_connect_single_device(self._device)

    def send(self, tensors: Sequence[torch.Tensor], link: Link, receiver: int) -> dist.Work:
        """Start sending the messages as a batch over the communicator of `link`."""
        return self._batch("send", tensors, link, receiver)

    def recv(self, tensors: Sequence[torch.Tensor], link: Link, sender: int) -> dist.Work:
        """Start receiving the messages as a batch over the communicator of `link`."""
        return self._batch("recv", tensors, link, sender)

    def abort(self) -> None:
        """Abort the communicators and all pending operations."""
        for backend in self._backends.values():
            backend.abort()

    def _batch(self, operation: str, tensors: Sequence[torch.Tensor], link: Link, neighbor: int) -> dist.Work:
        number = self._plan.communicator_of(link)
        group, peer = self._groups[number], self._plan.communicators[number].members.index(neighbor)
        # Equivalent to batch_isend_irecv, which accepts only groups registered with the default group.
        group._start_coalescing(self._device)
        try:
            for tensor in tensors:
                getattr(group, operation)([tensor], peer, 0)
        finally:  # close the batch: an open one queues all NCCL calls of this thread
            work = group._end_coalescing(self._device)
        return work


def _backend(store: Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroupNCCL:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    with _blocking_wait():
        return dist.ProcessGroupNCCL(store, rank, size, options)


@contextmanager
def _blocking_wait() -> Iterator[None]:
    """Enable blocking wait for NCCL groups created inside the context.

    Work.wait() then blocks the host until the GPU has finished, respects the group's timeout, and raises errors. By
    default, only the GPU stream waits, without a timeout, and torch's watchdog kills the process after an error. torch
    has no per-group option; it reads the environment variable when a group is created.
    """
    previous = os.environ.get(BLOCKING_WAIT)
    os.environ[BLOCKING_WAIT] = "1"
    try:
        yield
    finally:
        if previous is None:
            del os.environ[BLOCKING_WAIT]
        else:
            os.environ[BLOCKING_WAIT] = previous
