"""Reads weights of another process on a GPU of this machine where they lie: the GPU's counterpart of shared memory.

The owner's storages stay where they are and are opened by CUDA IPC. It waits for its own device before it lets others
read: here what it has when it publishes, and by itself what it changes later. An owner that moves its tensors between
two refits publishes them anew for each, and its readers close them at its end; what a reader that dies had open, its
driver closes. torch would count the readers of a storage, and keep what its owner frees until all have closed it: for
ever, if one dies before. So they are not counted. A reader sees the GPUs of all that it reads, and has a CUDA context
on each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from megarl.core import device
from megarl.resharding.planning.plan import Copy, Plan
from megarl.resharding.transports.published import Published, PublishedMemory, PublishedParameter
from megarl.resharding.transports.transport import Delivery

DEVICE_INDEX = 6
"""The place, among the arguments of rebuild_cuda_tensor, of the owner's number for the GPU; the reader may have
another."""
COUNTER = slice(11, 13)
"""The places, among the same, of what torch counts the reader by: the name of a shared memory, and a place in it."""
NO_COUNTER = (b"/no-such-counter", 0)
"""The counter of no storage: a reader that closes a storage counts down only if it finds the counter."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A storage of the owner's.

    gpu         UUID of its GPU, which is the same in every process
    arguments   those of rebuild_cuda_tensor, for all of its bytes
    """

    gpu: str
    arguments: tuple[Any, ...]


def publish(parameters: Mapping[str, torch.Tensor]) -> Published[Segment]:
    """Publishes CUDA tensors for one reader, which will read from each. The caller keeps them."""
    device.synchronize()
    segments: dict[int, Segment] = {}
    for tensor in parameters.values():
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in segments:
            segments[storage.data_ptr()] = _segment(storage)
    return {
        name: PublishedParameter.of(tensor, segments[tensor.untyped_storage().data_ptr()])
        for name, tensor in parameters.items()
    }


def _segment(storage: torch.UntypedStorage) -> Segment:
    _, arguments = reduce_tensor(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))
    torch.UntypedStorage._release_ipc_counter_cuda(*arguments[COUNTER])
    uncounted = (*arguments[: COUNTER.start], *NO_COUNTER, *arguments[COUNTER.stop :])
    return Segment(device.uuid(storage.device.index), uncounted)


class CudaMemory:
    """Sources that other processes have published on GPUs of this machine. A Channel."""

    def __init__(self, sources: Mapping[str, Mapping[str, Published[Segment]]], moving: bool):
        """sources: holder name -> name of the holder that reads -> what is published for it.

        moving: whether the owners may move their tensors after a refit, so that there is one by this channel.
        """
        self._sources, self._moving = sources, moving

    def open(self, member: str, parameters: Mapping[str, torch.Tensor], plan: Plan, in_place: bool = True) -> GpuReader:
        published = {source: readers[member] for source, readers in self._sources.items() if member in readers}
        # A reader may have another device than the process's current one.
        return GpuReader(published, self._moving, next(iter(parameters.values())).device)


class GpuReader(PublishedMemory[Segment]):
    """One reader's end of the channel."""

    def __init__(self, sources: Mapping[str, Published[Segment]], moving: bool, reader_device: torch.device):
        """sources: holder name -> what it has published for this reader."""
        super().__init__(sources)
        self._moving, self._reader_device = moving, reader_device
        self._open: dict[Segment, torch.UntypedStorage] = {}

    def deliver(self, copies: Sequence[Copy]) -> Delivery:
        try:
            yield from super().deliver(copies)
        finally:
            for each in {self._reader_device, *(storage.device for storage in self._open.values())}:
                device.synchronize(each)  # from here on the owner may change them
            if self._moving:
                self._open.clear()

    def _opened(self, source: str, segment: Segment) -> torch.UntypedStorage:
        """Returns the storage, in this process. Raises ValueError where it does not see the GPU."""
        if segment not in self._open:
            self._open[segment] = _open_segment(source, segment)
        return self._open[segment]


def _open_segment(source: str, segment: Segment) -> torch.UntypedStorage:
    indexes = {device.uuid(index): index for index in range(device.num_gpus())}
    if segment.gpu not in indexes:
        raise ValueError(
            f"{source} has its weights on GPU {segment.gpu}, and this process sees {', '.join(indexes)} only"
        )
    arguments = list(segment.arguments)
    arguments[DEVICE_INDEX] = indexes[segment.gpu]
    return rebuild_cuda_tensor(*arguments).untyped_storage()
