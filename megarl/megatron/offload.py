"""Offloads parameters and optimizer state to host memory and restores them bit for bit, each part separately. Gradients
are discarded instead, because every update starts from zeros."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, Literal

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer

from megarl.core import device
from megarl.core.errors import UserError
from megarl.megatron.optimizer import parts_of

Part = Literal["parameters", "gradients", "optimizer"]


class Offload:
    """Moves whole storages, so that all their views (parameters in DDP's buffers, the optimizer's shards) stay valid.
    Addresses change, and tensors in an offloaded part must not be used.

    Gradients take no host memory and no time: they are restored as zeros. On CPU, the copies are in host memory like
    the originals, which exercises the same code but saves no memory. Parameters published in shared memory cannot move,
    because engines read them in place.
    """

    def __init__(self, chunks: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer | None = None):
        """`optimizer` is None for an untrained model, which has only parameters."""
        self._chunks, self._optimizer = chunks, optimizer
        self._offloaded: dict[Part, dict[int, tuple[torch.UntypedStorage, torch.Tensor | int]]] = {}
        """Address -> offloaded storage, with its copy in host memory, or with its size in bytes if it was discarded."""
        self._hosts: dict[int, torch.Tensor] = {}
        """Address -> host buffer for the storage, kept for reuse."""

    def move_out(self, part: Part) -> int:
        """Offload a part and return the number of bytes freed on the device, including storages that were already
        offloaded. Raise a UserError if the part is published in shared memory."""
        present = [storage for storage in self._storages(part) if storage.nbytes()]
        if any(storage.device.type == "cpu" and storage.is_shared() for storage in present):
            raise UserError(
                f"actor.offload: megarl publishes the {part} in shared memory for the engines and cannot offload them. "
                f"Fix: remove {part} from actor.offload"
            )
        keep = torch.UntypedStorage.nbytes if part == "gradients" else self._to_host
        offloaded = self._offloaded.setdefault(part, {})
        offloaded |= {storage._cdata: (storage, keep(storage)) for storage in present}
        device.synchronize()  # complete the copies before the memory is reused
        for storage in present:
            storage.resize_(0)
        device.release_cache()
        return sum(kept if isinstance(kept, int) else kept.numel() for _, kept in offloaded.values())

    def move_in(self, part: Part) -> int:
        """Restore a part and return its bytes on the device. No-op if the part is not offloaded."""
        offloaded = self._offloaded.pop(part, {}).values()
        for storage, kept in offloaded:
            _restore(storage, kept)
        device.synchronize()
        return sum(storage.nbytes() for storage, _ in offloaded)

    @property
    def holds_state(self) -> bool:
        """Whether parameters or optimizer state are offloaded."""
        return any(self._offloaded.get(part) for part in ("parameters", "optimizer"))

    @contextmanager
    def on_device(self, tensors: Iterable[torch.Tensor]) -> Iterator[None]:
        """Return a context manager that brings offloaded `tensors` back to the device for reading."""
        requested = {tensor.untyped_storage()._cdata for tensor in tensors}
        fetched = [
            storages[address] for storages in self._offloaded.values() for address in requested.intersection(storages)
        ]
        for storage, kept in fetched:
            _restore(storage, kept)
        try:
            yield
        finally:
            device.synchronize()  # complete pending reads before the memory is reused
            for storage, _ in fetched:
                storage.resize_(0)

    def _to_host(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Copy a storage to host memory. On GPU, reuse the same pinned buffer each time, because pinning is slow."""
        source, host = _bytes(storage), self._hosts.get(storage._cdata)
        if host is None or host.numel() != storage.nbytes():
            host = device.host_empty_like(source)
            if device.on_cuda():
                self._hosts[storage._cdata] = host
        return host.copy_(source, non_blocking=True)

    def _storages(self, part: Part) -> Iterator[torch.UntypedStorage]:
        """Yield each storage in a part once. With float32 parameters, the optimizer's main weights are views of the
        parameters and count as parameters."""
        tensors: dict[Part, Iterable[torch.Tensor]] = {
            "parameters": (parameter for chunk in self._chunks for parameter in chunk.parameters()),
            "gradients": (buffer.grad_data for buffer in self._buffers()),
            "optimizer": self._optimizer_tensors(),
        }
        excluded = chain(tensors["parameters"], tensors["gradients"]) if part == "optimizer" else ()
        seen = {tensor.untyped_storage()._cdata for tensor in excluded}
        for tensor in tensors[part]:
            storage = tensor.untyped_storage()
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                yield storage

    def _buffers(self) -> Iterator:
        for chunk in self._chunks:
            buffers: Any = chunk.buffers  # DDP replaces Module.buffers with a list
            yield from (*buffers, *chunk.expert_parallel_buffers)

    def _optimizer_tensors(self) -> Iterator[torch.Tensor]:
        for part in () if self._optimizer is None else parts_of(self._optimizer):
            yield from chain.from_iterable(param_group["params"] for param_group in part.optimizer.param_groups)
            for state in part.optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _restore(storage: torch.UntypedStorage, kept: torch.Tensor | int) -> None:
    """Refill an offloaded storage with its bytes, or with zeros if the bytes were discarded."""
    if isinstance(kept, int):
        storage.resize_(kept)
        _bytes(storage).zero_()
    else:
        storage.resize_(kept.numel())
        _bytes(storage).copy_(kept, non_blocking=True)


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
