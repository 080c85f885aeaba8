"""One member's end of the communicators of a plan."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from megarl.resharding.planning.plan import Link, Plan

BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"


class NcclGroup:
    """A process group for each communicator that the member is in.

    A message by itself makes torch create a communicator for its two ranks, as many as a rank has neighbours. A batch,
    as batch_isend_irecv makes it, uses that of its group. All ranks of the group must take part in the call that
    creates it, but a batch here has two; so `create` comes before.

    A rank does its batches on a communicator one after the other, and one ends when its other end has come to it. In a
    batch, messages between the same two ranks match in the order in which they are given.
    """

    def __init__(self, store: dist.Store, timeout: timedelta, rank: int, plan: Plan, device: torch.device):
        self._plan, self._device = plan, device
        self._groups: dict[int, dist.ProcessGroup] = {}
        self._backends: dict[int, dist.Backend] = {}
        for number, communicator in enumerate(plan.communicators):
            if rank in communicator.members:
                ends = dist.PrefixStore(f"communicator {number}", store), communicator.members.index(rank)
                self._backends[number] = _backend(*ends, len(communicator.members), timeout)
                self._groups[number] = dist.ProcessGroup(*ends, len(communicator.members))
                self._groups[number]._register_backend(
                    device, dist.ProcessGroup.BackendType.NCCL, self._backends[number]
                )

    @property
    def numbers(self) -> Sequence[int]:
        """The communicators of the member, in the order in which all create theirs: nobody waits for one that waits for
        it."""
        return tuple(self._backends)

    def create(self, number: int) -> None:
        """Creates a communicator, together with its other members. Waits for them without a deadline."""
        self._backends[number].eager_connect_single_device(self._device)

    def send(self, tensors: Sequence[torch.Tensor], link: Link, receiver: int) -> dist.Work:
        """Begins to send the messages, as a batch. link: that of its communicator."""
        return self._batch("send", tensors, link, receiver)

    def recv(self, tensors: Sequence[torch.Tensor], link: Link, sender: int) -> dist.Work:
        """Begins to receive the messages, as a batch. link: that of its communicator."""
        return self._batch("recv", tensors, link, sender)

    def abort(self) -> None:
        """Ends the communicators, and what is under way."""
        for backend in self._backends.values():
            backend.abort()

    def _batch(self, operation: str, tensors: Sequence[torch.Tensor], link: Link, neighbour: int) -> dist.Work:
        number = self._plan.communicator_of(link)
        group, place = self._groups[number], self._plan.communicators[number].members.index(neighbour)
        # batch_isend_irecv does the same with a group that torch has a name for, of the processes of a default group.
        group._start_coalescing(self._device)
        try:
            for tensor in tensors:
                getattr(group, operation)([tensor], place, 0)
        finally:  # all that this thread asks of NCCL waits for the end of the batch
            work = group._end_coalescing(self._device)
        return work


def _backend(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.Backend:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    with _waiting_for_the_end():
        return dist.ProcessGroupNCCL(store, rank, size, options)


@contextmanager
def _waiting_for_the_end() -> Iterator[None]:
    """Makes waiting end, for NCCL groups that are made inside: who waits for an operation waits until the GPU has done
    it, at most for the group's timeout, and is told of what goes wrong. Else the wait would be the GPU's, without a
    deadline, and at an error torch's watchdog would end the process. torch has no option of a group for it, and reads
    the variable when it makes one."""
    before = os.environ.get(BLOCKING_WAIT)
    os.environ[BLOCKING_WAIT] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[BLOCKING_WAIT]
        else:
            os.environ[BLOCKING_WAIT] = before
