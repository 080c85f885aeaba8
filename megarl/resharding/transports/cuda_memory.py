"""Weights of another process on a GPU that both use, read where they lie: the GPU's counterpart of shared memory.

The owner's storages stay where they are and are opened by CUDA IPC. A handle can be opened once: what is open stays so
as long as the channel, and meanwhile the owner does not reallocate its tensors (an owner that has offloaded them
publishes anew). It waits for its own device before it lets others read what it has changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from megarl import device
from megarl.resharding.piece import Rectangle
from megarl.resharding.plan import Copy
from megarl.resharding.transports.transport import Delivery, Readable, view

DEVICE_INDEX = 6
"""Of the owner's number for the GPU among the arguments of rebuild_cuda_tensor; the reader may have another."""


@dataclass(frozen=True, slots=True)
class PublishedOnGpu:
    """gpu: its UUID, which is the same in every process. arguments: of rebuild_cuda_tensor."""

    gpu: str
    arguments: tuple[Any, ...]
    dtype: torch.dtype


def publish(parameters: Mapping[str, torch.Tensor]) -> dict[str, PublishedOnGpu]:
    """Handles of CUDA tensors, for one reader. The caller keeps the tensors."""
    device.synchronize()
    return {name: _published(tensor.detach()) for name, tensor in parameters.items()}


def _published(tensor: torch.Tensor) -> PublishedOnGpu:
    _, arguments = reduce_tensor(tensor)
    return PublishedOnGpu(_uuid(tensor.device.index), arguments, tensor.dtype)


class CudaMemory(Readable):
    """Sources that other processes have published on GPUs of this machine. Can be pickled and sent to one reader."""

    def __init__(self, sources: Mapping[str, Mapping[str, PublishedOnGpu]]):
        """sources: holder name -> its parameters."""
        self._sources = sources
        self._open: dict[tuple[str, str], torch.Tensor] = {}

    def dtype(self, source: str, parameter: str) -> torch.dtype:
        return self._published(source, parameter).dtype

    def deliver(self, copies: Sequence[Copy]) -> Delivery:
        yield from super().deliver(copies)
        device.synchronize()  # from here on the owner may change them

    def read(self, source: str, parameter: str, rectangle: Rectangle) -> torch.Tensor:
        """Raises ValueError where this process does not see the GPU."""
        if (source, parameter) not in self._open:
            self._open[source, parameter] = _opened(source, self._published(source, parameter))
        return view(self._open[source, parameter], rectangle)

    def _published(self, source: str, parameter: str) -> PublishedOnGpu:
        try:
            return self._sources[source][parameter]
        except KeyError:
            raise ValueError(f"{source} has published no parameter {parameter}") from None


def _opened(source: str, published: PublishedOnGpu) -> torch.Tensor:
    own = {_uuid(index): index for index in range(torch.cuda.device_count())}
    if published.gpu not in own:
        raise ValueError(
            f"{source} has its weights on GPU {published.gpu}, and this process sees {', '.join(own)} only"
        )
    arguments = list(published.arguments)
    arguments[DEVICE_INDEX] = own[published.gpu]
    return rebuild_cuda_tensor(*arguments)


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)
