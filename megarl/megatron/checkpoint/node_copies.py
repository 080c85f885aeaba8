"""The copies in a node's shared memory: those of its own ranks, and those that it keeps for ranks on other nodes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from megarl.core import device
from megarl.core.errors import InfrastructureFailure
from megarl.core.partners import Transfer, deliveries, fetches, without_copy
from megarl.megatron.checkpoint.host_copies import HostCopies
from megarl.resharding.transports.gloo_group import gloo_group

SIZES, RECORD, MEMORY = range(3)
"""The messages of a transfer: the sizes of the other two in bytes, int64 [2]; the copy's record, and its memory,
uint8."""


class NodeCopies:
    """One rank's access to the copies on its node. A copy has the same file names on every node, and ranks exchange
    them over their own gloo group.

    While the rank computes, a thread fills its copy and delivers it to its keeper. The thread has its own process
    group, because collectives from two threads on the same group could be matched incorrectly. The state is not
    buffered a second time: the rank waits for the copy (`wait_for_copy`) before it changes or moves the state. It need
    not wait for the delivery, which only reads the copy."""

    def __init__(self, folder: Path, role: str, rank: int, store: Store, timeout_s: float):
        """`folder` is a private folder in shared memory, and `store` is the store of the rank's process group."""
        self._folder, self._role, self._rank, self._store = folder, role, rank, store
        self._timeout = timedelta(seconds=timeout_s)
        self._by_rank: dict[int, HostCopies] = {}
        self._thread = device.helper_thread("copies")
        self._copied = self._delivered = _done()
        """The latest copy and its delivery."""

    @property
    def own(self) -> HostCopies:
        return self._of(self._rank)

    def start(self, copy: Callable[[], None]) -> None:
        """Run `copy`, which fills this rank's copy, in the background. The previous copy must be finished."""
        self._copied, self._delivered = self._thread.submit(copy), _done()

    def wait_for_copy(self) -> None:
        """Wait until this rank's copy is complete or has failed."""
        wait([self._copied])

    def deliver(self, step: int, keepers: Sequence[int]) -> None:
        """Start sending this rank's copy after `step` to its keeper, and storing the copies that it receives as a
        keeper. Collective over all ranks, after `start`. `keepers` lists each rank's keeper, and is empty if no copies
        are kept."""
        self._delivered = self._thread.submit(self._deliver, step, deliveries(keepers))

    @property
    def is_finished(self) -> bool:
        """Whether the latest copy and its delivery are complete or have failed."""
        return self._copied.done() and self._delivered.done()

    def finish(self) -> tuple[str, str]:
        """Wait for the latest copy and its delivery. For each of them, return "", or the error if shared memory is
        full. Raise any other error."""
        return _problem(self._copied), _problem(self._delivered)

    def close(self) -> None:
        """Wait for the latest copy and its delivery. Errors are only printed: the copies are no longer needed."""
        for task in (self._copied, self._delivered):
            if (error := task.exception()) is not None:
                print(f"copies: {error!r}", flush=True)

    def discard_after(self, step: int) -> None:
        """Discard all copies on this node of states after steps later than `step`. These steps are trained again, and
        their new copies must not be mixed with the old ones."""
        for rank in range(dist.get_world_size()):
            self._of(rank).discard_after(step)

    def fetch(self, step: int, keepers: Sequence[int]) -> None:
        """Fetch this rank's copy after `step` from another node unless this node has it, and deliver copies to keepers
        that do not hold them. Collective over all ranks. Raise InfrastructureFailure if no node has a rank's copy."""
        held = self._gathered([rank for rank in range(dist.get_world_size()) if self._of(rank).has(step)])
        if lost := without_copy(held):
            names = ", ".join(f"{self._role}-{rank}" for rank in lost)
            raise InfrastructureFailure(
                f"no node has a copy of {names} after step {step}. Fix: resume from the newest checkpoint with "
                "resume=auto"
            )
        self._exchange(step, fetches(held))
        self._exchange(step, deliveries(keepers, held))

    def _of(self, rank: int) -> HostCopies:
        return self._by_rank.setdefault(rank, HostCopies(self._folder, f"{self._role}-{rank}"))

    @cached_property
    def _group(self) -> ProcessGroupGloo:
        # Waiting for another rank's address blocks all other threads that use the same connection to the store.
        shared: Any = self._store  # torch's stubs lack `clone`
        store = PrefixStore("copies", shared.clone())
        return gloo_group(store, self._timeout, self._rank, dist.get_world_size())

    def _deliver(self, step: int, transfers: Sequence[Transfer]) -> None:
        error = self._copied.exception()
        if not any(self._gathered("" if error is None else repr(error))):  # str may be empty
            self._exchange(step, transfers)

    def _exchange(self, step: int, transfers: Sequence[Transfer]) -> None:
        """Carry out the transfers of copies after `step` from or to this rank. Collective over all ranks. Raise
        InfrastructureFailure on all of them if the shared memory of a destination is full."""
        if not transfers:
            return
        outgoing = {t: self._of(t.rank).read_memory(step) for t in transfers if t.source == self._rank}
        records = {
            t: torch.frombuffer(bytearray(record, "utf-8"), dtype=torch.uint8) for t, (record, _) in outgoing.items()
        }
        memories = {t: memory for t, (_, memory) in outgoing.items()}
        sizes = {t: torch.tensor([len(records[t]), len(memories[t])]) for t in outgoing}
        incoming = {t: torch.empty(2, dtype=torch.int64) for t in transfers if t.destination == self._rank}
        self._swap(SIZES, sizes, incoming)
        texts = {t: torch.empty(int(size), dtype=torch.uint8) for t, (size, _) in incoming.items()}
        self._swap(RECORD, records, texts)
        with ExitStack() as stack:
            received: dict[Transfer, torch.Tensor] = {}
            problem = ""
            try:
                for t, (_, size) in incoming.items():
                    record = texts[t].numpy().tobytes().decode()
                    received[t] = stack.enter_context(self._of(t.rank).write_memory(step, record, int(size)))
            except InfrastructureFailure as failure:  # report it below, so that senders do not wait for this rank
                problem = str(failure)
            if problem := next(filter(None, self._gathered(problem)), ""):
                raise InfrastructureFailure(problem)
            self._swap(MEMORY, memories, received)

    def _gathered(self, value: Any) -> list[Any]:
        """Return the value of every rank. Values are serialized as JSON."""
        text = torch.frombuffer(bytearray(json.dumps(value), "utf-8"), dtype=torch.uint8)
        sizes = [int(size) for size in self._gathered_tensors(torch.tensor([len(text)]))]
        padded = torch.nn.functional.pad(text, (0, max(sizes) - len(text)))
        parts = zip(self._gathered_tensors(padded), sizes, strict=True)
        return [json.loads(part[:size].numpy().tobytes()) for part, size in parts]

    def _gathered_tensors(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensor of every rank. All have the same shape."""
        gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        group: Any = self._group  # torch's stubs lack the methods of process groups
        group.allgather([gathered], [tensor]).wait()
        return gathered

    def _swap(
        self, kind: int, sent: Mapping[Transfer, torch.Tensor], received: Mapping[Transfer, torch.Tensor]
    ) -> None:
        """Send and receive one message of each transfer, and wait until all have arrived."""
        if not sent and not received:
            return
        group: Any = self._group  # torch's stubs lack the methods of process groups
        works = [group.recv([tensor], t.source, _tag(t, kind)) for t, tensor in received.items()]
        works += [group.send([tensor], t.destination, _tag(t, kind)) for t, tensor in sent.items()]
        for work in works:
            work.wait()


def _tag(transfer: Transfer, kind: int) -> int:
    return 3 * transfer.rank + kind


def _done() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future


def _problem(task: Future[None]) -> str:
    """Wait for a task. Return "", or its error if shared memory is full. Raise any other error."""
    try:
        task.result()
    except InfrastructureFailure as failure:
        return str(failure)
    return ""
