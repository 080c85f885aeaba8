"""Offload of parameters, gradients and the optimizer's state: to host memory and back, each on its own, bit by bit;
gradients are given up, as every update begins with zeros."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Literal

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer

from megarl.core import device
from megarl.core.errors import UserError

Part = Literal["parameters", "gradients", "optimizer"]


class Offload:
    """Moves storages, so that all views of them (parameters in DDP's buffers, the optimizer's shards) stay valid; their
    addresses change, and while a part is away its tensors must not be used.

    Gradients take no host memory and no time: they come back as zeros.

    On CPU the storages are released into copies that are host memory as well: the same path, and nothing is gained.
    Parameters that are published in shared memory are read there by the engines, and cannot move.
    """

    def __init__(self, chunks: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer | None = None):
        """optimizer: the model's optimizer, None for a model that is not trained, which has parameters only."""
        self._chunks, self._optimizer = chunks, optimizer
        self._away: dict[Part, dict[int, tuple[torch.UntypedStorage, torch.Tensor | int]]] = {}
        """The storages that are away, by address, each with its bytes in host memory, or their number where they were
        given up."""
        self._hosts: dict[int, torch.Tensor] = {}
        """Host memory of the bytes of each storage while it is away."""

    def move_out(self, part: Part) -> int:
        """Move away what of a part is there, and returns the bytes that are free on the device for all of it. Raises
        UserError where the part is published."""
        there = [storage for storage in self._storages(part) if storage.nbytes()]
        if any(storage.device.type == "cpu" and storage.is_shared() for storage in there):
            raise UserError(f"offload: the {part} are published in shared memory, where engines read them; keep them")
        keep = torch.UntypedStorage.nbytes if part == "gradients" else self._to_host
        away = self._away.setdefault(part, {})
        away |= {storage._cdata: (storage, keep(storage)) for storage in there}
        device.synchronize()  # the copies are done before the memory is anybody else's
        for storage in there:
            storage.resize_(0)
        device.release_cache()
        return sum(kept if isinstance(kept, int) else kept.numel() for _, kept in away.values())

    def move_in(self, part: Part) -> int:
        """Move a part back, and returns the bytes that this takes on the device. Does nothing for a part that is
        there."""
        away = self._away.pop(part, {}).values()
        for storage, kept in away:
            _restore(storage, kept)
        device.synchronize()
        return sum(storage.nbytes() for storage, _ in away)

    @contextmanager
    def on_device(self, tensors: Iterable[torch.Tensor]) -> Iterator[None]:
        """Has those of these tensors that are away on the device while it is inside, to be read."""
        wanted = {tensor.untyped_storage()._cdata for tensor in tensors}
        fetched = [away[address] for away in self._away.values() for address in wanted.intersection(away)]
        for storage, kept in fetched:
            _restore(storage, kept)
        try:
            yield
        finally:
            device.synchronize()  # who has read is done before the memory is anybody else's
            for storage, _ in fetched:
                storage.resize_(0)

    def _to_host(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Copy a storage to host memory: with a GPU, to the same memory each time, because locking it takes long."""
        source, host = _bytes(storage), self._hosts.get(storage._cdata)
        if host is None or host.numel() != storage.nbytes():
            host = device.host_empty_like(source)
            if device.on_cuda():
                self._hosts[storage._cdata] = host
        return host.copy_(source, non_blocking=True)

    def _storages(self, part: Part) -> Iterator[torch.UntypedStorage]:
        """Yield each storage of a part once. Without bfloat16, the optimizer's main weights are views of the
        parameters, and belong to them."""
        tensors: dict[Part, Iterable[torch.Tensor]] = {
            "parameters": chain.from_iterable(chunk.parameters() for chunk in self._chunks),
            "gradients": (buffer.grad_data for buffer in self._buffers()),
            "optimizer": self._optimizer_tensors(),
        }
        others = chain(tensors["parameters"], tensors["gradients"]) if part == "optimizer" else ()
        seen = {tensor.untyped_storage()._cdata for tensor in others}
        for tensor in tensors[part]:
            storage = tensor.untyped_storage()
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                yield storage

    def _buffers(self) -> Iterator:
        for chunk in self._chunks:
            yield from (*chunk.buffers, *chunk.expert_parallel_buffers)

    def _optimizer_tensors(self) -> Iterator[torch.Tensor]:
        for part in self._optimizer.chained_optimizers:
            if part.optimizer is None:  # a stage without trainable parameters
                continue
            yield from chain.from_iterable(group["params"] for group in part.optimizer.param_groups)
            for state in part.optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _restore(storage: torch.UntypedStorage, kept: torch.Tensor | int) -> None:
    """Fill a storage that is away, with zeros where its bytes were given up."""
    if isinstance(kept, int):
        storage.resize_(kept)
        _bytes(storage).zero_()
    else:
        storage.resize_(kept.numel())
        _bytes(storage).copy_(kept, non_blocking=True)


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
