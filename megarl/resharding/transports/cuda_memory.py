"""Read another process's weights on this machine's GPUs through CUDA IPC.

The owner must synchronize its device before readers access the weights. `publish` does so for the current values; the
owner must do so after later updates. An owner that moves its tensors between refits publishes them again for each
refit, and readers close them when the refit ends. If a reader dies, the CUDA driver closes its handles.

Readers are excluded from torch's reference counts for shared storages. Otherwise, torch would not release memory that
the owner has freed until all readers have closed it, and would never release it if a reader died. A reader must see all
GPUs of its sources, and creates a CUDA context on each.
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
"""Position of the GPU index in the arguments of rebuild_cuda_tensor. GPU indices may differ between processes."""
COUNTER = slice(11, 13)
"""Positions of torch's reference counter among these arguments: name of a shared memory segment, and offset."""
NO_COUNTER = (b"/no-such-counter", 0)
"""A nonexistent counter. Closing a storage decrements its counter only if the counter exists."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A handle to one of the owner's storages.

    Attributes:
        gpu: UUID of the storage's GPU, which is the same in all processes.
        arguments: arguments of rebuild_cuda_tensor for the whole storage as bytes.
    """

    gpu: str
    arguments: tuple[Any, ...]


def publish(parameters: Mapping[str, torch.Tensor]) -> Published[Segment]:
    """Publish CUDA tensors for one reader. The caller must keep the tensors alive."""
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
    """A Channel to sources that different processes have published on this machine's GPUs."""

    def __init__(self, sources: Mapping[str, Mapping[str, Published[Segment]]], moving: bool):
        """`sources` maps source name -> reader name -> parameters published for that reader. `moving`: whether
        the owners may move their tensors after a refit; the channel is then used for one refit only."""
        self._sources, self._moving = sources, moving

    def open(self, member: str, parameters: Mapping[str, torch.Tensor], plan: Plan, in_place: bool = True) -> GpuReader:
        published = {source: readers[member] for source, readers in self._sources.items() if member in readers}
        # The reader's device may differ from the process's current device.
        return GpuReader(published, self._moving, next(iter(parameters.values())).device)


class GpuReader(PublishedMemory[Segment]):
    """One reader's end of the channel."""

    def __init__(self, sources: Mapping[str, Published[Segment]], moving: bool, reader_device: torch.device):
        """`sources` maps source names to the parameters published for this reader."""
        super().__init__(sources)
        self._moving, self._reader_device = moving, reader_device
        self._open: dict[Segment, torch.UntypedStorage] = {}

    def deliver(self, copies: Sequence[Copy]) -> Delivery:
        try:
            yield from super().deliver(copies)
        finally:
            for each in {self._reader_device, *(storage.device for storage in self._open.values())}:
                device.synchronize(each)  # the owner may change the weights after this method returns
            if self._moving:
                self._open.clear()

    def _open_storage(self, source: str, segment: Segment) -> torch.UntypedStorage:
        """Return the storage, opened in this process. Raise a ValueError if its GPU is not visible."""
        if segment not in self._open:
            self._open[segment] = _open_segment(source, segment)
        return self._open[segment]


def _open_segment(source: str, segment: Segment) -> torch.UntypedStorage:
    indexes = {device.uuid(index): index for index in range(device.num_gpus())}
    if segment.gpu not in indexes:
        raise ValueError(
            f"{source}: its weights are on GPU {segment.gpu}, but this process can only access {', '.join(indexes)}. "
            "Fix: add that GPU to the process's CUDA_VISIBLE_DEVICES"
        )
    arguments = list(segment.arguments)
    arguments[DEVICE_INDEX] = indexes[segment.gpu]
    return rebuild_cuda_tensor(*arguments).untyped_storage()
